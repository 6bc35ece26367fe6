"""Captured steps: replayed several at a time without the host, which reads what they committed afterwards.

A family of graphs is a plan: slots 0 … n − 1, n a power of two, blocks as wide as the widest request's, keys up to a
bucket. Requests that are narrower, finished or not there have columns beyond their effective width, which exist for
nobody, so a family serves every mixture that fits in it, bit for bit. A launch is some replays of one graph, each of
which leaves its commits in a row of a ring; the ring is copied to the host behind them, and the host reads that copy
while the next launch runs.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from blockpilot.drafters import Drafter
from blockpilot.plan import StepPlan
from blockpilot.request import Handle
from blockpilot.rows import kv_bound
from blockpilot.state import State
from blockpilot.step import Report, StepClock, run_step
from blockpilot.targets import Target

# Seconds that a launch may take: longer than the host's work between two, short beside what a request notices. It is
# also what a finished request wastes at most, as the host learns of a stop only afterwards.
LATENCY = 0.008
DEPTH = 16  # steps of a launch at most
FAMILIES = 24  # graphs kept, the most recently used; each holds memory of the device
SHORTEST = 512  # keys of the smallest bucket: what one program of the attention kernel takes

Step = Callable[[], None]
Fetch = Callable[[], tuple[list[list[int]], float]]
_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """How steps are captured and started."""

    def warm(self, step: Step) -> None:
        """Run a step that may compile kernels and allocate what a captured one finds in place."""

    def record(self, step: Step) -> Step:
        """Capture a step, which does not run it → what replays it."""

    def launch(self, replay: Step, steps: int, ring: Tensor) -> Fetch:
        """Start `steps` replays → what waits for them and returns that many rows of the ring, and their seconds."""


class Uncaptured:
    """Runs steps as they are, at once: on a CPU, and the meaning of the others."""

    def warm(self, step: Step) -> None:
        """See `Recorder.warm`."""
        step()

    def record(self, step: Step) -> Step:
        """See `Recorder.record`."""
        return step

    def launch(self, replay: Step, steps: int, ring: Tensor) -> Fetch:
        """See `Recorder.launch`."""
        start = time.perf_counter()
        for _ in range(steps):
            replay()
        rows = ring[:steps].tolist()
        seconds = time.perf_counter() - start
        return lambda: (rows, seconds)


class CudaRecorder:
    """CUDA graphs in one memory pool: they run one after the other and leave nothing in it for each other."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._pinned: list[Tensor] = []
        self._launches = 0

    def warm(self, step: Step) -> None:
        """On a side stream, as capturing is: what libraries allocate by stream is there."""
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            step()
        main.wait_stream(self._side)

    def record(self, step: Step) -> Step:
        """See `Recorder.record`; RuntimeError where something in the step cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        # Another thread of the program may use CUDA meanwhile.
        with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
            step()
        return graph.replay

    def launch(self, replay: Step, steps: int, ring: Tensor) -> Fetch:
        """See `Recorder.launch`. Two pinned copies take turns: one is read while the other is written."""
        if not self._pinned:
            self._pinned = [torch.empty(ring.shape, dtype=ring.dtype, pin_memory=True) for _ in range(2)]
        host = self._pinned[self._launches % 2][:steps]
        self._launches += 1
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            replay()
        host.copy_(ring[:steps], non_blocking=True)
        end.record()

        def fetch() -> tuple[list[list[int]], float]:
            end.synchronize()
            return host.tolist(), begin.elapsed_time(end) / 1e3

        return fetch


def recorder_for(device: torch.device) -> Recorder | None:
    """What captures steps on a device; None where they run as they are."""
    return CudaRecorder(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class Launch:
    """Steps that were started for `handles`, which may end before the host reads what they did."""

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
        self._families: OrderedDict[StepPlan, Step] = OrderedDict()
        self._seconds: dict[StepPlan, float] = {}
        slots, widest = state.block.shape
        self._ring = state.tokens.new_zeros(DEPTH, slots * (4 + widest))
        self._cursor = state.tokens.new_zeros(1)
        self._said: set[str] = set()

    def takes(self, handles: Mapping[int, Handle]) -> bool:
        """Whether launches serve these requests; a line says once why not."""
        if any(h.params.logprobs is not None for h in handles.values()):
            self._say(
                "requests with log-probabilities take single steps, uncaptured: their scores are read each time"
            )
            return False
        if any(h.stats.tree for h in handles.values()):
            self._say("requests that draft trees take single steps, uncaptured")
            return False
        return True

    def launch(self, plan: StepPlan, handles: Mapping[int, Handle], most: int) -> Launch:
        """Start up to `most` steps; of a family that is new, one as it is, before it is captured."""
        step = partial(self._step, plan)
        replay, steps = self._families.get(plan), min(most, self._steps(plan))
        self._cursor.zero_()
        if replay is not None:
            self._families.move_to_end(plan)
            return Launch(handles, steps, self._timed(plan, self._recorder.launch(replay, steps, self._ring)))
        fetch = self._recorder.launch(partial(self._recorder.warm, step), 1, self._ring)
        self._families[plan] = self._record(step)
        if len(self._families) > FAMILIES:
            oldest, _ = self._families.popitem(last=False)
            self._seconds.pop(oldest, None)
        return Launch(handles, 1, fetch)

    def read(self, launch: Launch) -> tuple[list[dict[int, Report]], float]:
        """Wait for a launch → what each of its steps did, by slot that took part, and seconds of a step."""
        rows, seconds = launch.fetch()
        return [self._reports(row) for row in rows], seconds / launch.steps

    def _step(self, plan: StepPlan) -> None:
        """A step, and its commits in the ring's next row."""
        s = self.state
        run_step(s, plan, self.target, self.drafter if plan.drafts else None, StepClock())
        row = torch.cat([s.count, s.accepted, s.effective, s.finish, s.choice.flatten()])
        self._ring.index_copy_(0, self._cursor, row[None])
        self._cursor += 1

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

    def _record(self, step: Step) -> Step:
        try:
            return self._recorder.record(step)
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            self._say(f"a step could not be captured, so the host launches its kernels one by one: {reason}")
            return step

    def _steps(self, plan: StepPlan) -> int:
        """How many steps the latency leaves room for, once one was timed."""
        seconds = self._seconds.get(plan)
        return max(1, min(DEPTH, int(self.latency / seconds))) if seconds else 1

    def _timed(self, plan: StepPlan, fetch: Fetch) -> Fetch:
        def timed() -> tuple[list[list[int]], float]:
            rows, seconds = fetch()
            self._seconds[plan] = seconds / len(rows)
            return rows, seconds

        return timed

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _log.warning("blockpilot: %s", line)


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
