"""The CUDA C++ compiles for every architecture it is meant for, by nvcc alone, without spills; and loads."""

from __future__ import annotations

import ctypes
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from blockpilot_kernels import step_loop

CUDA = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
ARCHITECTURES = ("80", "90a", "100a")

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles(architecture, tmp_path):
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", "-std=c++17", "-O3", "-Werror=all-warnings", code, "-Xptxas=-v", "-cubin"]
    made = tmp_path / "loop.cubin"
    ended = subprocess.run(
        [*command, "-o", str(made), str(CUDA / "step_loop.cu")], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"(\d+) bytes spill", ended.stderr) == ["0", "0"]
    assert int(re.findall(r"Used (\d+) registers", ended.stderr)[0]) <= 32 and made.stat().st_size > 0


@needs_nvcc
def test_the_library_loads_and_names_its_errors(tmp_path, monkeypatch):
    """Without a driver too: creating a graph then fails with its reason."""
    built = runpy.run_path(str(CUDA / "build.py"))["build"](tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [built.name]
    monkeypatch.setattr(step_loop, "LIBRARY", built)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "raw_cuda_graph", lambda self: 0, raising=False)
    for function in (step_loop.loop_error, step_loop._library):
        function.cache_clear()
    try:
        assert step_loop.loop_error() is None
        library = step_loop._library()
        for name in ("create", "launch", "destroy", "error"):
            assert isinstance(getattr(library, f"blockpilot_loop_{name}"), ctypes._CFuncPtr)
        if not torch.cuda.is_available():
            graph = type("Graph", (), {"raw_cuda_graph": lambda self: 0})()
            with pytest.raises(RuntimeError, match=r"CUDA error \d+: .*driver"):
                step_loop.StepLoop(graph, *[torch.zeros(1)] * 4)
    finally:
        for function in (step_loop.loop_error, step_loop._library):
            function.cache_clear()


def test_architectures_are_those_that_are_built():
    assert runpy.run_path(str(CUDA / "build.py"))["ARCHITECTURES"] == ARCHITECTURES


def test_without_nvcc_the_build_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="nvcc"):
        runpy.run_path(str(CUDA / "build.py"))["build"](tmp_path)
    assert not list(tmp_path.iterdir())
