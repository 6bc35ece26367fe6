"""The benchmarks, one line each.

A benchmark is a module beside this file with `run(quick) -> report`, a JSON-ready dict that holds at least
`ok`, and `show(report)`, which prints it for people. It may have `add_options(parser)`, whose options become
keyword arguments of `run`, and `plot(report, path)`, which draws a PNG beside the JSON file.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Benchmark:
    """A name, what it measures, and the module that does."""

    name: str
    about: str
    module: str

    def load(self) -> ModuleType:
        """The module, imported on use."""
        return importlib.import_module(self.module)


BENCHMARKS = (
    Benchmark(
        "decode", "bundled pair and prompts: plain, every fixed width, the policy; answers compared", "decode"
    ),
    Benchmark(
        "ops", "every kernel op on every backend here; results compared with the reference first", "ops"
    ),
    Benchmark("peers", "bundled pair beside transformers, llama.cpp and dflash, interleaved", "peers"),
    Benchmark(
        "drafters", "every drafter beside plain decoding: τ, drafting share, tokens/s; projected", "drafters"
    ),
    Benchmark(
        "adapt",
        "a drafter that learns while it serves: never, always and the bandit, prompts shifting",
        "adapt",
    ),
    Benchmark(
        "accuracy", "weight formats against float32: logits, KL, top-1, perplexity on 20k tokens", "accuracy"
    ),
    Benchmark(
        "throughput",
        "plain decoding of many requests; a pass's time beside reading its weights",
        "throughput",
    ),
    Benchmark("soak", "minutes of mixed requests through one engine: resident memory must not grow", "soak"),
    Benchmark(
        "memory", "peak memory and seconds of a first and a second start, in fresh processes", "memory"
    ),
    Benchmark(
        "roofline", "projected step time and tokens/s by model and GPU; beside measured ones", "roofline"
    ),
    Benchmark(
        "row_independence", "whether 16-row tiles are bitwise row independent on this machine", "row_check"
    ),
)


def find(name: str) -> Benchmark:
    """The benchmark of this name.

    Raises:
        ValueError: no such benchmark; the message lists them.
    """
    for benchmark in BENCHMARKS:
        if benchmark.name == name:
            return benchmark
    raise ValueError(f"expected one of {', '.join(b.name for b in BENCHMARKS)}, got {name!r}")
