"""A drafter that learns while it serves, on prompts whose kind changes: against never, always, and hindsight.

Engines that differ in nothing but when they update answer the same prompts, taking turns prompt by prompt, so that
what else the machine does meets all alike. Each decides by its own clock, and the seconds of its updates are in its
speed. The oracle of a segment is the arm without a choice (never, or always one part) that was fastest there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockpilot import LLM, SamplingParams
from blockpilot.adapt import Adapt
from blockpilot.adapt.bandit import ARMS, Bandit, Choice
from blockpilot.cli.console import number, progress, say, table
from blockpilot.training.held_out import Bootstrap
from blockpilot.training.prompts import FAMILIES, generate_prompts

BEFORE, AFTER = ("explain", "story", "letter", "dialogue"), ("convert",)
RESAMPLES = 2000
CHUNKS = 8  # parts of a segment whose τ is listed


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; their names are those of `run`'s arguments."""
    parser.add_argument("--drafter", required=True, metavar="FOLDER", help="one that can adapt")
    parser.add_argument("--target", metavar="NAME", help="(smollm2)")
    parser.add_argument("--before", type=_families, metavar="F,…", help=f"families ({','.join(BEFORE)})")
    parser.add_argument("--after", type=_families, metavar="F,…", help=f"families ({','.join(AFTER)})")
    parser.add_argument("--prompts", type=_counts, metavar="N[,M]", help="of each segment (400; quick: 12)")
    parser.add_argument("--max-new-tokens", type=_positive, metavar="N", help="per answer (96; quick: 32)")
    parser.add_argument("--width", type=_positive, metavar="N", help="of a block (4)")
    parser.add_argument("--requests", type=_positive, metavar="N", help="at once (1)")
    parser.add_argument("--temperature", type=float, metavar="T", help="(0)")
    parser.add_argument("--arms", type=_arms, metavar="A,…", help="never,head,full,bandit (all of them)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="torch's default")
    parser.add_argument("--seed", type=int, metavar="N", help="of the prompts (0)")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def _counts(text: str) -> tuple[int, int]:
    first, comma, second = text.partition(",")
    return _positive(first), _positive(second if comma else first)


def _families(text: str) -> tuple[str, ...]:
    return _among(text, FAMILIES)


def _arms(text: str) -> tuple[str, ...]:
    return _among(text, ("never", *ARMS, "bandit"))


def _among(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if other := [n for n in names if n not in known]:
        raise argparse.ArgumentTypeError(f"expected names of {', '.join(known)}, got {other}")
    return names


class Always(Bandit):
    """Updates the same part whenever there is feedback for it."""

    def __init__(self, arm: str) -> None:
        super().__init__()
        self._choice = Choice(arm, explores=False)

    def decide(self, context: Sequence[float], served: float, guess: float) -> Choice | None:
        """See `Bandit.decide`."""
        return self._choice


@dataclass
class Run:
    """An engine and what it took, prompt by prompt: seconds, those of them for adapting, tokens and steps."""

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    adapting: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def answer(self, prompts: Sequence[str], params: SamplingParams) -> None:
        """A group of prompts at once, whose time they share equally."""
        adapter, begun = self.llm.adapter, time.perf_counter()
        before = adapter.seconds if adapter else 0.0
        outputs = self.llm.generate(prompts, params)
        took = time.perf_counter() - begun
        for o in outputs:
            self.seconds.append(took / len(outputs))
            self.adapting.append(((adapter.seconds if adapter else 0.0) - before) / len(outputs))
            self.tokens.append(o.stats.committed)
            self.steps.append(o.stats.steps)
            self.ids.append(o.token_ids)


def run(
    quick: bool,
    *,
    drafter: str,
    target: str | None = None,
    before: Sequence[str] | None = None,
    after: Sequence[str] | None = None,
    prompts: tuple[int, int] | None = None,
    max_new_tokens: int | None = None,
    width: int | None = None,
    requests: int | None = None,
    temperature: float | None = None,
    arms: Sequence[str] | None = None,
    threads: int | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """`segments`: by segment and arm τ, tokens/s, seconds of adapting, regret; `ok`: all arms give the same answers."""
    counts, group = prompts or ((12, 12) if quick else (400, 400)), requests or 1
    segments = {"before": tuple(before or BEFORE), "after": tuple(after or AFTER)}
    params = SamplingParams(
        max_new_tokens=max_new_tokens or (32 if quick else 96),
        width=width or 4,
        temperature=temperature or 0.0,
        seed=0,
    )
    options = {"max_requests": group, "max_length": 512, "threads": threads}
    names = tuple(arms or ("never", *ARMS, "bandit"))
    runs = {name: Run(_engine(name, target or "smollm2", drafter, options)) for name in names}
    stream = [_prompts(f, n, seed or 0) for f, n in zip(segments.values(), counts, strict=True)]
    with progress("prompts", total=sum(counts), ticking=False) as advance:
        for part in stream:
            for i in range(0, len(part), group):
                for name in _turn(names, i // group):
                    runs[name].answer(part[i : i + group], params)
                advance(len(part[i : i + group]))
    same = all(r.ids == runs[names[0]].ids for r in runs.values())
    places = dict(zip(segments, (slice(counts[0]), slice(counts[0], sum(counts))), strict=True))
    return {
        "ok": same,
        "identical": same,
        "drafter": str(Path(drafter).name),
        "options": {**vars(params), **options, "prompts": counts, "seed": seed or 0},
        "segments": {name: {"families": segments[name], **_segment(runs, at)} for name, at in places.items()},
        "whole": _segment(runs, slice(sum(counts))),
        "adapters": {name: r.llm.adapter.report() for name, r in runs.items() if r.llm.adapter},
    }


def _engine(arm: str, target: str, drafter: str, options: dict[str, Any]) -> LLM:
    llm = LLM(target, drafter=drafter, adapt=False if arm == "never" else Adapt(), **options)
    if arm in ARMS and llm.adapter is not None:
        llm.adapter.bandit = Always(arm)
    llm.warmup()
    return llm


def _prompts(families: Sequence[str], count: int, seed: int) -> list[str]:
    """`count` prompts of the families in turn."""
    each = -(-count // len(families))
    made = generate_prompts(each * len(FAMILIES), seed)
    return [p["prompt"] for p in made if p["family"] in families][:count]


def _turn(names: Sequence[str], number: int) -> list[str]:
    """Each arm comes first, second, … equally often."""
    at = number % len(names)
    return [*names[at:], *names[:at]]


def _segment(runs: dict[str, Run], at: slice) -> dict[str, Any]:
    """Figures of some prompts by arm."""
    fixed = [n for n in runs if n != "bandit"] or list(runs)
    oracle = min(fixed, key=lambda n: sum(runs[n].seconds[at]))
    best, never = (
        torch.tensor(runs[n].seconds[at]) for n in (oracle, "never" if "never" in runs else oracle)
    )
    bootstrap = Bootstrap(len(best), RESAMPLES, 0)
    arms = {}
    for name, r in runs.items():
        seconds, steps = torch.tensor(r.seconds[at]), torch.tensor(r.steps[at])
        tokens, total = torch.tensor(r.tokens[at]), float(sum(r.seconds[at]))
        arms[name] = {
            "tau": int(tokens.sum()) / max(1, int(steps.sum())),
            "tau_of_prompts": _interval(bootstrap, tokens / steps.clamp_min(1)),
            "tau_by_part": [
                int(t.sum()) / max(1, int(s.sum()))
                for t, s in zip(tokens.chunk(CHUNKS), steps.chunk(CHUNKS), strict=True)
            ],
            "tokens_per_second": int(tokens.sum()) / total,
            "seconds": total,
            "adapting_seconds": sum(r.adapting[at]),
            "seconds_over_never": _interval(bootstrap, (seconds - never) * len(best)),
            "regret": _interval(bootstrap, (seconds - best) * len(best)),
        }
    return {"oracle": oracle, "prompts": len(best), "arms": arms}


def _interval(bootstrap: Bootstrap, values: torch.Tensor) -> list[float]:
    """Mean, and the ends of its 95 % interval over prompts."""
    found = bootstrap.interval(values)
    return [found.mean, found.low, found.high]


def show(report: dict[str, Any]) -> None:
    """A table for each segment and one for the whole stream."""
    parts = {f"{n}: {', '.join(s['families'])}": s for n, s in report["segments"].items()}
    for title, part in {**parts, "the whole stream": report["whole"]}.items():
        rows = [
            (
                name,
                _spread(a["tau_of_prompts"]),
                number(a["tau"], 3),
                number(a["tokens_per_second"], 1),
                number(a["seconds"], 1),
                number(a["adapting_seconds"], 2),
                _spread(a["seconds_over_never"]),
                _spread(a["regret"]),
            )
            for name, a in part["arms"].items()
        ]
        figures = ("τ of prompts", "τ", "tokens/s", "seconds", "adapting", "seconds over never", "regret")
        table(f"{title} ({part['prompts']} prompts; oracle: {part['oracle']})", rows, ("arm",), figures)
    for name, a in report["adapters"].items():
        counts = ", ".join(f"{a[k]} {k}" for k in ("kept", "dropped", "reverted", "skipped"))
        say(f"{name}: {counts}; adapting took {100 * a['share']:.2f} % of its time")
    say("answers the same: " + ("yes" if report["identical"] else "NO"))


def _spread(values: Sequence[float]) -> str:
    mean, low, high = values
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"
