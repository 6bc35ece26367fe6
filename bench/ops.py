"""Microbenchmarks of the kernel ops, backend by backend.

Every backend's result is compared with the reference first; a backend that differs gets no speed-up. Integers
and choices must be equal; noise may differ in the last bits of a float, so its tolerance is 1e-5.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockpilot.cli.console import number, table
from blockpilot_kernels import dispatch
from op_cases import CASES, Case

TOLERANCE = 1e-5


def run(quick: bool) -> dict[str, Any]:
    """`cases`: op, shape, device, backend, matches, microseconds, speedup over the reference."""
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for case in CASES:
            for device in devices():
                rows += _measure(case, device, backends_of(case, device), seconds=0.1 if quick else 0.5)
    return {"ok": all(row["matches"] for row in rows), "cases": rows}


def devices() -> tuple[str, ...]:
    """What ops can run on here."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def backends_of(case: Case, device: str) -> list[str]:
    """The backends of a case that run on a device, the reference first."""
    name = {"cpu": "cpp", "cuda": "triton"}[device]
    error = dispatch.extension_error() if name == "cpp" else dispatch.triton_error()
    return ["reference"] + ([name] if error is None and name in case.backends else [])


def _measure(case: Case, device: str, backends: list[str], seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with dispatch.forced("reference"):
        expected = case.make(device)().clone()
    for backend in backends:
        with dispatch.forced(backend):
            call = case.make(device)
            matches = equal(call(), expected)
            times = _times(call, device, seconds)
        row: dict[str, Any] = {
            "op": case.op,
            "shape": case.shape,
            "device": device,
            "backend": backend,
            "matches": matches,
        }
        row |= {"median_us": statistics.median(times), "least_us": min(times)}
        row["speedup"] = rows[0]["median_us"] / row["median_us"] if rows and matches else None
        rows.append(row)
    return rows


def equal(got: Tensor, expected: Tensor) -> bool:
    """Bit for bit, or for floats within `TOLERANCE`."""
    if got.is_floating_point():
        return torch.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    return torch.equal(got, expected)


def _times(call: Callable[[], Tensor], device: str, seconds: float) -> list[float]:
    """Microseconds of repeated calls, at least five, for about `seconds`."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def show(report: dict[str, Any]) -> None:
    """One row a case and backend."""
    rows = [
        [
            *(row[key] for key in ("op", "shape", "device", "backend")),
            "yes" if row["matches"] else "NO",
            number(row["median_us"], 1),
            number(row["speedup"], 1),
        ]
        for row in report["cases"]
    ]
    table("kernel ops", rows, left=("op", "shape", "device", "backend", "same"), right=("median us", "ratio"))
