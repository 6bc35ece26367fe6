"""Captured steps: replayed several at a time without the host, which reads what they committed afterwards.

A family of graphs is a plan: slots 0 … n − 1, n a power of two, blocks as wide as the widest request's, keys up to a
bucket. Requests that are narrower, finished or not there have columns beyond their effective width, which exist for
nobody, so a family serves every mixture that fits in it, bit for bit. A launch is some replays of one graph, each of
which leaves its commits in a row of a ring; the ring is copied to the host behind them, and the host reads that copy
while the next launch runs. Where the device repeats the step by itself, a launch ends with the last request in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from blockpilot.drafters import Drafter
from blockpilot.plan import StepPlan
from blockpilot.recorders import Fetch, Recorder, Replay, Ring, Step, repeating, say_once
from blockpilot.request import Handle
from blockpilot.rows import kv_bound
from blockpilot.state import State
from blockpilot.step import Report, StepClock, run_step
from blockpilot.targets import Target

# Seconds that a launch may take: longer than the host's work between two, short beside what a request notices. It is
# also what the device wastes at most behind a stop that only the host knows of.
LATENCY = 0.008
DEPTH = 16  # steps of a launch at most
FAMILIES = 24  # graphs kept, the most recently used; each holds memory of the device
SHORTEST = 512  # keys of the smallest bucket: what one program of the attention kernel takes


@dataclass(frozen=True)
class Launch:
    """Up to `steps` steps that were started for `handles`, which may end before the host reads what they did."""

    handles: Mapping[int, Handle]
    steps: int
    fetch: Fetch


class Graphs:
    """Captured steps of one engine, by family.

    Args:
        recorder: `CudaRecorder` on CUDA. latency: seconds that a launch may take; with 0, one is one step, and awaited.
    """

    def __init__(
        self,
        state: State,
        target: Target,
        drafter: Drafter | None,
        recorder: Recorder,
        latency: float = LATENCY,
    ) -> None:
        self.state, self.target, self.drafter, self.latency = state, target, drafter, latency
        self._recorder = recorder
        self._families: OrderedDict[StepPlan, Replay] = OrderedDict()
        self._seconds: dict[StepPlan, float] = {}
        slots, widest = state.block.shape
        rows = state.tokens.new_zeros(DEPTH, slots * (4 + widest))
        self._ring = Ring(rows, state.tokens.new_zeros(1), state.done)

    def takes(self, handles: Mapping[int, Handle]) -> bool:
        """Whether launches serve these requests; a line says once why not."""
        if any(h.params.logprobs is not None for h in handles.values()):
            say_once(
                "requests with log-probabilities take single steps, uncaptured: each one's scores are read"
            )
            return False
        if any(h.stats.tree for h in handles.values()):
            say_once("requests that draft trees take single steps, uncaptured")
            return False
        return True

    def launch(self, plan: StepPlan, handles: Mapping[int, Handle], most: int) -> Launch:
        """Start up to `most` steps; of a family that is new, one as it is, before it is captured."""
        step, replay = partial(self._step, plan), self._families.get(plan)
        if replay is not None:
            self._families.move_to_end(plan)
            steps = min(most, self._steps(plan))
            return Launch(handles, steps, self._timed(plan, self._recorder.launch(replay, steps, self._ring)))
        warm = repeating(partial(self._recorder.warm, step))
        started = Launch(handles, 1, self._recorder.launch(warm, 1, self._ring))
        self._families[plan] = self._record(step)
        if len(self._families) > FAMILIES:
            oldest, _ = self._families.popitem(last=False)
            self._seconds.pop(oldest, None)
        return started

    def interrupt(self) -> None:
        """Have what is under way end soon: a request in it was cancelled."""
        self._recorder.interrupt()

    def read(self, launch: Launch) -> tuple[list[dict[int, Report]], float]:
        """Wait for a launch → what each of its steps did, by slot that took part, and seconds of a step."""
        rows, seconds = launch.fetch()
        return [self._reports(row) for row in rows], seconds / max(1, len(rows))

    def _step(self, plan: StepPlan) -> None:
        """A step, and its commits in the ring's next row."""
        s = self.state
        run_step(s, plan, self.target, self.drafter if plan.drafts else None, StepClock())
        row = torch.cat([s.count, s.accepted, s.effective, s.finish, s.choice.flatten()])
        self._ring.rows.index_copy_(0, self._ring.cursor, row[None])
        self._ring.cursor.add_(1)

    def _reports(self, row: list[int]) -> dict[int, Report]:
        slots, widest = self.state.block.shape
        count, accepted, effective, finish = (row[i * slots : (i + 1) * slots] for i in range(4))
        found = {}
        for slot in range(slots):
            if effective[slot]:
                at = 4 * slots + slot * widest
                tokens = row[at : at + count[slot]]
                found[slot] = Report(accepted[slot], effective[slot], finish[slot], tokens)
        return found

    def _record(self, step: Step) -> Replay:
        try:
            return self._recorder.record(step, self._ring)
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            say_once(f"a step could not be captured, so the host launches its kernels one by one: {reason}")
            return repeating(step)

    def _steps(self, plan: StepPlan) -> int:
        """How many steps the latency leaves room for, once one was timed."""
        seconds = self._seconds.get(plan)
        return max(1, min(DEPTH, int(self.latency / seconds))) if seconds else 1

    def _timed(self, plan: StepPlan, fetch: Fetch) -> Fetch:
        def timed() -> tuple[list[list[int]], float]:
            rows, seconds = fetch()
            if rows:
                self._seconds[plan] = seconds / len(rows)
            return rows, seconds

        return timed


def horizon(handles: Mapping[int, Handle], before: Launch | None, capacity: int) -> tuple[int, int]:
    """Steps that are certain to be of use to some request, at most `DEPTH`, and the keys of the longest after them.

    A stop may come any time, but without one a request is not over before its budget is spent; 0 where the launch
    under way, `before`, may spend all of them.
    """
    useful, longest = 0, 0
    for slot, handle in handles.items():
        p, width, known = handle.params, handle.stats.width, len(handle.prompt) + len(handle.token_ids)
        limit = capacity if p.max_new_tokens is None else min(len(handle.prompt) + p.max_new_tokens, capacity)
        under_way = before.steps * width if before and before.handles.get(slot) is handle else 0
        useful = max(useful, -(-(limit - known - under_way) // width))
        longest = max(longest, min(limit, known + under_way + DEPTH * width))
    return min(useful, DEPTH), longest


def slot_bucket(highest: int, slots: int) -> int:
    """Slots of a family that has slot `highest`: a power of two, or all there are."""
    return min(1 << highest.bit_length(), slots)


def key_bucket(longest: int, capacity: int) -> int:
    """Keys of a family: `SHORTEST` or a power of two times that, or all that a slot has; at least `longest`."""
    bound = SHORTEST
    while bound < longest:
        bound *= 2
    return min(bound, kv_bound(capacity))
