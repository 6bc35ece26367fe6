"""Labels by replay: one decoded answer stands in for the target at every other width.

Speculative output equals plain output, so the target's choices and features at every position are known once an
answer is. Replaying runs the engine's own loop with the drafter as it is and a table in the target's place, so
what is counted is what real decoding would count, at the cost of drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockpilot.plan import StepPlan
from blockpilot.rows import Rows
from blockpilot.state import State
from blockpilot.step import begin_block, commit_choices, committed, put_choices

if TYPE_CHECKING:
    from blockpilot.llm import LLM
    from blockpilot.targets import Target

VerifyCommit = Callable[[State, StepPlan, Tensor | None], tuple[Tensor, list[int]]]


class Answer:
    """What a target said for one request: `features` [positions, n·H], `logits` [V] after the prompt, `tokens`."""

    def __init__(self, prompt: Sequence[int], logits: Tensor, features: Tensor, room: int) -> None:
        self.prompt, self.logits = list(prompt), logits.clone()
        self.features = features.new_zeros(len(prompt) + room, features.shape[1])
        self.features[: len(prompt)] = features
        self.tokens = torch.tensor(self.prompt, device=features.device)

    def finish(self, token_ids: Sequence[int]) -> None:
        """Take the answer's ids."""
        self.tokens = self.tokens.new_tensor([*self.prompt, *token_ids])


class _Stand:
    """A target that passes on to another whatever it does not do itself."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._at: dict[int, Answer] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def _spans(self, rows: Rows, position: Tensor) -> Iterator[tuple[Answer, slice, int]]:
        """Each slot's answer, its packed rows, and the position of the first of them."""
        for slot, start, count in zip(rows.slots, rows.starts, rows.counts, strict=True):
            yield self._at[slot], slice(start, start + count), int(position[start])


class RecordingTarget(_Stand):
    """The target itself, its answers kept in the order of their prefills.

    A rejected row's features are replaced when its position is verified again after the right prefix.
    """

    def __init__(self, target: Target, room: int) -> None:
        super().__init__(target)
        self.answers: list[Answer] = []
        self._room = room

    @property
    def verify_commit(self) -> VerifyCommit | None:
        """As of the target: it too may verify and commit in one call."""
        return None if self._target.verify_commit is None else self._verify_commit

    def prefill(self, slot: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, features = self._target.prefill(slot, prompt)
        self._at[slot] = Answer(prompt, logits, features, self._room)
        self.answers.append(self._at[slot])
        return logits, features

    def verify(
        self, rows: Rows, tokens: Tensor, position: Tensor, exists: Tensor, extent: Tensor, bound: int
    ) -> tuple[Tensor, Tensor]:
        logits, features = self._target.verify(rows, tokens, position, exists, extent, bound)
        self._keep(rows, position, features)
        return logits, features

    def _verify_commit(self, state: State, plan: StepPlan, noise: Tensor | None) -> tuple[Tensor, list[int]]:
        assert self._target.verify_commit is not None
        position = _positions(state, plan.rows)
        features, report = self._target.verify_commit(state, plan, noise)
        self._keep(plan.rows, position, features)
        return features, report

    def _keep(self, rows: Rows, position: Tensor, features: Tensor) -> None:
        for answer, span, first in self._spans(rows, position):
            count = min(span.stop - span.start, len(answer.features) - first)
            answer.features[first : first + count] = features[span.start : span.start + count]


class ReplayTarget(_Stand):
    """Says again what the answers say; requests must come in the order in which they were recorded."""

    def __init__(self, target: Target, answers: Sequence[Answer]) -> None:
        super().__init__(target)
        self._waiting = iter(answers)

    def prefill(self, slot: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        answer = self._at[slot] = next(self._waiting)
        if answer.prompt != list(prompt):
            raise RuntimeError("replay: requests came in another order than they were recorded in")
        return answer.logits, answer.features[: len(prompt)]

    def verify_commit(self, state: State, plan: StepPlan, noise: Tensor | None) -> tuple[Tensor, list[int]]:
        """Beyond the end of an answer it repeats the last id: no step commits that far."""
        begin_block(state)
        some, rows = next(iter(self._at.values())), plan.rows
        ids = rows.slot.new_zeros(rows.padded)
        features = some.features.new_zeros(rows.padded, some.features.shape[1])
        for answer, span, first in self._spans(rows, _positions(state, rows)):
            at = torch.arange(first, first + span.stop - span.start, device=ids.device)
            ids[span] = answer.tokens[(at + 1).clamp_max(len(answer.tokens) - 1)]
            features[span] = answer.features[at.clamp_max(len(answer.features) - 1)]
        put_choices(state, plan, ids, torch.ones_like(ids, dtype=torch.bool))
        commit_choices(state)
        return features, committed(state, plan)


def _positions(state: State, rows: Rows) -> Tensor:
    """[N] position of each packed row's token before a step."""
    return state.length[rows.slot] - 1 + rows.column


@contextmanager
def standing_in(llm: LLM, target: Any) -> Iterator[None]:
    """Has the engine ask `target` inside the block, in single steps: captured ones ask the real target."""
    scheduler = llm._scheduler
    real = scheduler.target, scheduler.graphs
    scheduler.target, scheduler.graphs = target, None
    try:
        yield
    finally:
        scheduler.target, scheduler.graphs = real
