"""`CudaRecorder` on a stand-in for CUDA that runs at once: its order of work, its copies, its loop and fallback."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from blockpilot import recorders
from blockpilot.recorders import CudaRecorder, Ring, Uncaptured, recorder_for, say_once
from blockpilot_kernels import step_loop


class Device:
    """What the recorder asks of CUDA. `log` holds it in order; while `capturing`, a step must not run."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing = False

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            cuda_stream=77,
        )

    def event(self, enable_timing: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: self.log.append("timed" if enable_timing else "copied"),
            synchronize=lambda: self.log.append("waited"),
            elapsed_time=lambda other: 5.0,
        )

    @contextlib.contextmanager
    def capture(self, graph, pool, stream, capture_error_mode):
        assert (pool, stream.name, capture_error_mode) == ("pool", "side", "thread_local")
        self.capturing = True
        yield
        self.capturing = False
        graph.captured = True


class Graph:
    """A captured step: `device.step` runs it."""

    device: Device
    step = None

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph, self.captured = keep_graph, False

    def raw_cuda_graph(self) -> int:
        assert self.keep_graph and self.captured
        return 5

    def replay(self) -> None:
        assert self.captured
        Graph.step()


class Loop:
    """A loop on the device, as its bounds, stop word and flags say."""

    def __init__(self, graph, cursor, bounds, stopped, finished) -> None:
        assert graph.raw_cuda_graph() == 5
        self.ends = (cursor, bounds, stopped, finished)

    def launch(self, stream: int) -> None:
        assert stream == 77
        cursor, bounds, stopped, finished = self.ends
        while not finished.all() and cursor < bounds[0] and stopped < bounds[1]:
            Graph.step()


@pytest.fixture
def device(monkeypatch) -> Device:
    fake = Device()
    main = fake.stream("main")
    for name, value in {
        "Stream": lambda device: fake.stream("side"),
        "current_stream": lambda: main,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: "pool",
        "graph": fake.capture,
        "CUDAGraph": Graph,
        "Event": fake.event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(recorders, "_pinned", lambda shape: torch.full(tuple(shape), -9))
    monkeypatch.setattr(recorders, "StepLoop", Loop)
    monkeypatch.setattr(recorders, "loop_error", lambda: None)
    say_once.cache_clear()
    return fake


def counting(device: Device, ring: Ring, ends_after: int = 99):
    """A step that writes its number."""
    taken = []

    def step() -> None:
        if not device.capturing:
            taken.append(1)
            ring.rows[ring.cursor] = len(taken)
            ring.cursor.add_(1)
            ring.finished.fill_(len(taken) >= ends_after)

    Graph.step = staticmethod(step)
    return step


def new_ring() -> Ring:
    return Ring(torch.zeros(4, 2).long(), torch.zeros(1).long(), torch.zeros(3).bool())


@pytest.mark.parametrize("looped", [True, False])
def test_launches_in_flight_keep_their_own_rows(device, monkeypatch, looped, caplog):
    if not looped:
        monkeypatch.setattr(recorders, "loop_error", lambda: "no nvcc")
    recorder, ring = CudaRecorder(torch.device("cpu")), new_ring()
    step = counting(device, ring)
    recorder.warm(step)
    assert device.log == ["side waits for main", "main waits for side"]
    replay = recorder.record(step, ring)
    first, second = recorder.launch(replay, 3, ring), recorder.launch(replay, 2, ring)
    assert first() == ([[2, 2], [3, 3], [4, 4]], 0.005)
    assert second() == ([[5, 5], [6, 6]], 0.005)
    assert device.log[2:] == ["timed", "timed", "copied"] * 2 + ["waited"] * 2
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ([] if looped else [f"blockpilot: {lines[0].removeprefix('blockpilot: ')}"])
    assert looped or lines[0].endswith("no loop on the device: no nvcc")


def test_a_loop_ends_with_the_last_slot(device):
    recorder, ring = CudaRecorder(torch.device("cpu")), new_ring()
    replay = recorder.record(counting(device, ring, ends_after=2), ring)
    assert recorder.launch(replay, 4, ring)()[0] == [[1, 1], [2, 2]]
    assert recorder.launch(replay, 4, ring)()[0] == []


def test_an_interruption_ends_what_is_under_way_and_nothing_later(device):
    recorder, ring = CudaRecorder(torch.device("cpu")), new_ring()
    step = counting(device, ring)

    def interrupted() -> None:
        step()
        if int(ring.rows[0, 0]) == 1 and not device.capturing:
            recorder.interrupt()

    Graph.step = staticmethod(interrupted)
    replay = recorder.record(interrupted, ring)
    assert recorder.launch(replay, 4, ring)()[0] == [[1, 1]]
    assert len(recorder.launch(replay, 4, ring)()[0]) == 4


def test_a_driver_without_loops_is_said_once(device, monkeypatch, caplog):
    def refuses(*_):
        raise RuntimeError("CUDA error 801: operation not supported")

    monkeypatch.setattr(recorders, "StepLoop", refuses)
    recorder, ring = CudaRecorder(torch.device("cpu")), new_ring()
    step = counting(device, ring)
    for _ in range(2):
        replay = recorder.record(step, ring)
        assert len(recorder.launch(replay, 3, ring)()[0]) == 3
    assert [r.getMessage().rpartition(": ")[2] for r in caplog.records] == ["operation not supported"]


def test_without_a_ring_every_step_is_repeated(device):
    """For timing: nothing says that there is nothing left to do."""
    recorder, ring = CudaRecorder(torch.device("cpu")), new_ring()
    step = counting(device, ring, ends_after=1)
    assert len(recorder.launch(recorder.record(step, None), 4, ring)()[0]) == 4


def test_what_records_where():
    assert recorder_for(torch.device("cpu")) is None
    ring = new_ring()

    def step() -> None:
        ring.rows[ring.cursor] = 7
        ring.cursor.add_(1)

    plain = Uncaptured()
    fetch = plain.launch(plain.record(step, ring), 2, ring)
    plain.interrupt()
    assert fetch()[0] == [[7, 7], [7, 7]]


def test_words_for_how_steps_run(monkeypatch):
    monkeypatch.setattr(recorders, "loop_error", lambda: None)
    assert recorders.how().endswith("repeated by the device")
    monkeypatch.setattr(recorders, "loop_error", lambda: "it was not built")
    assert "by the host" in recorders.how() and "it was not built" in recorders.how()


def test_a_loop_without_its_library(monkeypatch, tmp_path):
    monkeypatch.setattr(step_loop, "LIBRARY", tmp_path / "absent.so")
    step_loop.loop_error.cache_clear()
    try:
        assert "nvcc" in step_loop.loop_error()
        with pytest.raises(RuntimeError, match="nvcc"):
            step_loop.StepLoop(None, *[torch.zeros(1)] * 4)
    finally:
        step_loop.loop_error.cache_clear()
