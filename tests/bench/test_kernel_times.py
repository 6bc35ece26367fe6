"""`bench/kernel_times.py` under pytest-benchmark, and the cases that it shares with `bench/run.py ops`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blockpilot_kernels
import kernel_times as kernels
import op_cases
import ops
import run as bench_run
from blockpilot_kernels import dispatch

WHOLE_PASSES = {"packed_decoder"}  # measured by `throughput`
# pytest-benchmark measures nothing in a process that takes itself for one of xdist's.
ALONE = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
QUICK = ["--benchmark-max-time=0.01", "--benchmark-min-rounds=2", "-p", "no:xdist", "-q"]


def test_every_op_has_a_case():
    folders = {m.name for m in pkgutil.iter_modules(blockpilot_kernels.__path__) if m.ispkg} - WHOLE_PASSES
    named = {case.op for case in op_cases.CASES}
    lacking = {
        f for f in folders if not named & set(importlib.import_module(f"blockpilot_kernels.{f}").__all__)
    }
    assert not lacking


def test_backends_of_a_case():
    case = next(c for c in op_cases.CASES if c.op == "choose")
    assert ops.backends_of(case, "cuda") == ["reference", "triton"]
    inside = next(c for c in op_cases.CASES if c.op == "swiglu")
    assert ops.backends_of(inside, "cpu") == ["reference"]


def test_results_agree_and_are_timed(monkeypatch, tmp_path):
    """The cheap cases through the registry, with times."""
    monkeypatch.setattr(op_cases, "VOCAB", 200)
    monkeypatch.setattr(ops, "_times", lambda *_: [1.0])
    file = tmp_path / "ops.json"
    assert bench_run.main(["ops", "--quick", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {row["op"] for row in report["cases"]} == {case.op for case in op_cases.CASES}
    if dispatch.extension_error() is None:
        assert {row["op"] for row in report["cases"] if row["backend"] == "cpp"} >= {"choose", "draft_tree"}


def test_a_clock_shows_the_device_s_times():
    clock = kernels.Clock()
    assert clock() <= clock()
    with clock.showing([0.25, 2.0]):
        readings = [clock() for _ in range(4)]
    assert [readings[1] - readings[0], readings[3] - readings[2]] == [0.25, 2.0]
    assert clock() <= clock()


@pytest.mark.skipif(
    not importlib.util.find_spec("pytest_benchmark"), reason="pytest-benchmark is not installed"
)
def test_under_pytest_benchmark(tmp_path):
    file = tmp_path / "times.json"
    script = str(Path(kernels.__file__))
    chosen = ["-k", "accept_commit or swiglu", f"--benchmark-json={file}"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", script, *QUICK, *chosen], capture_output=True, text=True, env=ALONE
    )
    assert ended.returncode == 0, ended.stdout
    found = json.loads(file.read_text())["benchmarks"]
    assert {b["params"]["backend"] for b in found} >= {"reference"}
    assert len({b["group"] for b in found}) == 3 and all(b["stats"]["min"] > 0 for b in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a device that is not here")
@pytest.mark.skipif(
    not importlib.util.find_spec("pytest_benchmark"), reason="pytest-benchmark is not installed"
)
def test_device_times_reach_the_report(tmp_path):
    """The branch of a CUDA device, with its times given."""
    given = [0.5, 0.25, 0.75]
    script = tmp_path / "test_given.py"
    script.write_text(
        "import sys, types, triton.testing, torch\n"
        f"sys.path[:0] = [{str(Path(kernels.__file__).parent)!r}]\n"
        "import kernel_times as kernels\n"
        f"triton.testing.do_bench_cudagraph = lambda call, return_mode: {[1e3 * s for s in given]!r}\n"
        "case = next(c for c in kernels.CASES if c.op == 'swiglu')\n"
        "on_cpu = types.SimpleNamespace(op=case.op, shape=case.shape, make=lambda device: case.make('cpu'))\n"
        "kernels.MEASURED[:] = []\n"
        "import pytest\n"
        "@pytest.mark.benchmark(timer=kernels.CLOCK)\n"
        "def test_it(benchmark):\n"
        "    kernels.test_op(benchmark, on_cpu, 'cuda', 'reference')\n"
    )
    file = tmp_path / "times.json"
    command = [sys.executable, "-m", "pytest", str(script), *QUICK, f"--benchmark-json={file}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=ALONE)
    assert ended.returncode == 0, ended.stdout
    (found,) = json.loads(file.read_text())["benchmarks"]
    assert sorted(found["stats"]["data"]) == sorted(given)
