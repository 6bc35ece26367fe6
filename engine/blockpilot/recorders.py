"""How steps are captured and repeated: CUDA graphs, looped on the device where that can be, or plain calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from blockpilot_kernels.step_loop import StepLoop, loop_error

Step = Callable[[], None]
Replay = Callable[[int], None]
Fetch = Callable[[], tuple[list[list[int]], float]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ring:
    """What the steps of a launch leave behind.

    Attributes:
        rows: [depth, K] int64, one a step. cursor: [1] int64, how many; a step writes its row there and advances it.
        finished: [R] bool, slots that need no further step.
    """

    rows: Tensor
    cursor: Tensor
    finished: Tensor


class Recorder(Protocol):
    """How steps are captured and started."""

    def warm(self, step: Step) -> None:
        """Run a step that may compile kernels and allocate what a captured one finds in place."""

    def record(self, step: Step, ring: Ring | None) -> Replay:
        """Capture a step, which does not run it → what runs it so many times; given its ring, fewer where no slot
        needs more, if the device can tell."""

    def launch(self, replay: Replay, steps: int, ring: Ring) -> Fetch:
        """Start up to `steps` → what waits for them and returns their rows, and their seconds."""

    def interrupt(self) -> None:
        """Have the launches under way end after a step, if they can."""


class Uncaptured:
    """Runs steps as they are, at once: on a CPU, and the meaning of the others."""

    def warm(self, step: Step) -> None:
        """See `Recorder.warm`."""
        step()

    def record(self, step: Step, ring: Ring | None) -> Replay:
        """See `Recorder.record`."""
        return repeating(step)

    def launch(self, replay: Replay, steps: int, ring: Ring) -> Fetch:
        """See `Recorder.launch`."""
        start = time.perf_counter()
        ring.cursor.zero_()
        replay(steps)
        rows = ring.rows[: int(ring.cursor)].tolist()
        seconds = time.perf_counter() - start
        return lambda: (rows, seconds)

    def interrupt(self) -> None:
        """Nothing is under way."""


class CudaRecorder:
    """CUDA graphs in one memory pool: they run one after the other and leave nothing in it for each other."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # Steps of a launch at most, and its number.
        self._bounds = torch.zeros(2, dtype=torch.int64, device=device)
        self._stopped = _pinned((1,)).zero_()  # launches up to this one are to end
        self._launches = 0
        self._copies: list[tuple[Tensor, Tensor]] = []

    def warm(self, step: Step) -> None:
        """On a side stream, as capturing is: what libraries allocate by stream is there."""
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            step()
        main.wait_stream(self._side)

    def record(self, step: Step, ring: Ring | None) -> Replay:
        """See `Recorder.record`; RuntimeError where something in the step cannot be captured."""
        lacking = loop_error()
        graph = torch.cuda.CUDAGraph(keep_graph=True) if lacking is None else torch.cuda.CUDAGraph()
        # Another thread of the program may use CUDA meanwhile.
        with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
            step()
        if ring is not None and lacking is None:
            try:
                loop = StepLoop(graph, ring.cursor, self._bounds, self._stopped, ring.finished)
                return lambda steps: loop.launch(torch.cuda.current_stream().cuda_stream)
            except RuntimeError as error:
                lacking = str(error)
        if ring is not None:
            say_once(f"the host repeats captured steps, as there is no loop on the device: {lacking}")
        return repeating(graph.replay)

    def launch(self, replay: Replay, steps: int, ring: Ring) -> Fetch:
        """See `Recorder.launch`. Two pinned copies take turns: one is read while the other is written."""
        if not self._copies:
            shapes = ring.rows.shape, ring.cursor.shape
            self._copies = [(_pinned(shapes[0]), _pinned(shapes[1])) for _ in range(2)]
        rows, count = self._copies[self._launches % 2]
        self._launches += 1
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copied = torch.cuda.Event()
        ring.cursor.zero_()
        self._bounds[0] = steps
        self._bounds[1] = self._launches
        begin.record()
        replay(steps)
        end.record()
        rows[:steps].copy_(ring.rows[:steps], non_blocking=True)
        count.copy_(ring.cursor, non_blocking=True)
        copied.record()

        def fetch() -> tuple[list[list[int]], float]:
            copied.synchronize()
            return rows[: int(count)].tolist(), begin.elapsed_time(end) / 1e3

        return fetch

    def interrupt(self) -> None:
        """A loop on the device looks at this word before every step; launches that follow have a higher number."""
        self._stopped[0] = self._launches


def recorder_for(device: torch.device) -> Recorder | None:
    """What captures steps on a device; None where they run as they are."""
    return CudaRecorder(device) if device.type == "cuda" else None


def how() -> str:
    """How steps run on CUDA, in words."""
    error = loop_error()
    by = "the device" if error is None else f"the host (the device's own loop is absent: {error})"
    return f"steps captured as CUDA graphs and repeated by {by}"


def repeating(step: Step) -> Replay:
    """A step, called so many times."""

    def replay(steps: int) -> None:
        for _ in range(steps):
            step()

    return replay


@cache
def say_once(line: str) -> None:
    """A warning, the first time."""
    _log.warning("blockpilot: %s", line)


def _pinned(shape: Sequence[int]) -> Tensor:
    """Memory of the host that the device reads and writes."""
    return torch.empty(tuple(shape), dtype=torch.int64, pin_memory=True)
