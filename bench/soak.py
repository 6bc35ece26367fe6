"""Minutes of mixed requests through one engine: resident memory must not grow.

Requests differ in width, length, sampling, stops and deadlines, and some are cancelled while they wait or run. Now
and then comes one that is always the same and must always get the same answer. What an engine holds for ever
(buffers, plans, compiled patterns) is there after the first minute; memory is compared from then on.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from blockpilot import LLM, SamplingParams
from blockpilot.cli.console import progress, say
from blockpilot.request import Handle

MINUTES, QUICK_MINUTES, LIMIT_MB, REQUESTS, MAX_LENGTH = 10.0, 2.0, 32.0, 4, 384
SETTLE_SECONDS, EVERY_SECONDS = 60.0, 1.0
AVERAGED = 5  # samples at either end, of which the median counts
PROBE_EVERY = 20  # requests
CANCELLED, DEADLINE = 0.1, 0.03  # shares of requests


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; their names are those of `run`'s arguments."""
    parser.add_argument(
        "--minutes", type=_positive, metavar="N", help=f"({MINUTES:g}; quick: {QUICK_MINUTES:g})"
    )
    parser.add_argument(
        "--limit-mb", type=_positive, metavar="MB", help=f"growth that is too much ({LIMIT_MB:g})"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the requests (0)")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def run(
    quick: bool, *, minutes: float | None = None, limit_mb: float | None = None, seed: int | None = None
) -> dict[str, Any]:
    """`growth_mb` from minute 1 (half time of shorter runs) to the end, `mb` over time, what was served.

    `ok`: growth within `limit_mb`, no request failed, and the repeated one always got the same answer.
    """
    duration, limit = 60 * (minutes or (QUICK_MINUTES if quick else MINUTES)), limit_mb or LIMIT_MB
    with open_engine() as llm:
        load = Load(llm, random.Random(seed or 0))
        samples = watch(load, duration)
        load.finish()
    settled = settled_samples(samples, min(SETTLE_SECONDS, duration / 2))
    growth = statistics.median(settled[-AVERAGED:]) - statistics.median(settled[:AVERAGED])
    same = len(load.probes) == 1
    return {
        "ok": growth <= limit and same and not load.reasons["error"],
        "minutes": duration / 60,
        "growth_mb": growth,
        "limit_mb": limit,
        "mb": samples,
        "requests": sum(load.reasons.values()),
        "tokens": load.tokens,
        "finish_reasons": dict(load.reasons),
        "widths": {str(width): count for width, count in sorted(load.widths.items())},
        "same_answers": same,
    }


def open_engine() -> LLM:
    """The bundled pair and policy."""
    return LLM(
        "smollm2", drafter="bundled+lookup", policy="bundled", max_requests=REQUESTS, max_length=MAX_LENGTH
    )


def resident_mb() -> float:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss / 1e6


def watch(load: Load, duration: float) -> list[tuple[float, float]]:
    """Keep the engine busy for `duration` seconds; returns (seconds, MB), about one a second."""
    start = time.perf_counter()
    samples = [(0.0, resident_mb())]
    with progress("seconds", total=round(duration), ticking=False) as advance:
        while (now := time.perf_counter() - start) < duration:
            load.step()
            if now - samples[-1][0] >= EVERY_SECONDS:
                advance(int(now) - int(samples[-1][0]))
                samples.append((now, resident_mb()))
    return [*samples, (time.perf_counter() - start, resident_mb())]


def settled_samples(samples: list[tuple[float, float]], settle: float) -> list[float]:
    """MB of the samples from `settle` seconds on; the last one at least."""
    return [mb for at, mb in samples if at >= settle] or [samples[-1][1]]


@dataclass
class Load:
    """Twice as many requests as the engine has slots, replaced as they end.

    Attributes:
        reasons: requests by why they ended. widths: by width. probes: distinct answers to the repeated request.
    """

    llm: LLM
    draw: random.Random
    reasons: Counter[str] = field(default_factory=Counter)
    widths: Counter[int] = field(default_factory=Counter)
    probes: set[tuple[int, ...]] = field(default_factory=set)
    tokens: int = 0
    _live: dict[Handle, Callable[[Handle], bool]] = field(default_factory=dict)
    _repeated: set[Handle] = field(default_factory=set)
    _submitted: int = 0

    def step(self) -> None:
        """Top up, advance every request, cancel those whose time has come, count those that ended."""
        while len(self._live) < 2 * self.llm.max_requests:
            self._submit()
        self.llm.step()
        for handle, unwanted in list(self._live.items()):
            if unwanted(handle):
                self.llm.cancel(handle)
            if handle.finished:
                self._count(handle)

    def finish(self) -> None:
        """Serve what is left, so that at least one repeated request has its answer."""
        while self._live:
            self.llm.step()
            for handle in [h for h in self._live if h.finished]:
                self._count(handle)

    def _submit(self) -> None:
        self._submitted += 1
        if self._submitted % PROBE_EVERY == 1:
            params = SamplingParams(max_new_tokens=24, temperature=0.9, seed=7)
            handle = self.llm.submit([5, 6, 7, 8], params)
            self._repeated.add(handle)
            self._live[handle] = lambda handle: False
            return
        deadline = 0.05 if self.draw.random() < DEADLINE else None
        handle = self.llm.submit(self._prompt(), self._params(), deadline=deadline)
        self._live[handle] = self._fate()

    def _fate(self) -> Callable[[Handle], bool]:
        """When a request is cancelled: never, while it waits, or after some tokens."""
        if self.draw.random() >= CANCELLED:
            return lambda handle: False
        after = self.draw.choice((0, 1, 5, 20))
        return lambda handle: len(handle.token_ids) >= after

    def _prompt(self) -> list[int]:
        vocab = self.llm.target.config.vocab_size
        return [self.draw.randrange(3, vocab) for _ in range(self.draw.choice((1, 7, 30, 120)))]

    def _params(self) -> SamplingParams:
        draw, window = self.draw, self.llm.drafter.window if self.llm.drafter else ()
        sampled, filtered = draw.random() < 0.5, draw.random() < 0.5
        return SamplingParams(
            max_new_tokens=draw.choice((1, 8, 32, 64)),
            temperature=draw.choice((0.5, 1.0, 1.5)) if sampled else 0.0,
            top_k=40 if filtered else 0,
            top_p=0.9 if filtered else 1.0,
            seed=draw.randrange(1 << 32),
            stop=draw.choice(((), (), ("e",), ("the end", "\n\n"))),
            ignore_eos=draw.random() < 0.3,
            logprobs=draw.choice((None, None, 0, 5)),
            width=draw.choice((None, 1, *window)),
        )

    def _count(self, handle: Handle) -> None:
        del self._live[handle]
        assert handle.output is not None  # it is finished
        self.reasons[handle.output.finish_reason] += 1
        self.widths[handle.stats.width] += 1
        self.tokens += len(handle.token_ids)
        if handle in self._repeated:
            self._repeated.remove(handle)
            self.probes.add(tuple(handle.token_ids))


def show(report: dict[str, Any]) -> None:
    """A few lines."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(report["finish_reasons"].items()))
    say(
        f"{report['requests']} requests ({reasons}), {report['tokens']} tokens in {report['minutes']:.1f} minutes"
    )
    say("widths: " + ", ".join(f"{width}: {count}" for width, count in report["widths"].items()))
    start, end = report["mb"][0][1], report["mb"][-1][1]
    say(f"resident: {start:.0f} MB at the start, {end:.0f} MB at the end")
    say(f"growth after settling: {report['growth_mb']:.1f} MB (limit {report['limit_mb']:g} MB)")
    say("the repeated request's answers the same: " + ("yes" if report["same_answers"] else "NO"))
