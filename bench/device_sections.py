"""The sections of the device check, by name; what each of them shows is in its docstring."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockpilot import LLM, SamplingParams
from blockpilot.cli.machine import hardware, versions
from blockpilot.recorders import how
from blockpilot.targets import hub
from blockpilot_kernels import dispatch
from blockpilot_kernels.step_loop import LIBRARY
from device_check import HIDDEN, SECTIONS, TAIL, bounded
from device_exact import by_the_host, compare, loop_is_the_same, tiny_pair
from device_kernels import cases
from device_setup import Put, Setup, Skip
from device_steps import steps

Section = Callable[[Setup, Put], None]
ROOT = Path(__file__).resolve().parents[1]
# What runs every backend through the same cases; -k takes those of the device.
TESTS = (
    "tests/kernels/test_accept_commit.py",
    "tests/kernels/test_block_attention.py",
    "tests/kernels/test_norm_rope.py",
    "tests/kernels/test_choose.py",
    "tests/kernels/test_filters.py",
    "tests/kernels/test_noise.py",
    "tests/kernels/test_no_host_sync.py",
    "tests/engine/test_graphs.py",
)
CHOSEN = "triton or captured_answers"
LARGEST_ERROR = 1e-2  # of a result, by norm, where operands are bfloat16; float32 stays below 1e-5
GEMM = 8192


def find_section(name: str) -> Section:
    """The section of that name."""
    known: dict[str, Section] = {
        "probe": probe,
        "tests": kernel_tests,
        "errors": errors,
        "exact": exact,
        "sanitizer": sanitizer,
        "kernels": kernel_times,
        "smollm2": smollm2,
        "small_step": small_step,
    }
    assert known.keys() <= {*SECTIONS, *HIDDEN}  # what the command line offers
    return known.get(name) or partial(steps, name)


def probe(setup: Setup, put: Put) -> None:
    """What is here: device, driver, versions, which backend runs what and why; bandwidth of a copy, and a product."""
    put("gpu", "cpu" if setup.dry else torch.cuda.get_device_name())
    put("hardware", hardware())
    put("versions", versions())
    put("ops", dispatch.explain(setup.device.type))
    put("loop", "not built in a dry run" if setup.dry else _build_loop())
    put("steps", how())
    put("tools", {name: shutil.which(name) for name in ("nvcc", "compute-sanitizer", "ncu")})
    if not setup.dry:
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        put("memory", {"free": free, "total": total, "l2": getattr(properties, "L2_cache_size", None)})
        put("capability", f"{properties.major}.{properties.minor}")
    with torch.inference_mode():
        put("copy_bytes_per_s", setup.copy_bandwidth())
        n = setup.size(GEMM, 32)
        a, b = (torch.empty(n, n, dtype=torch.bfloat16, device=setup.device).normal_() for _ in "ab")
        put("bf16_flops", 2 * n**3 / setup.milliseconds([lambda: a @ b], 6.0 * n * n)["ms"] * 1e3)


def kernel_tests(setup: Setup, put: Put) -> None:
    """The tests of the ops and of captured steps, on the device; a dry run only collects them."""
    command = [sys.executable, "-m", "pytest", *TESTS, "-k", CHOSEN, "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["--collect-only"] if setup.dry else ["--maxfail=20", "--tb=short", *_workers()]
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        log = Path(folder) / "log"
        code = bounded(command, setup.left - 5, log)
        text = log.read_text(encoding="utf-8", errors="replace")
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}
    collected = re.search(r"(\d+)(?:/\d+)? tests collected", text)
    put("counts", {"collected": int(collected[1])} if collected else counts)
    put("ended", code)
    if code != 0:
        put("log", text[-TAIL:])
        raise RuntimeError(f"pytest: {'out of time' if code is None else f'exit {code}'}, {counts}")


def errors(setup: Setup, put: Put) -> None:
    """How far results of single kernels are from float64, at full shapes; outputs not finite count as wrong."""
    found, wrong = {}, []
    with torch.inference_mode(), dispatch.forced(setup.kernels):
        for case in cases(setup):
            made = case.make()
            if made.exact is None:
                continue
            got, wanted = made.calls[0]().double(), made.exact()
            error = ((got - wanted).norm() / wanted.norm()).item()
            found[case.name] = error
            put("relative_error", found)
            if not error < LARGEST_ERROR:
                wrong.append(case.name)
    if wrong:
        raise RuntimeError(f"further than {LARGEST_ERROR:g} from float64: {', '.join(wrong)}")


def exact(setup: Setup, put: Put) -> None:
    """Answers of a tiny pair do not depend on graphs, width, slot or batch; every accepted count occurred."""
    for dtype in ("float32", "bfloat16"):
        with by_the_host():
            found = compare(setup, dtype)
        put(dtype, found)
        if different := [name for name, same in found["same"].items() if not same]:
            raise RuntimeError(f"{dtype}: answers depend on {', '.join(different)}")
    found = loop_is_the_same(setup)
    put("loop", found)
    if not found.get("same", True):
        raise RuntimeError("a loop on the device gives other answers")


def sanitizer(setup: Setup, put: Put) -> None:
    """compute-sanitizer's memcheck over a small engine, without the caching allocator that would hide overruns."""
    tool = shutil.which("compute-sanitizer")
    if tool is None and not setup.dry:
        raise Skip("compute-sanitizer is not on the PATH")
    watched = [] if setup.dry else [str(tool), "--tool", "memcheck", "--error-exitcode", "9"]
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        into, log = Path(folder) / "section.json", Path(folder) / "log"
        script = str(ROOT / "bench" / "device_check.py")
        command = [*watched, sys.executable, script, "--section", "small_step", "--into", str(into)]
        command += ["--dry-run"] * setup.dry
        code = bounded(command, setup.left - 5, log, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        text = log.read_text(encoding="utf-8", errors="replace")
        inner = json.loads(into.read_text(encoding="utf-8")) if into.exists() else {}
    put("ended", code)
    put("step", inner)
    put("summary", re.findall(r"ERROR SUMMARY: .*", text))
    if code != 0:
        put("log", text[-TAIL:])
        raise RuntimeError(f"memcheck: {'out of time' if code is None else f'exit {code}'}")


def small_step(setup: Setup, put: Put) -> None:
    """A few uncaptured steps of a tiny pair; under the sanitizer nothing may be captured."""
    with tiny_pair(setup, "bfloat16", slots=2) as llm:
        llm._scheduler.graphs = None
        params = SamplingParams(max_new_tokens=setup.size(8, 4), ignore_eos=True, width=4)
        outputs = llm.generate([[5, 6, 7], [8] * 20], params)
        put("tokens", [o.token_ids for o in outputs])
        if failed := [str(o.error) for o in outputs if o.error]:
            raise RuntimeError(failed[0])


def kernel_times(setup: Setup, put: Put) -> None:
    """Milliseconds of single kernels and the share of a copy's bandwidth that they reach."""
    found: list[dict[str, Any]] = []
    with torch.inference_mode(), dispatch.forced(setup.kernels):
        bandwidth = setup.copy_bandwidth()
        put("copy_bytes_per_s", bandwidth)
        for case in cases(setup):
            row: dict[str, Any] = {"name": case.name, "bytes": case.moved}
            try:
                row |= setup.milliseconds(case.make().calls, case.moved)
                row["share_of_copy"] = case.moved / bandwidth * 1e3 / row["ms"]
            except (RuntimeError, ValueError) as error:  # the others are still of use
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            found.append(row)
            put("kernels", found)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if broken := [row["name"] for row in found if "error" in row]:
        raise RuntimeError(f"failed: {', '.join(broken)}")


def smollm2(setup: Setup, put: Put) -> None:
    """The bundled pair end to end, if its target's file is here: τ, tokens a second, and answers against plain."""
    try:
        hub.find_smollm2()
    except (ValueError, OSError) as error:
        raise Skip(str(error)) from error
    prompts = ["Write a short note about the sea.", "What is 17 times 23? Explain."]
    params = SamplingParams(max_new_tokens=setup.size(128, 3), ignore_eos=True)
    device: dict[str, Any] = {} if setup.dry else {"device": "cuda", "dtype": "bfloat16"}
    with LLM("smollm2", drafter="bundled", max_requests=1, max_length=256, **device) as llm:
        answers = {}
        for width in setup.size((1, 4, 6), (1, 4)):
            llm.generate(prompts[:1], SamplingParams(max_new_tokens=4, width=width))
            outputs = llm.generate(prompts, replace(params, width=width))
            answers[width] = [o.token_ids for o in outputs]
            tokens, steps_ = (sum(getattr(o.stats, n) for o in outputs) for n in ("committed", "steps"))
            seconds = sum(o.stats.decode_seconds for o in outputs)
            put(f"width_{width}", {"tau": tokens / steps_, "tokens_per_s": tokens / seconds, "steps": steps_})
    same = all(a == answers[1] for a in answers.values())
    put("same", same)
    if not same:
        raise RuntimeError("answers depend on the width")


def _build_loop() -> str:
    """Compile the loop of steps into the checkout, if it is not there: seconds, and the only build that is needed."""
    if LIBRARY.exists():
        return str(LIBRARY)
    try:
        return str(runpy.run_path(str(ROOT / "csrc/cuda/build.py"))["build"](LIBRARY.parent))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{error}: {getattr(error, 'stderr', '')}"[:TAIL]


def _workers() -> list[str]:
    """Several test processes where pytest-xdist is here: kernels compile side by side."""
    probe = subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True)
    return ["-n", "8"] if probe.returncode == 0 else []
