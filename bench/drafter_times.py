"""Seconds of a step's drafting in the decoding loop: phases tell them only with what a drafter makes of a prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from blockpilot import LLM
from blockpilot.drafters import Drafter, Proposal
from blockpilot.plan import StepPlan
from blockpilot.state import State

Shape = tuple[int, int | None]  # a width, and a tree's nodes
RIVAL = "eagle3"  # the kind whose drafting others are compared with


class DraftTimes:
    """Times `propose` and `commit` of a drafter that serves one request at a time.

    Attributes:
        seconds: of every step so far, by its shape and whether it sampled.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.seconds: dict[tuple[Shape, bool], list[float]] = defaultdict(list)
        self._propose, self._commit, self._drafted = drafter.propose, drafter.commit, 0.0
        for name in ("propose", "commit"):
            setattr(drafter, name, getattr(self, name))

    def propose(self, state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
        """The drafter's."""
        start = perf_counter()
        proposal = self._propose(state, plan, noise)
        self._drafted = perf_counter() - start
        return proposal

    def commit(self, state: State, plan: StepPlan, features: Tensor) -> None:
        """The drafter's."""
        start = perf_counter()
        self._commit(state, plan, features)
        shape = plan.widths[0], plan.trees[0] if plan.trees else None
        self.seconds[shape, plan.sampled].append(self._drafted + perf_counter() - start)

    def median_ms(self, shape: Shape, sampled: bool) -> float | None:
        """Of the steps of one kind; None if there were none."""
        found = self.seconds.get((shape, sampled))
        return median(found) * 1e3 if found else None


_known: WeakKeyDictionary[LLM, DraftTimes] = WeakKeyDictionary()


def times_of(llm: LLM) -> DraftTimes:
    """The clock of an engine's drafter, which runs from the first call on; it does not keep the engine."""
    if llm not in _known:
        assert llm.drafter is not None  # only plain decoding has none
        _known[llm] = DraftTimes(llm.drafter)
    return _known[llm]


def add_draft_times(
    results: dict[str, Any], engines: Mapping[str, LLM], shapes: Mapping[str, Shape | None]
) -> None:
    """`draft_ms` of every arm's median step, and `draft_ratio`, that over EAGLE-3's of the same shape, where known."""
    for temperature, result in results.items():
        overall = result["overall"]
        rivals: dict[Shape | None, float | None] = {}
        for arm, found in overall.items():
            shape, llm = shapes[arm], engines[arm]
            found["draft_ms"] = shape and times_of(llm).median_ms(shape, float(temperature) > 0)
            if llm.drafter is not None and llm.drafter.kind == RIVAL:
                rivals.setdefault(shape, found["draft_ms"])
        for arm, found in overall.items():
            rival = rivals.get(shapes[arm])
            found["draft_ratio"] = found["draft_ms"] / rival if found["draft_ms"] and rival else None
