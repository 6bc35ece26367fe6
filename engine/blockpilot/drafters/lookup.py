"""Prompt lookup: what followed the last tokens of a request where they stood before is drafted again.

No model and no training: it pays where an answer repeats its prompt or itself, as in extraction, code and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from blockpilot.drafters import Drafter, Proposal
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot.targets import Target
from blockpilot_kernels.prompt_lookup import prompt_lookup

LONGEST = 8  # tokens compared at most
SURE = 3  # tokens from which a match is right more often than a drafter
WIDEST = 16
SUFFIX = "+lookup"


class PromptLookup:
    """Drafts the continuation of the longest match of a request's last tokens, however short; see `prompt_lookup`.

    It draws nothing: a sampled request accepts what the target's own draw happens to repeat.
    """

    kind = "lookup"
    fingerprint = f"lookup-1-{LONGEST}"
    block_size = 6
    window = tuple(range(1, WIDEST + 1))
    largest_tree = 0
    feature_layers: tuple[int, ...] = ()

    def attach(self, target: Target, max_requests: int) -> None:
        """Any target and any number of slots will do."""

    def begin(self, slot: int, features: Tensor, tokens: Sequence[int]) -> None:
        """Nothing to prepare: the state holds the prompt."""

    def propose(self, state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
        """See `Drafter.propose`; arbitrary drafts where nothing matches."""
        drafts = state.block[:, 1:]
        tokens = prompt_lookup(state.tokens[:, : plan.bound], state.length, drafts, 1, LONGEST)
        column = torch.arange(tokens.shape[1], device=tokens.device)
        return Proposal(tokens, (column - 1).expand_as(tokens), (column + 1).expand_as(tokens))

    def commit(self, state: State, plan: StepPlan, features: Tensor) -> None:
        """Nothing to keep: the state holds what was committed."""


@runtime_checkable
class ProposesSome(Protocol):
    """A drafter that saves the time of the requests it need not draft for."""

    def propose_some(
        self, state: State, plan: StepPlan, noise: Tensor | None, copied: Tensor | None
    ) -> Proposal:
        """As `Drafter.propose`; what is drafted for slots that are true in `copied` [R] bool is arbitrary."""


class WithLookup:
    """Another drafter, but a chain is copied from the request itself where its last `SURE` tokens stood before.

    Trees are left as they are. A drafter that can leaves the copied requests out of its pass.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._some = drafter if isinstance(drafter, ProposesSome) else None
        self.kind = drafter.kind + SUFFIX
        self.fingerprint = f"{drafter.fingerprint}{SUFFIX}-{SURE}-{LONGEST}"
        self.block_size, self.window = drafter.block_size, drafter.window
        self.largest_tree, self.feature_layers = getattr(drafter, "largest_tree", 0), drafter.feature_layers

    def attach(self, target: Target, max_requests: int) -> None:
        """See `Drafter.attach`."""
        self.drafter.attach(target, max_requests)

    def begin(self, slot: int, features: Tensor, tokens: Sequence[int]) -> None:
        """See `Drafter.begin`."""
        self.drafter.begin(slot, features, tokens)

    def propose(self, state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
        """See `Drafter.propose`."""
        nothing = torch.full_like(state.block[:, 1:], -1)
        found = prompt_lookup(state.tokens[:, : plan.bound], state.length, nothing, SURE, LONGEST)
        copied = (found >= 0).all(1)
        if plan.trees is not None:
            copied &= plan.budgets == 0
        if self._some:
            own = self._some.propose_some(state, plan, noise, copied)
        else:
            own = self.drafter.propose(state, plan, noise)
        tokens = torch.where(copied[:, None], found, own.tokens)
        return Proposal(tokens, own.parent, own.depth, own.nodes)

    def commit(self, state: State, plan: StepPlan, features: Tensor) -> None:
        """See `Drafter.commit`."""
        self.drafter.commit(state, plan, features)
