"""What drafters share that read pairs of a target's feature and the token behind it: EAGLE-3 and SpecBlock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.draft_vocabulary import DraftVocabulary
from blockpilot.drafters.draws import LARGEST_TREE, checked_temperature
from blockpilot.drafters.headed_checkpoint import HeadedCheckpoint
from blockpilot.drafters.room import Room
from blockpilot.memory import require_fits
from blockpilot.plan import StepPlan
from blockpilot.rows import Rows
from blockpilot.state import State
from blockpilot.targets import Target

if TYPE_CHECKING:
    from blockpilot.adapt.feedback import History

CONTEXT_ROWS = 128


class PairDrafter:
    """Pair t is (feature of position t, token t + 1). A drafter's cache holds keys and values of the pairs whose token
    is committed, t ≤ length − 2, and beyond them those of the drafts of one step, which the next overwrites. Pairs that
    a step has committed wait for the next `propose`, which runs them together: the last one guesses what comes next.

    Args:
        checkpoint: config and tensors. target: whose features it uses, and whose embedding unless it has its own.
        max_requests: slots. draft_temperature: factor on a request's temperature when drafting.

    Raises:
        ValueError: a drafter made for another target, or a draft temperature that is not positive.

    Attributes:
        beam: nodes of a tree that grow on together. folder: where it was loaded from.
        history: keeps every feature that it is given; None: only those that wait.
        non_finite: [] int64, drafts so far whose logits were not finite; above zero, the drafter overflows in this
            dtype.
    """

    kind: str
    folder: Path
    history: History | None
    largest_tree = LARGEST_TREE
    loader: Callable[[Path], HeadedCheckpoint]
    beam: int
    cache: Any  # of the layout that the implementation reads

    def __init__(
        self,
        checkpoint: HeadedCheckpoint,
        target: Target,
        max_requests: int,
        draft_temperature: float | None = None,
    ) -> None:
        self.feature_layers = checkpoint.hidden_states(target.config)
        self.draft_temperature = checked_temperature(draft_temperature)
        self.folder, self.history = checkpoint.path, None
        c = self.config = checkpoint.config
        self.fingerprint, self.block_size = checkpoint.fingerprint, c.block_size
        self.window = self._widths()
        self.vocabulary = DraftVocabulary(checkpoint.vocabulary, c.model.vocab_size, target.device)
        self._room = Room(target.embedding, max_requests, target.capacity)
        self._build(checkpoint, target, max_requests)
        device = target.device
        self.non_finite = torch.zeros((), dtype=torch.long, device=device)
        columns = torch.arange(max(*self.window, self.largest_tree) - 1, device=device)
        self._tokens = torch.zeros(max_requests + 1, len(columns), dtype=torch.long, device=device)
        self._parent = (columns - 1).expand_as(self._tokens)
        self._depth = (columns + 1).expand_as(self._tokens)
        self._chain = Proposal(self._tokens, self._parent, self._depth)
        waiting = (max_requests + 1, len(columns) + 1, c.feature_size)
        self._pending = torch.zeros(waiting, dtype=torch.float32, device=device)
        self._pending_rows = self._pending.flatten(0, 1)

    @classmethod
    def load(
        cls, folder: Path, target: Target, max_requests: int, draft_temperature: float | None = None
    ) -> PairDrafter:
        """From a folder; see `load_headed` for what is refused."""
        checkpoint = cls.loader(folder)
        need = cls.memory_bytes(checkpoint.config, max_requests, target.capacity, target.dtype)
        require_fits({"drafter": need}, target.device)
        return cls(checkpoint, target, max_requests, draft_temperature)

    def attach(self, target: Target, max_requests: int) -> None:
        """Refuse another target than it was built on, or more room than its cache has.

        Raises:
            ValueError: what was built and what is asked for.
        """
        self._room.check(target, max_requests)

    def begin(self, slot: int, features: Tensor, tokens: Sequence[int]) -> None:
        """Pairs of a prompt: features [len(tokens), n·H] of positions 0 … len(tokens) − 1.

        The last feature waits for the first anchor, the token chosen after the prompt.

        Raises:
            ValueError: features of another length or width.
        """
        expected = (len(tokens), self.config.feature_size)
        if tuple(features.shape) != expected:
            raise ValueError(f"features: expected {expected}, got {tuple(features.shape)}")
        for start in range(0, len(tokens) - 1, CONTEXT_ROWS):
            end = min(start + CONTEXT_ROWS, len(tokens) - 1)
            said = torch.tensor(tokens[start + 1 : end + 1], device=features.device)
            self._remember(slot, start, features[start:end], said)
        self._pending[slot, 0] = features[-1]
        if self.history is not None:
            self.history.begin(slot, features)

    def propose(self, state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
        """Guess columns 1 … effective − 1 of every drafting slot, or trees as deep.

        Args:
            noise: [N, V] Gumbel noise by target row, or None when every request is greedy.

        Raises:
            ValueError: blocks wider than the drafter's window, or a state with more columns than its trees have.
        """
        return self._propose(state, plan, noise, self._draft_chains)

    def _propose(
        self,
        state: State,
        plan: StepPlan,
        noise: Tensor | None,
        draft_chains: Callable[[State, StepPlan, Tensor | None], None],
    ) -> Proposal:
        """`propose` with another `_draft_chains`."""
        most, widest, columns = max(self.window), max(plan.widths), self._tokens.shape[1] + 1
        if widest > most or state.widest > columns:
            raise ValueError(
                f"plan, state: expected blocks of at most {most} in {columns} columns, "
                f"got {widest} in {state.widest}"
            )
        if plan.trees is None:
            draft_chains(state, plan, noise)
        n = state.widest - 1
        # Nothing here moves, and a few operations on tensors cost a step as much as a small product.
        if self._chain.tokens.shape[1] != n:
            self._chain = Proposal(self._tokens[:, :n], self._parent[:, :n], self._depth[:, :n])
        return self._chain if plan.trees is None else self._grow(state, plan, noise, self._chain)

    def commit(self, state: State, plan: StepPlan, features: Tensor) -> None:
        """Keep the features of what the step committed, the first `state.count[r]` rows of a slot, for `propose`."""
        rows, room = plan.draft_rows, self._pending.shape[1]
        kept = features if plan.all_draft else features.index_select(0, plan.draft_source)
        self._pending_rows.index_copy_(0, rows.places(room), kept)
        if self.history is not None:
            self.history.put(state, rows, kept)

    def own(self) -> None:
        """Copy weights that something else may read too, before the first `replace`."""
        raise NotImplementedError

    def replace(self, tensors: Mapping[str, Tensor], target: Any) -> None:
        """Guess with other weights from the next step on, written where the old ones lie.

        Args:
            tensors: all of a checkpoint's, or `HEAD` alone. target: the one it was built on.
        """
        raise NotImplementedError

    def waiting(self, state: State, rows: Rows, pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows [N] that stand for a slot's waiting pair `pair` [N] → its number t, its token, whether it exists."""
        count = torch.where(state.done, 0, state.count)[rows.slot]
        exists = pair < count
        number = torch.where(exists, state.length[rows.slot] - 1 - count + pair, 0)
        said = state.tokens[rows.slot, torch.where(exists, number + 1, 0)]
        return number, said, exists

    def _widths(self) -> tuple[int, ...]:
        """Widths that it can draft."""
        raise NotImplementedError

    @classmethod
    def memory_bytes(cls, config: Any, max_requests: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes that it will hold, at most."""
        raise NotImplementedError

    def _build(self, checkpoint: HeadedCheckpoint, target: Any, max_requests: int) -> None:
        """Lay out weights, rotary tables and the cache beside a target of the same implementation."""
        raise NotImplementedError

    def _remember(self, slot: int, start: int, features: Tensor, said: Tensor) -> None:
        """Run the pairs start … start + N − 1 of a prompt: features [N, n·H], tokens said [N]."""
        raise NotImplementedError

    def _draft_chains(self, state: State, plan: StepPlan, noise: Tensor | None) -> None:
        """Write drafts into `_tokens`."""
        raise NotImplementedError

    def _grow(self, state: State, plan: StepPlan, noise: Tensor | None, chain: Proposal) -> Proposal:
        """Trees of the slots that have a node budget, chains of the others; `chain` has the shape that is wanted."""
        raise NotImplementedError
