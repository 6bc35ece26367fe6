"""Peak memory and times of a start: bare `import torch`, a start that packs the weights, one that reads them packed.

Every start is a process of its own that loads the bundled pair and answers one prompt; its peak is what Linux calls
VmHWM. The bar: a start takes no more than `import torch`, packed weights, KV caches and 100 MB. One request of 256
positions, so that the KV caches counted are about the ones touched. First starts get an empty cache folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from blockpilot.cli.console import progress, say

TOKENS, MAX_LENGTH, REPEATS, QUICK_REPEATS, LIMIT_MB = 128, 256, 5, 1, 100.0
_PEAK = """
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
"""
TORCH = f"import torch\n{_PEAK}\nprint(peak())"
START = f"""
import json, sys, time
import torch
from blockpilot import LLM, SamplingParams
{_PEAK}
before = time.perf_counter()
llm = LLM("smollm2", drafter="bundled+lookup", policy="predictor", max_requests=1, max_length=int(sys.argv[1]))
loaded = time.perf_counter()
stream = iter(llm.stream("Why is the sky blue?", SamplingParams(max_new_tokens=int(sys.argv[2]), ignore_eos=True)))
text = next(stream)
first = time.time()
text += "".join(stream)
caches = [t for x in (llm.target, llm.drafter.drafter) for t in (x.cache.k, x.cache.v)]
print(json.dumps({{
    "peak": peak(),
    "weights": len(llm.target.blob) + len(llm.drafter.drafter._weights[0]),
    "kv": sum(t.nbytes for t in caches),
    "load_s": loaded - before,
    "first_token": first,
    "text": text,
}}))
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; their names are those of `run`'s arguments."""
    parser.add_argument("--repeats", type=int, metavar="N", help=f"pairs of starts ({REPEATS}; quick: 1)")


def run(quick: bool, *, repeats: int | None = None) -> dict[str, Any]:
    """Medians over pairs of a first and a second start, with what is left beside torch, weights and KV (`rest`).

    `within_limit`: the rest of every start is. `same_answers`: of all starts. `ok`: both.
    """
    count = repeats or (QUICK_REPEATS if quick else REPEATS)
    if count < 1:
        raise ValueError(f"--repeats: expected at least 1, got {count}")
    load = os.getloadavg()[0]
    starts: dict[str, list[dict[str, Any]]] = {"first": [], "second": []}
    torch_peaks = []
    with progress("starts", total=3 * count, ticking=False) as advance:
        for _ in range(count):
            torch_peaks.append(int(python(TORCH)))
            advance()
            with tempfile.TemporaryDirectory(prefix="blockpilot-memory-") as folder:
                for kept in starts.values():
                    kept.append(measure_start(folder))
                    advance()
    texts = {start.pop("text") for kept in starts.values() for start in kept}
    report = summary(statistics.median(torch_peaks), starts)
    fits = all(start["rest_mb"] <= LIMIT_MB for start in report["starts"].values())
    verdict = {"ok": fits and len(texts) == 1, "within_limit": fits, "same_answers": len(texts) == 1}
    settings = {"tokens": TOKENS, "max_length": MAX_LENGTH, "repeats": count}
    return {**verdict, "settings": settings, "load_before": load, **report}


def measure_start(folder: str) -> dict[str, Any]:
    """One start with its cache in `folder`; `first_token_s` from the start of the process."""
    before = time.time()
    found = json.loads(python(START, str(MAX_LENGTH), str(TOKENS), BLOCKPILOT_CACHE=folder))
    return {**found, "first_token_s": found.pop("first_token") - before}


def python(script: str, *arguments: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"memory: a start ended with exit code {done.returncode}; its message is above")
    return done.stdout


def summary(torch_bytes: float, starts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians; MB of 10⁶ bytes."""
    rows = {}
    for name, kept in starts.items():
        middle = {key: statistics.median(start[key] for start in kept) for key in kept[0]}
        rest = middle["peak"] - torch_bytes - middle["weights"] - middle["kv"]
        rows[name] = {
            "peak_mb": middle["peak"] / 1e6,
            "weights_mb": middle["weights"] / 1e6,
            "kv_mb": middle["kv"] / 1e6,
            "rest_mb": rest / 1e6,
            "load_s": middle["load_s"],
            "first_token_s": middle["first_token_s"],
        }
    return {"torch_mb": torch_bytes / 1e6, "limit_mb": LIMIT_MB, "starts": rows}


def show(report: dict[str, Any]) -> None:
    """A line per start."""
    say(f"import torch: {report['torch_mb']:.0f} MB (load before: {report['load_before']:.1f})")
    for name, start in report["starts"].items():
        say(
            f"{name} start: peak {start['peak_mb']:.0f} MB = torch + weights {start['weights_mb']:.0f} + "
            f"KV {start['kv_mb']:.0f} + rest {start['rest_mb']:.0f} MB (limit {report['limit_mb']:.0f}); "
            f"load {start['load_s']:.2f} s, first token {start['first_token_s']:.2f} s after the process began"
        )
    for what, name in (("within the limit", "within_limit"), ("answers the same", "same_answers")):
        say(f"{what}: {'yes' if report[name] else 'NO'}")
