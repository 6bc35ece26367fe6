"""Showing a held-out report: text, JSON, picture.

The JSON, written by `write_json` and kept in policy files (without `predictor_us`). An interval is
{"mean", "low", "high"}, 95 % by bootstrap over prompts; a width used as a key is text.

- objective: "acceptance" or "throughput". loss: "cross_entropy" or "expected_gain".
- window: the widths to choose from. block_size: of the drafter. train, held_out: numbers of prompts.
  split: "random" or "family".
- conclusion: one sentence, predictor against best fixed width under the objective. saved: the default policy,
  {"kind": "predictor"} or {"kind": "fixed", "width"}. warnings: list of sentences.
- tau_by_width: {width: interval}, held-out τ.
- seeds: {"seeds", "predictor", "gain", "accuracy": one figure per seed; "mean", "spread": of gain, the difference
  predictor − best fixed}, under the objective; null in older files.
- predictor_us: microseconds of one predictor call, or null.
- acceptance, and throughput (null without a cost): sections:
  - measure: "tau" or "tokens_per_second".
  - strategies: {name: interval}, names drafter_block (if labelled), plain (throughput, if its cost is known),
    best_fixed (chosen on training prompts), predictor, shuffled_control, random, oracle.
  - gains: {"predictor - NAME": interval} for every other name, and {"oracle - best_fixed": interval}, paired.
  - regret: oracle − predictor. best_fixed_width: a width. picks, best_widths: {width: prompts}.
  - accuracy, control_accuracy: shares. block_size_best, block_size_label: shares, or null.
  - by_family, by_dataset: {name: group} of the held-out prompts; evaluation: {name: group} of evaluation label
    files. A group is {"prompts", "strategies", "gains", "picks", "regret"}.
  - split_half: null where labels hold no halves, else {"prompts", "strategies", "gains"}: widths chosen on the first
    half of every answer, scored on the second; strategies best_fixed, predictor, split_half_oracle, oracle; gains
    "split_half_oracle - best_fixed", "predictor - best_fixed", "predictor - split_half_oracle".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.policies.atomic import replacing
from blockpilot.training.held_out import Group, HeldOutReport, Interval, Section, Seeds, SplitHalf

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["HeldOutReport", "plot", "render", "write_json"]

_SHORT = {"drafter_block": "block", "best_fixed": "fixed", "predictor": "pred.", "oracle": "oracle"}
_GROUPS = {"by_family": "family", "by_dataset": "dataset, held out", "evaluation": "evaluation set"}


def render(report: HeldOutReport, console: Console | None = None) -> None:
    """Prints the report, its conclusion first; to stdout unless a console is given."""
    from rich.console import Console

    console = console or Console()
    console.print(report.headline, soft_wrap=True)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow")
    console.print(
        f"{report.held_out} held-out prompts ({report.split}), {report.train} for training; "
        f"widths {list(report.window)}, drafter block {report.block_size}; trained for {report.objective}"
    )
    for section in (report.acceptance, report.throughput):
        if section is not None:
            console.print(_table(section))
            console.print(_facts(section))
            if section.split_half is not None:
                console.print(_halves(section.split_half))
    for key, name in _GROUPS.items():
        groups: dict[str, Group] = getattr(report.judged, key)
        if groups:
            console.print(_group_table(name, groups, report.judged))
    if report.seeds is not None and len(report.seeds.seeds) > 1:
        console.print(_seeds(report.seeds))
    if report.predictor_us is not None:
        console.print(f"one predictor call: {report.predictor_us:.0f} µs")


def _table(section: Section) -> Any:
    rows = []
    for name, value in section.strategies.items():
        label = f"{name} ({section.best_fixed_width})" if name == "best_fixed" else name
        gain = section.gains.get(f"predictor - {name}")
        difference = "" if gain is None else _signed(gain)
        rows.append((label, f"{value.mean:.4g}", _range(value), difference))
    title = f"{section.measure.replace('_', ' ')}, mean over prompts"
    return _grid(title, ("strategy", "mean", "95 % interval", "predictor minus it"), rows)


def _group_table(name: str, groups: Mapping[str, Group], section: Section) -> Any:
    shown = [s for s in section.strategies if s in _SHORT]
    rows = [
        (
            key,
            str(group.prompts),
            *(f"{group.strategies[s].mean:.4g}" for s in shown),
            _signed(group.gains["predictor - best_fixed"], digits=3),
        )
        for key, group in groups.items()
    ]
    title = f"{section.measure.replace('_', ' ')} by {name}; the last column is predictor minus fixed"
    headings = (name, "n", *(_SHORT[s] for s in shown), "gain")
    return _grid(title, headings, rows)


def _grid(title: str, headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Any:
    """A table whose first column is text and whose others are figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _range(value: Interval, digits: int = 4) -> str:
    return f"({value.low:.{digits}g} to {value.high:.{digits}g})"


def _signed(value: Interval, digits: int = 4) -> str:
    return f"{value.mean:+.{digits}g} {_range(value, digits)}"


def _facts(section: Section) -> str:
    block = section.block_size_best
    widths = ", ".join(f"{w}: {n} picked / {section.best_widths[w]} best" for w, n in section.picks.items())
    at_block = "" if block is None else f"for {block:.1%} of prompts no width beats the drafter's block; "
    return (
        f"best width chosen for {section.accuracy:.1%} of prompts, the lowest counting on a tie "
        f"(shuffled control {section.control_accuracy:.1%}); "
        f"{at_block}regret {section.regret:.4g}\nwidths {widths}"
    )


def _halves(half: SplitHalf) -> str:
    means = ", ".join(f"{name} {value.mean:.4g}" for name, value in half.strategies.items())
    return (
        f"widths chosen on the first half of {half.prompts} answers, scored on the second: {means}; "
        f"split_half_oracle minus best_fixed {_signed(half.gains['split_half_oracle - best_fixed'])}"
    )


def _seeds(seeds: Seeds) -> str:
    each = ", ".join(f"{seed}: {gain:+.4g}" for seed, gain in zip(seeds.seeds, seeds.gain, strict=True))
    return (
        f"predictor minus best_fixed over {len(seeds.seeds)} seeds: {seeds.mean:+.4g}, spread {seeds.spread:.4g} "
        f"({each}); the first is saved"
    )


def write_json(report: HeldOutReport, path: str | Path) -> None:
    """Writes `HeldOutReport.to_dict()`; the file appears whole or not at all."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def plot(report: HeldOutReport, path: str | Path) -> bool:
    """Draws τ by width, the strategies and the chosen widths as a PNG. False when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    by_width, strategies, widths = figure.subplots(1, 3)
    section = report.judged
    _bars(by_width, {str(w): v for w, v in report.tau_by_width.items()})
    by_width.set(title="τ by fixed width (held out)", xlabel="width", ylabel="tokens per step")
    _bars(strategies, {k.replace("_", "\n"): v for k, v in section.strategies.items()})
    strategies.set(title=section.measure.replace("_", " "))
    strategies.tick_params("x", labelsize=7)
    places = range(len(report.window))
    widths.bar([p - 0.2 for p in places], section.best_widths.values(), 0.4, label="best")
    widths.bar([p + 0.2 for p in places], section.picks.values(), 0.4, label="chosen")
    widths.set(title="best and chosen widths", xlabel="width", ylabel="prompts")
    widths.set_xticks(list(places), [str(w) for w in report.window])
    widths.legend()
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


def _bars(axes: Any, values: dict[str, Interval]) -> None:
    """Points with intervals, the y axis close to them."""
    means = [v.mean for v in values.values()]
    spread = [[v.mean - v.low for v in values.values()], [v.high - v.mean for v in values.values()]]
    axes.errorbar(list(values), means, yerr=spread, fmt="o", capsize=3)
