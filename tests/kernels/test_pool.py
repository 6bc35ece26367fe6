"""The pool of threads behind the packed decoder: callers at once, forks, and changing numbers of threads."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from blockpilot_kernels import dispatch
from tests.kernels.packed import make_product, threads

if dispatch.extension_error() is not None:
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)

TASKS = Path("/proc/self/task")


def test_callers_at_once():
    """Each gets its own results, whether the pool is free for it or not."""
    products = [make_product(kind, 400, 64, seed=i) for i, kind in enumerate(("F32", "Q8_0", "Q4_0"))]
    gen = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, 64, generator=gen) for _ in range(8)]
    expected = [[product(x) for x in inputs] for product in products]

    def work(i: int) -> bool:
        assert torch.get_num_threads() == 3
        return all(
            torch.equal(products[i](x), y)
            for _ in range(40)
            for x, y in zip(inputs, expected[i], strict=True)
        )

    with threads(3), ThreadPoolExecutor(3) as callers:
        assert list(callers.map(work, range(3))) == [True] * 3


def test_a_chunk_that_throws(tmp_path: Path) -> None:
    """The exception reaches the caller once no chunk runs any more, and later loops use every thread."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no g++ or clang++ to compile the driver with")
    program, here = tmp_path / "driver", Path(__file__).resolve()
    sources = [here.with_name("pool_driver.cpp"), here.parents[2] / "csrc" / "cpu" / "pool.cpp"]
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{sources[1].parent}", "-o", program]
    subprocess.run([compiler, *sources, *flags], check=True)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_numbers_of_threads_between_calls():
    """More or fewer than before or than there are cores, awake or asleep."""
    product = make_product("Q4_1", 700, 64)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    expected = product(x)
    for count in (1, 4, 2, 9, 1, 3, 9, 2):
        with threads(count):
            for pause in (0.0, 0.0, 0.0, 0.001):
                assert torch.equal(product(x), expected)
                time.sleep(pause)


def exit_code(child: int, seconds: float) -> int:
    """A child's exit code; it is killed if it takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the child was still busy after {seconds} s")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own():
    product = make_product("Q8_0", 700, 64)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    with threads(3):
        expected = product(x)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                torch.set_num_threads(3)  # the engine takes a child down to one
                before = len(list(TASKS.iterdir())) if TASKS.is_dir() else 0
                right = all(torch.equal(product(x), expected) for _ in range(50))
                helped = not TASKS.is_dir() or len(list(TASKS.iterdir())) == before + 2
                os._exit(0 if right and helped else 1 if right else 2)
            assert exit_code(child, 60) == 0
        assert torch.equal(product(x), expected)
