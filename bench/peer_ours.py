"""This package's arms of the peer benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from blockpilot import LLM, SamplingParams
from blockpilot.targets.cpp_target import CppTarget
from peer_types import PROBE_CONTEXT, Arm, Decode, Request, Run, Setup

WIDTHS = (2, 3, 4, 6, 8)
REPEATS = 60  # of the parts timed alone


def arms(prefix: str = "", **options: Any) -> tuple[Arm, ...]:
    """Plain decoding, every fixed width with and without prompt lookup, and the policy, for one set of `LLM` options.

    Plain decoding has an engine without a drafter: what a user who does not speculate runs.
    """
    plain, bare = f"{prefix}plain", {"drafter": "bundled", **options}
    pair = {"drafter": "bundled+lookup", "policy": "bundled", **options}

    def arm(name: str, width: int | None, **chosen: Any) -> Arm:
        probe = partial(_alone, width=width, **chosen) if width is not None and width > 1 else None
        return Arm(name, "ours", partial(open_ours, width=width, **chosen), plain, exact=True, probe=probe)

    fixed = (arm(f"{prefix}width-{width}", width, **pair) for width in WIDTHS)
    alone = (arm(f"{prefix}without-lookup-{width}", width, **bare) for width in WIDTHS)
    return (arm(plain, 1, **options), *fixed, *alone, arm(f"{prefix}policy", None, **pair))


@cache
def load(setup: Setup, **options: Any) -> LLM:
    """The engine of these `LLM` options, one for all arms that share them."""
    return LLM(setup.gguf, max_requests=1, max_length=setup.max_length, threads=setup.threads, **options)


def open_ours(setup: Setup, *, width: int | None, tree: int | None = None, **options: Any) -> Decode:
    """An arm of this package: a width and a tree's nodes as in `SamplingParams`, the rest as in `LLM`."""
    return partial(_decode, load(setup, **options), width, tree)


def _alone(setup: Setup, *, width: int, **options: Any) -> dict[str, Any]:
    """Median seconds of a step's parts, each called again and again with nothing in between."""
    llm = load(setup, **options)
    scheduler, room = llm._scheduler, setup.max_length - PROBE_CONTEXT
    drafter, target, state = llm.drafter, llm.target, scheduler.state
    assert drafter is not None and isinstance(target, CppTarget)  # what the arms are for
    params = SamplingParams(max_new_tokens=room, ignore_eos=True, width=width)
    handle = llm.submit([1 + i for i in range(PROBE_CONTEXT)], params)
    llm.step()
    with torch.inference_mode():
        plan = scheduler._plan({0: handle}, (width,))
        before = {name: getattr(state, name).clone() for name in ("length", "done", "count")}

        def verify() -> torch.Tensor:
            for name, value in before.items():
                getattr(state, name).copy_(value)
            return target.verify_commit(state, plan, None)[0]

        features = verify()
        parts = {
            "draft": lambda: drafter.propose(state, plan, None),
            "verify": verify,
            "commit": lambda: drafter.commit(state, plan, features),
        }
        found = {name: statistics.median(_times(part)) for name, part in parts.items()}
    llm.cancel(handle)
    return {"alone_seconds": found}


def _times(call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times[REPEATS // 4 :]


def _decode(llm: LLM, width: int | None, tree: int | None, request: Request) -> Run:
    """Everything `generate` does after prefill counts as decoding, detokenisation included."""
    params = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        width=width,
        tree=tree,
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
        width=stats.width,
        tree=stats.tree,
        error=None if output.error is None else f"{type(output.error).__name__}: {output.error}",
    )
