"""This package's arms of the peer benchmark."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

from blockpilot import LLM, SamplingParams
from peer_types import Arm, Decode, Request, Run, Setup

WIDTHS = (2, 3, 4, 6, 8)


def arms(prefix: str = "", **options: Any) -> tuple[Arm, ...]:
    """Plain decoding, every fixed width and the policy, for one set of `LLM` options.

    Plain decoding has an engine without a drafter: what a user who does not speculate runs.
    """
    plain, pair = f"{prefix}plain", {"drafter": "bundled", "policy": "bundled", **options}

    def arm(name: str, width: int | None, **chosen: Any) -> Arm:
        return Arm(name, "ours", partial(_open, width=width, **chosen), plain, exact=True)

    fixed = (arm(f"{prefix}width-{width}", width, **pair) for width in WIDTHS)
    return (arm(plain, 1, **options), *fixed, arm(f"{prefix}policy", None, **pair))


@cache
def _load(setup: Setup, **options: Any) -> LLM:
    return LLM(setup.gguf, max_requests=1, max_length=setup.max_length, threads=setup.threads, **options)


def _open(setup: Setup, *, width: int | None, **options: Any) -> Decode:
    return partial(_decode, _load(setup, **options), width)


def _decode(llm: LLM, width: int | None, request: Request) -> Run:
    """Everything `generate` does after prefill counts as decoding, detokenisation included."""
    params = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        width=width,
    )
    start = time.perf_counter()
    (output,) = llm.generate([request.ids], params)
    wall = time.perf_counter() - start
    stats = output.stats
    return Run(
        token_ids=tuple(output.token_ids),
        first_token=stats.time_to_first_token,
        decoding=wall - stats.seconds["prefill"],
        steps=None if width == 1 else stats.steps,
        phases=stats.seconds,
        error=None if output.error is None else f"{type(output.error).__name__}: {output.error}",
    )
