"""Showing a held-out report: text, JSON, picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.policies.atomic import replacing
from blockpilot.training.evaluation import HeldOutReport, Interval, Section

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["HeldOutReport", "plot", "render", "write_json"]


def render(report: HeldOutReport, console: Console | None = None) -> None:
    """Prints the report; to stdout unless a console is given."""
    from rich.console import Console

    console = console or Console()
    console.print(
        f"{report.held_out} held-out prompts ({report.split}), {report.train} for training; "
        f"widths {list(report.window)}, drafter block {report.block_size}; trained for {report.objective}"
    )
    for section in (report.acceptance, report.throughput):
        if section is not None:
            console.print(_table(section))
            console.print(_facts(section))
    console.print(report.conclusion)


def _table(section: Section) -> Any:
    from rich.table import Table

    table = Table(title=f"{section.measure.replace('_', ' ')}, mean over prompts", title_justify="left")
    for name in ("strategy", "mean", "95 % interval", "predictor minus it"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for name, value in section.strategies.items():
        label = f"{name} ({section.best_fixed_width})" if name == "best_fixed" else name
        gain = section.gains.get(f"predictor - {name}")
        difference = "" if gain is None else f"{gain.mean:+.4g} {_range(gain)}"
        table.add_row(label, f"{value.mean:.4g}", _range(value), difference)
    return table


def _range(value: Interval) -> str:
    return f"({value.low:.4g} to {value.high:.4g})"


def _facts(section: Section) -> str:
    block = section.block_size_best
    widths = ", ".join(f"{w}: {n} picked / {section.best_widths[w]} best" for w, n in section.picks.items())
    at_block = "" if block is None else f"no width beats the drafter block for {block:.1%}; "
    return (
        f"best width chosen for {section.accuracy:.1%} of prompts, the lowest counting on a tie "
        f"(shuffled control {section.control_accuracy:.1%}); "
        f"{at_block}regret {section.regret:.4g}\nwidths {widths}"
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
    section = (
        report.throughput if report.objective == "throughput" and report.throughput else report.acceptance
    )
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
