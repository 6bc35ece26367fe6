"""Measured decoding: the same prompts plain and with a drafter, and what is said about them.

A record is the JSON form of one request: `token_ids`, `finish_reason`, `seed`, `stats`, `error` and
`decoding`, its share of the wall seconds that `generate` took beyond prefill, with policy, drafter, steps and
host work all in it. Speed is tokens committed by steps per second of `decoding`; prefill shows in the time to
first token. τ is tokens committed by steps / steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from blockpilot.cli.prompts import Prompt
from blockpilot.output import PHASES

if TYPE_CHECKING:
    from blockpilot.llm import LLM
    from blockpilot.output import Output
    from blockpilot.params import SamplingParams
    from blockpilot.stream import Stream

Record = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One way to decode. `width` None leaves the choice to the policy; 1 is plain decoding. `tree`: its nodes."""

    name: str
    width: int | None
    tree: int | None = None


PLAIN = Arm("plain", 1)
POLICY = Arm("policy", None)


def record(output: Output) -> Record:
    """The part of an output that is kept, but for its time."""
    kept = output.to_dict()
    return {key: kept[key] for key in ("token_ids", "finish_reason", "seed", "stats", "error")}


def finished(stream: Stream) -> Output:
    """The output of an exhausted stream."""
    if stream.output is None:
        raise RuntimeError("the stream ended without an output")
    return stream.output


def params_for(prompt: Prompt, params: SamplingParams, arm: Arm) -> SamplingParams:
    """`params` with the prompt's own seed, and this arm's width and tree."""
    seed = None if params.seed is None else prompt.seed(params.seed)
    return replace(params, seed=seed, width=arm.width, tree=arm.tree)


def decode(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, arm: Arm) -> list[Record]:
    """Decode a group of prompts together under one arm."""
    asked = [params_for(prompt, params, arm) for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate([p.prompt for p in prompts], asked)
    wall = time.perf_counter() - start
    prefill = sum(output.stats.seconds["prefill"] for output in outputs)
    share = (wall - prefill) / len(outputs)
    return [record(output) | {"decoding": share} for output in outputs]


def first_difference(plain: Record, other: Record) -> int | None:
    """Index of the first token that differs, the shorter length if one ends early; None: the same answer."""
    a, b = plain["token_ids"], other["token_ids"]
    failed = plain["error"] or other["error"]
    if a == b and plain["finish_reason"] == other["finish_reason"] and not failed:
        return None
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def summarise(plain: Sequence[Record], other: Sequence[Record]) -> dict[str, Any]:
    """Figures of `other` beside `plain`, records of the same prompts in the same order.

    Returns:
        `identical` and the figures; `speedup` is None unless every answer is identical.
    """
    identical = all(first_difference(a, b) is None for a, b in zip(plain, other, strict=True))
    before, after = tokens_per_s(plain), tokens_per_s(other)
    stats = [r["stats"] for r in other]
    steps = sum(s["steps"] for s in stats)
    return {
        "identical": identical,
        "prompts": len(other),
        "tau": sum(s["committed"] for s in stats) / steps if steps else None,
        "width": [s["width"] for s in stats],
        "plain_tokens_per_s": before,
        "spec_tokens_per_s": after,
        "speedup": after / before if identical and before and after else None,
        "acceptance_by_offset": acceptance(stats),
        "ttft": {"plain": first_token(plain), "spec": first_token(other)},
        "seconds": {"plain": phase_seconds(plain), "spec": phase_seconds(other)},
        "errors": sum(r["error"] is not None for r in (*plain, *other)),
    }


def tokens_per_s(records: Sequence[Record]) -> float | None:
    """Tokens committed by steps per second of decoding; None before the first."""
    tokens = sum(r["stats"]["committed"] for r in records)
    seconds = sum(r["decoding"] for r in records)
    return tokens / seconds if tokens and seconds > 0 else None


def first_token(records: Sequence[Record]) -> float | None:
    """Mean time to first token, seconds."""
    times = [t for r in records if (t := r["stats"]["time_to_first_token"]) is not None]
    return fmean(times) if times else None


def phase_seconds(records: Sequence[Record]) -> dict[str, float]:
    """Total seconds by phase."""
    return {phase: sum(r["stats"]["seconds"].get(phase, 0.0) for r in records) for phase in PHASES}


def acceptance(stats: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Kept / offered drafted tokens at offset 1, 2, …; None where nothing was offered."""
    rates: list[float | None] = []
    for offset in range(max((len(s["offered"]) for s in stats), default=0)):
        rows = [s for s in stats if offset < len(s["offered"])]
        offered, kept = (sum(s[name][offset] for s in rows) for name in ("offered", "kept"))
        rates.append(kept / offered if offered else None)
    return rates
