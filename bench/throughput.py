"""Plain decoding of many requests at once, and where a pass's time goes.

Every request has a prompt of the same length and one row in each step; the first step, which prefills, is not
counted. Beside a step stand a pass over as many rows of one request, as verification of a block makes it, its products
alone, and the floor: the time to read the packed weights once at the bandwidth that this machine shows when torch
sums a large buffer. A pass may come below it where weights stay in a cache between passes, or where torch reads
more slowly than the decoder. Answers must not depend on how many requests there are.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.cli.console import number, progress, say, table
from blockpilot.plan import StepPlan
from blockpilot.request import Handle
from blockpilot.rows import kv_bound
from blockpilot.state import State
from blockpilot.targets.cpp_target import CppTarget
from blockpilot_kernels.packed_decoder import FORMATS, ROUNDINGS, Record

TARGET = "smollm2"
BUFFER_BYTES = 1 << 28  # far beyond any cache
VALUE_BYTES = {"F32": 4, "BF16": 2, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_1": 20 / 32}
SEED = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; their names are those of `run`'s arguments."""
    parser.add_argument("--requests", type=_counts, metavar="N,…", help="at once (1,4,16,32; quick: 1,4)")
    parser.add_argument("--rows", type=_counts, metavar="N,…", help="of one pass (1,4,8,16; quick: 1,4)")
    parser.add_argument("--context", type=_positive, metavar="N", help="tokens of a prompt (128)")
    parser.add_argument("--max-new-tokens", type=_positive, metavar="N", help="per answer (64; quick: 8)")
    parser.add_argument(
        "--repeats", type=_positive, metavar="N", help="of a pass and its products (30; quick: 5)"
    )
    parser.add_argument("--weights", metavar="FORMAT", help="as LLM takes them (auto)")
    parser.add_argument("--dtype", metavar="TYPE", help="float32 or bfloat16 (float32)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="torch's default")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    return sorted({_positive(part) for part in text.split(",")})


def run(
    quick: bool,
    *,
    requests: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    context: int | None = None,
    max_new_tokens: int | None = None,
    repeats: int | None = None,
    weights: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """`throughput` by number of requests, `passes` by number of rows, times in ms; `ok`: answers agree.

    `load_before` is the machine's one-minute load average before anything runs: with other work on the cores,
    the figures are that work's too.
    """
    many, wide = (
        requests or ((1, 4) if quick else (1, 4, 16, 32)),
        rows or ((1, 4) if quick else (1, 4, 8, 16)),
    )
    length, budget, times = (
        context or 128,
        max_new_tokens or (8 if quick else 64),
        repeats or (5 if quick else 30),
    )
    if budget < 3:
        raise ValueError(
            f"--max-new-tokens: expected at least 3, as two come before what is timed, got {budget}"
        )
    load = psutil.getloadavg()[0]
    counts = sorted({*many, *wide})
    llm = LLM(
        TARGET,
        weights=weights or "auto",
        dtype=dtype or "float32",
        max_requests=counts[-1],
        max_length=length + max(budget, counts[-1]) + 1,
        threads=threads,
    )
    target = packed_target(llm)
    read = bandwidth()
    with progress("steps and passes", total=len(counts) + len(wide), ticking=False) as advance:
        steps = {}
        for count in counts:
            steps[count] = decode(llm, count, length, budget)
            advance()
        passes = []
        for count in wide:
            passes.append({**measure_pass(target, count, length, times), "host_ms": steps[count]["host_ms"]})
            advance()
    floor = sum(map(record_bytes, target.matrices)) / read * 1e3
    return {
        "ok": agree([s.pop("token_ids") for s in steps.values()]),
        "settings": {"context": length, "max_new_tokens": budget, "repeats": times},
        "weights": llm.weights,
        "dtype": dtype or "float32",
        "load_before": load,
        "weight_bytes": sum(map(record_bytes, target.matrices)),
        "bytes_per_s": read,
        "floor_ms": floor,
        "throughput": [steps[count] for count in many],
        "passes": passes,
    }


def packed_target(llm: LLM) -> CppTarget:
    """The target, which must be the C++ decoder."""
    if not isinstance(llm.target, CppTarget):
        raise ValueError(
            "throughput: expected the C++ decoder; build the extension (BLOCKPILOT_REQUIRE_EXT=1)"
        )
    return llm.target


def record_bytes(record: Record) -> float:
    """Packed bytes of a matrix, padding included."""
    _, kind, rows, columns, *_ = record
    return -(-rows // 32) * 32 * -(-columns // 32) * 32 * VALUE_BYTES[FORMATS[kind]]


def bandwidth() -> float:
    """Bytes per second of reading a large buffer on all threads: the best of several reads."""
    buffer = torch.ones(BUFFER_BYTES // 8, dtype=torch.int64)
    return BUFFER_BYTES / min(seconds(buffer.sum, 5))


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Of repeated calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def decode(llm: LLM, count: int, context: int, budget: int) -> dict[str, Any]:
    """`count` requests in step: tokens/s, and ms of a step, of the pass in it and of the rest.

    Prompts are drawn by place, so the first ones are the same whatever `count` is.
    """
    vocab, draw = llm.target.config.vocab_size, random.Random(SEED)
    params = SamplingParams(max_new_tokens=budget, ignore_eos=True)
    handles = [llm.submit([draw.randrange(vocab) for _ in range(context)], params) for _ in range(count)]
    llm.step()
    before, times = verify_seconds(handles), []
    busy = True
    while busy:
        start = time.perf_counter()
        busy = llm.step()
        times.append(time.perf_counter() - start)
    if failed := next((h.output.error for h in handles if h.output and h.output.error), None):
        raise failed
    inside = (verify_seconds(handles) - before) / len(times)
    mean = statistics.fmean(times)
    return {
        "requests": count,
        "tokens_per_s": count / mean,
        "step_ms": mean * 1e3,
        "pass_ms": inside * 1e3,
        "host_ms": (mean - inside) * 1e3,
        "token_ids": [h.token_ids for h in handles],
    }


def verify_seconds(handles: Sequence[Handle]) -> float:
    """Time of the target's passes so far, which each request holds its share of."""
    return sum(h.stats.seconds["verify"] for h in handles)


def agree(answers: Sequence[list[list[int]]]) -> bool:
    """Whether every place got the same answer whatever stood beside it; the largest number comes last."""
    return all(some == answers[-1][: len(some)] for some in answers)


def block_state(count: int, context: int) -> State:
    """One slot of `context` cached tokens and a block of `count`."""
    state = State.allocate(1, context + 2 * count + 1, count, 1, "cpu")
    state.length[0], state.limit[0] = context + 1, context + 2 * count + 1
    state.width[0] = state.effective[0] = count
    state.done[0] = False
    return state


@torch.inference_mode()
def measure_pass(target: CppTarget, count: int, context: int, repeats: int) -> dict[str, Any]:
    """Median ms of verifying and committing a block of `count` rows after `context` tokens, as a step does it, and of
    the pass's products alone.

    The products are calls of one op each: some microseconds of every call are the call's own.
    """
    state = block_state(count, context)
    bound = kv_bound(context + count)
    plan = StepPlan((0,), (count,), 1, bound, target.device, tile=target.row_tile)
    assert target.verify_commit is not None

    def whole() -> None:
        state.length[0] = context + 1  # rolls back what the last call committed
        target.verify_commit(state, plan, None)

    rounding, draw = ROUNDINGS[target.geometry.rounding], torch.Generator().manual_seed(SEED)
    inputs = {k: torch.randn(count, k, generator=draw) for k in {r[3] for r in target.matrices}}
    records = [(inputs[r[3]], torch.tensor(r)) for r in target.matrices]

    def products() -> None:
        for x, record in records:
            torch.ops.blockpilot.packed_linear(x, target.blob, record, rounding)

    return {
        "rows": count,
        "pass_ms": statistics.median(seconds(whole, repeats)) * 1e3,
        "products_ms": statistics.median(seconds(products, repeats)) * 1e3,
    }


def show(report: dict[str, Any]) -> None:
    """Two tables."""
    floor = report["floor_ms"]
    rows = [
        [
            str(r["requests"]),
            number(r["tokens_per_s"], 1),
            *(number(r[k]) for k in ("step_ms", "pass_ms", "host_ms")),
        ]
        for r in report["throughput"]
    ]
    title = f"plain decoding, {report['weights']} weights, {report['dtype']}, context {report['settings']['context']}"
    table(title, rows, left=(), right=("requests", "tokens/s", "step ms", "its pass ms", "host ms"))
    rows = [
        [
            str(r["rows"]),
            *(number(value) for value in (floor, r["products_ms"], r["pass_ms"], r["host_ms"])),
            number(r["pass_ms"] / floor),
        ]
        for r in report["passes"]
    ]
    size, rate = report["weight_bytes"] / 1e6, report["bytes_per_s"] / 1e9
    title = f"a block of one request; floor: {size:.0f} MB of weights at {rate:.1f} GB/s"
    heads = ("rows", "floor ms", "products ms", "pass ms", "host ms", "pass / floor")
    table(title, rows, left=(), right=heads)
    say("answers the same at any number of requests: " + ("yes" if report["ok"] else "NO"))
