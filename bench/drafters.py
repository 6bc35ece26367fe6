"""Every drafter beside plain decoding on one target: the same prompt ids, one answer at a time, C++ engine.

`--drafter NAME=SOURCE` adds or replaces one: a folder, which may be that of a `train-draft` run, whose CPU seconds are
then told, or what else `LLM(drafter=…)` takes; `--policy NAME=SOURCE` adds a row in which a policy chooses for it,
`--adapt NAME` chains in which it learns from what it serves. Turns, figures and comparison are those of `peers`.
`draft %` is the share of a step that drafts and hands the drafter what was committed, with what it makes of the prompt;
`draft ms` is the median step's without that, and `÷ eagle3` its ratio to an EAGLE-3 drafter's of the same shape. The
second table puts the measured answers' steps on a GPU by the roofline: projected, not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

import peer_plot
from blockpilot import SamplingParams
from blockpilot.cli.console import note
from blockpilot.cli.options import parse_policy
from blockpilot.cli.prompts import load_prompts
from blockpilot.drafters.folder import CONFIG
from blockpilot.drafters.lookup import SUFFIX, PromptLookup
from blockpilot.training.page.training_log import read_training_log
from drafter_report import add_shares, print_drafters, project_rows
from drafter_times import Shape, add_draft_times, times_of
from peer_ours import load, open_ours
from peer_report import build_report
from peer_types import Arm, Decode, Setup, Unavailable
from peers import choose_arms, measure, open_arms, positive, prepare
from roofline_devices import DEVICES, find_device

DRAFTERS = {"lookup": "lookup", "dflash": "bundled", "dflash+lookup": "bundled+lookup"}
POLICIES = {"dflash+lookup": "bundled"}
WIDTHS, TREES, GPU = ((4, None),), ((6, 8),), "H200"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; their names are those of `run`'s arguments."""
    parser.add_argument("--prompts", type=Path, metavar="FILE", action="append", help="JSONL; repeatable")
    parser.add_argument("--limit", type=positive, metavar="N", help="prompts of each dataset")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="per answer (128; quick: 32)")
    parser.add_argument("--threads", type=positive, metavar="N", help="(torch's default)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", action="append", help="repeatable (0 and 1; quick: 0)"
    )
    named: dict[str, Any] = {"type": _named, "metavar": "NAME=SOURCE", "action": "append", "default": []}
    parser.add_argument("--drafter", **named, help=f"beside {', '.join(DRAFTERS)}; repeatable")
    parser.add_argument("--policy", **named, help="of the drafter of that name, as in `bench`; repeatable")
    parser.add_argument(
        "--adapt", action="append", default=[], metavar="NAME", help="that drafter, learning; repeatable"
    )
    parser.add_argument("--widths", type=_shapes, default=WIDTHS, metavar="N,…", help="of chains (4)")
    parser.add_argument("--trees", type=_shapes, default=TREES, metavar="N/M,…", help="width/nodes (6/8)")
    parser.add_argument(
        "--arms", type=lambda text: text.split(","), help="rows or drafters, as in dflash,lookup-4"
    )
    parser.add_argument(
        "--gpu", default=GPU, choices=[d.name for d in DEVICES], help=f"to project for ({GPU})"
    )


def _named(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    if not equals or not name or not source or {",", " "} & set(name):
        raise argparse.ArgumentTypeError(f"expected NAME=SOURCE, the name without commas, got {text!r}")
    return name, source


def _shapes(text: str) -> tuple[Shape, ...]:
    """`4,6` or `6/8`; `-` for none."""
    found: list[Shape] = []
    for part in [] if text == "-" else text.split(","):
        numbers = part.split("/")
        if len(numbers) > 2 or not all(n.isdecimal() and int(n) >= 2 for n in numbers):
            raise argparse.ArgumentTypeError(f"expected sizes >= 2 as in 4,6 or 6/8, got {part!r}")
        width, *nodes = map(int, numbers)
        if nodes and nodes[0] < width:
            raise argparse.ArgumentTypeError(f"expected no fewer nodes than the width, got {part!r}")
        found.append((width, nodes[0] if nodes else None))
    return tuple(found)


def arms_of(
    drafters: Mapping[str, str],
    policies: Mapping[str, str],
    adapted: Sequence[str],
    widths: Sequence[Shape],
    trees: Sequence[Shape],
) -> dict[str, tuple[Arm, dict[str, Any], Shape | None]]:
    """Arms by name with their `LLM` options and shape: plain, then of each drafter its chains, trees, policy, and the
    chains of one that learns.

    Raises:
        ValueError: a policy, or learning, for a drafter that is not there.
    """
    for option, names in (("--policy", policies.keys()), ("--adapt", set(adapted))):
        if unknown := names - drafters.keys():
            raise ValueError(
                f"{option}: expected the name of one of {', '.join(drafters)}, got {min(unknown)!r}"
            )
    found: dict[str, tuple[Arm, dict[str, Any], Shape | None]] = {}

    def add(
        name: str,
        family: str,
        opened: Callable[[Setup], Decode],
        options: dict[str, Any],
        shape: Shape | None = None,
    ) -> None:
        found[name] = Arm(name, family, opened, exact=True), options, shape

    add("plain", "plain", partial(open_ours, width=1), {})
    for name, source in drafters.items():
        options: dict[str, Any] = {"drafter": folder_of(source)}
        alike = (
            trees if source != PromptLookup.kind and not source.endswith(SUFFIX) else ()
        )  # trees never look up
        for width, tree in (*widths, *alike):
            label = f"{name}-{width}" + (f"/{tree}" if tree else "")
            opened = partial(_open, width=width, tree=tree, options=options)
            add(label, name, opened, options, (width, tree))
        if name in policies:
            chosen: dict[str, Any] = {**options, "policy": parse_policy(policies[name])}
            add(f"{name}-policy", name, partial(open_ours, width=None, **chosen), chosen)
        for width, _ in widths if name in adapted else ():
            learning = {**options, "adapt": True}
            opened = partial(_open, width=width, tree=None, options=learning)
            add(f"{name}+bandit-{width}", name, opened, learning, (width, None))
    return found


def _open(setup: Setup, *, width: int, tree: int | None, options: dict[str, Any]) -> Decode:
    llm = load(setup, **options)
    drafter = llm.drafter
    assert drafter is not None  # only plain decoding has none
    if width not in drafter.window or (tree or 0) > drafter.largest_tree:
        most = f"{max(drafter.window)} columns and trees of {drafter.largest_tree} nodes"
        raise Unavailable(f"{options['drafter']} drafts blocks of at most {most}")
    times_of(llm)
    return open_ours(setup, width=width, tree=tree, **options)


def folder_of(source: str) -> str:
    """The drafter in a run's folder; any other source as it is."""
    inside = Path(source) / "drafter"
    return str(inside) if (inside / CONFIG).is_file() else source


def trained_seconds(source: str) -> float | None:
    """CPU seconds of the `train-draft` run that `source` or the folder around it is; None of anything else."""
    for folder in (Path(source), Path(source).parent):
        if (folder / "log.jsonl").is_file():
            log = read_training_log(folder / "log.jsonl")
            return max(float(record["cpu_seconds"]) for record in (*log.train, *log.validation))
    return None


def run(
    quick: bool,
    *,
    prompts: Sequence[Path] | None = None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    threads: int | None = None,
    temperature: Sequence[float] | None = None,
    drafter: Sequence[tuple[str, str]] = (),
    policy: Sequence[tuple[str, str]] = (),
    adapt: Sequence[str] = (),
    widths: Sequence[Shape] = WIDTHS,
    trees: Sequence[Shape] = TREES,
    arms: Sequence[str] | None = None,
    gpu: str = GPU,
) -> dict[str, Any]:
    """Measure; the report of `peer_report.build_report` with shares, CPU seconds of training and the projection."""
    sources = DRAFTERS | dict(drafter)
    known = arms_of(sources, POLICIES | dict(policy), adapt, widths, trees)
    chosen = choose_arms(arms, [arm for arm, *_ in known.values()])
    for value in temperature or ():
        SamplingParams(temperature=value)  # refuses what no arm can serve before an hour is spent
    texts = load_prompts(prompts or (), limit or (1 if quick else None))
    budget = max_new_tokens or (32 if quick else 128)
    temperatures = list(dict.fromkeys(temperature or ([0.0] if quick else [0.0, 1.0])))
    setup, requests = prepare(texts, temperatures, budget, threads or torch.get_num_threads())
    busy = psutil.getloadavg()[0]
    decoders, skipped = open_arms(chosen, setup)
    rows = measure(requests, decoders)
    measured = [arm for arm in chosen if arm.name in decoders]
    report = build_report(rows, measured)
    add_shares(report["results"])
    context = round(fmean(len(asked[0].ids) for _, asked in requests) + budget / 2)
    engines = {arm.name: load(setup, **known[arm.name][1]) for arm in measured}
    add_draft_times(report["results"], engines, {name: shape for name, (*_, shape) in known.items()})
    return {
        **report,
        "settings": {"prompts": len(texts), "max_new_tokens": budget, "temperatures": temperatures},
        "threads": setup.threads,
        "load_before": busy,
        "families": {arm.name: arm.family for arm in measured},
        "drafters": {name: {"source": s, "cpu_seconds": trained_seconds(s)} for name, s in sources.items()},
        "skipped": skipped,
        "projected": project_rows(rows, engines, context, find_device(gpu)),
    }


def show(report: dict[str, Any]) -> None:
    """The tables."""
    print_drafters(report)


def plot(report: dict[str, Any], path: Path) -> None:
    """A picture of the speeds; one line if it cannot be drawn."""
    if not peer_plot.draw(report, path):
        note("no plot: matplotlib is not installed (the extra `plot`)")
