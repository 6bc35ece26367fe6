"""Sections made from a calibration, bench results and a policy's held-out report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from blockpilot.training.calibration import Calibration
from blockpilot.training.evaluation import HeldOutReport, Interval, Section
from blockpilot.training.page import drawing
from blockpilot.training.page.inputs import Bench, Labels
from blockpilot.training.page.parts import Part, Picture, Table, figure


def speed_part(labels: Sequence[Labels], calibration: Calibration) -> Part | None:
    """τ over measured cost, plain decoding beside it; None where no labelled width was measured."""
    pictures, tables, numbers = [], [], {}
    for i, x in enumerate(labels):
        found = speeds(x, calibration)
        if not any(found["tokens_per_s"].values()):
            continue
        numbers[x.file] = found
        series = {_requests(n): v for n, v in found["tokens_per_s"].items()}
        plain = {_requests(n): v for n, v in found["plain"].items()}
        name = "speed-by-width" if i == 0 else f"speed-by-width-{i + 1}"
        pictures.append(Picture(name, f"Tokens per second by width, {x.file}", drawing.speeds(series, plain)))
        tables.append(_speed_table(x, found, calibration))
    if not numbers:
        return None
    return Part(
        "speed",
        "Tokens per second with measured cost",
        [
            "Requests × τ(b) / cost(b): the mean τ of the labels over the median cost of a step from the calibration, "
            "at the mean context of the labelled prompts (prompt and half the answer), within the measured contexts. "
            "Prefill is not in it. A width pays where its τ is above the τ it needs, cost(b) / cost of plain. Costs "
            "of widths marked * are interpolated; labelled widths beyond the measured ones are left out."
        ],
        pictures,
        tables,
        numbers,
    )


def speeds(labels: Labels, calibration: Calibration) -> dict[str, Any]:
    """context, and by number of requests: cost in ms and tokens per second by width, and plain's."""
    context = fmean(row["prompt_tokens"] + row["tokens"] / 2 for row in labels.rows)
    tau = dict(zip(labels.table.widths, labels.table.tau.mean(0).tolist(), strict=True))
    measured = [w for w in calibration.widths if w > 1]
    widths = [w for w in tau if measured and measured[0] <= w <= measured[-1]]
    cost = {n: {w: calibration.cost(w, context, n) for w in (1, *widths)} for n in calibration.requests}
    return {
        "context": context,
        "tau": {w: tau[w] for w in widths},
        "cost_ms": cost,
        "tokens_per_s": {n: {w: 1000 * n * tau[w] / ms[w] for w in widths} for n, ms in cost.items()},
        "plain": {n: 1000 * n / ms[1] for n, ms in cost.items()},
    }


def _requests(n: int) -> str:
    return "1 request" if n == 1 else f"{n} requests"


def _speed_table(labels: Labels, found: dict[str, Any], calibration: Calibration) -> Table:
    rows = []
    for n, values in found["tokens_per_s"].items():
        base, cost = found["plain"][n], found["cost_ms"][n]
        rows.append([_requests(n), "plain", "1", figure(cost[1], 2), "1", figure(base, 1), "1.00"])
        for width, speed in values.items():
            mark = "" if width in calibration.widths else " *"
            needed = cost[width] / cost[1]
            rows.append([
                _requests(n), f"{width}{mark}", figure(found["tau"][width]), figure(cost[width], 2),
                figure(needed, 2), figure(speed, 1), figure(speed / base, 2),
            ])  # fmt: skip
    return Table(
        f"{labels.file} at a context of {found['context']:.0f} tokens",
        ["together", "width", "τ", "ms a step", "τ needed", "tokens/s", "ratio to plain"],
        rows,
    )


def cost_part(calibration: Calibration) -> Part:
    """Median milliseconds of a step in every measured cell."""
    cells = [(n, c) for n in calibration.requests for c in calibration.contexts]
    cost = {(n, c, w): calibration.cost(w, c, n) for n, c in cells for w in calibration.widths}
    rows = []
    for w in calibration.widths:
        ratios = [f"{cost[n, c, w]:.1f} ({cost[n, c, w] / cost[n, c, 1]:.2f}×)" for n, c in cells]
        rows.append([str(w), *ratios])
    return Part(
        "cost",
        "Cost of a step",
        ["Median milliseconds of a step, and in brackets its ratio to plain decoding (width 1)."],
        tables=[
            Table(
                "By width; columns are requests × context", ["width", *(f"{n} × {c}" for n, c in cells)], rows
            )
        ],
        numbers={"cells": [row.to_dict() for row in calibration.rows]},
    )


def policy_part(report: HeldOutReport) -> Part:
    """The held-out table with intervals."""
    tables, pictures = [], []
    for section in (report.acceptance, report.throughput):
        if section is None:
            continue
        unit = "τ, tokens per step" if section.measure == "tau" else section.measure.replace("_", " ")
        tables += [_strategies(section, unit), _picks(section), *_groups(section, unit)]
        values = {k: (v.mean, v.low, v.high) for k, v in section.strategies.items()}
        picture = drawing.strategies(values, f"{unit}, mean and 95 % interval over held-out prompts")
        pictures.append(
            Picture(f"policy-{section.measure.replace('_', '-')}", f"Ways to choose a width: {unit}", picture)
        )
    return Part(
        "policy",
        "Policy on held-out prompts",
        [
            report.headline if report.saved else report.conclusion,
            *report.warnings,
            f"{report.held_out} held-out prompts ({report.split} split), {report.train} for training; trained for "
            f"{report.objective}; widths {', '.join(map(str, report.window))}, drafter block {report.block_size}. "
            "Intervals are 95 % bootstrap intervals over prompts, those of differences paired.",
        ],
        pictures,
        tables,
        report.to_dict(),
    )


def _strategies(section: Section, unit: str) -> Table:
    rows = []
    for name, value in section.strategies.items():
        label = (
            f"best fixed (width {section.best_fixed_width})"
            if name == "best_fixed"
            else name.replace("_", " ")
        )
        gain = section.gains.get(f"predictor - {name}")
        rows.append(
            [
                label,
                f"{value.mean:.4g}",
                _range(value),
                "" if gain is None else f"{gain.mean:+.4f}",
                _range(gain, "+.4f"),
            ]
        )
    return Table(
        f"{unit}: mean over prompts",
        ["strategy", "mean", "95 % interval", "predictor minus it", "95 % interval"],
        rows,
    )  # fmt: skip


def _groups(section: Section, unit: str) -> list[Table]:
    """By family, by set, and the check of the oracle on steps that chose nothing."""
    names = ("best_fixed", "predictor", "oracle")
    kinds = {
        "family": section.by_family,
        "set, held out": section.by_dataset,
        "evaluation set": section.evaluation,
    }
    tables = [
        Table(
            f"{unit}, by {kind}",
            [kind, "prompts", *(n.replace("_", " ") for n in names)],
            [
                [name, str(g.prompts), *(f"{g.strategies[n].mean:.4g}" for n in names)]
                for name, g in found.items()
            ],
        )
        for kind, found in kinds.items()
        if found
    ]
    if section.split_half is not None:
        rows = [
            [n.replace("_", " "), f"{v.mean:.4g}", _range(v)]
            for n, v in section.split_half.strategies.items()
        ]
        title = f"{unit} on second halves of answers; the split-half oracle chose on the first"
        tables.append(Table(title, ["strategy", "mean", "95 % interval"], rows))
    return tables


def _range(value: Interval | None, form: str = ".4g") -> str:
    return "" if value is None else f"{value.low:{form}} to {value.high:{form}}"


def _picks(section: Section) -> Table:
    rows = [
        ["chosen", *(str(n) for n in section.picks.values())],
        ["best, the lowest on a tie", *(str(section.best_widths[w]) for w in section.picks)],
    ]
    return Table("Prompts by width", ["", *(f"width {w}" for w in section.picks)], rows)


def bench_part(bench: Sequence[Bench]) -> Part:
    """Plain beside every arm, overall and by dataset."""
    tables = []
    for x in bench:
        rows = []
        for arm, found in x.report["arms"].items():
            groups = found["datasets"] if len(found["datasets"]) > 1 else {}
            rows += [_bench_row(arm, name, f) for name, f in {"all": found["overall"], **groups}.items()]
        header = [
            "arm",
            "set",
            "prompts",
            "mean width",
            "τ",
            "plain tokens/s",
            "tokens/s",
            "ratio",
            "same answers",
        ]
        tables.append(Table(f"{x.file}: {_asked(x.report['settings'])}", header, rows, names=2))
    return Part(
        "bench",
        "Bench",
        [
            "Tokens committed by steps per second, prefill left out; a ratio is given only where every answer is the "
            "same as plain decoding's."
        ],
        tables=tables,
        numbers={x.file: {name: arm["overall"] for name, arm in x.report["arms"].items()} for x in bench},
    )


def _asked(settings: dict[str, Any]) -> str:
    known = ("temperature", "max_new_tokens", "batch", "threads", "weights", "dtype")
    return ", ".join(f"{name.replace('_', ' ')} {settings[name]}" for name in known if name in settings)


def _bench_row(arm: str, name: str, f: dict[str, Any]) -> list[str]:
    return [
        arm,
        name,
        str(f["prompts"]),
        figure(fmean(f["width"]), 1),
        figure(f["tau"]),
        figure(f["plain_tokens_per_s"], 1),
        figure(f["spec_tokens_per_s"], 1),
        figure(f["speedup"], 2),
        "yes" if f["identical"] else "NO",
    ]
