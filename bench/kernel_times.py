"""Every kernel op by pytest-benchmark: `python -m pytest bench/kernel_times.py --benchmark-sort=name`.

The cases are those of `bench/run.py ops`; a backend that differs from the reference fails. On a CPU calls are timed by
the clock; on CUDA the device is, through a captured graph, so that launching does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from blockpilot_kernels import dispatch
from op_cases import CASES, Case
from ops import backends_of, devices, equal

ROUNDS = 200  # of a device's times, at most


class Clock:
    """A timer for pytest-benchmark that can stand for another one: each pair of readings lies a given time apart."""

    def __init__(self) -> None:
        self._readings: Iterator[float] | None = None

    def __call__(self) -> float:
        return time.perf_counter() if self._readings is None else next(self._readings)

    @contextmanager
    def showing(self, seconds: Sequence[float]) -> Iterator[None]:
        """Inside, the readings before and after the i-th thing that is timed differ by `seconds[i]`."""
        self._readings = (edge for duration in seconds for edge in (0.0, duration))
        try:
            yield
        finally:
            self._readings = None


CLOCK = Clock()
MEASURED = [(case, device, b) for case in CASES for device in devices() for b in backends_of(case, device)]


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(
    ("case", "device", "backend"), MEASURED, ids=[f"{c.op}-{c.shape}-{d}-{b}" for c, d, b in MEASURED]
)
def test_op(benchmark: Any, case: Case, device: str, backend: str) -> None:
    """One op on one shape, device and backend."""
    benchmark.group = f"{case.op} {case.shape}, {device}"
    with torch.inference_mode():
        with dispatch.forced("reference"):
            expected = case.make(device)().clone()
        with dispatch.forced(backend):
            call = case.make(device)
            assert equal(call(), expected)
            if device == "cpu":
                benchmark(call)
                return
            from triton.testing import do_bench_cudagraph

            seconds = [ms / 1e3 for ms in do_bench_cudagraph(call, return_mode="all")[:ROUNDS]]
    with CLOCK.showing(seconds):
        benchmark.pedantic(lambda: None, rounds=len(seconds))
