"""What a benchmark found: figures by arm and dataset, differences from plain, and the tables of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockpilot.cli import measure
from blockpilot.cli.console import fail, number, say, table
from blockpilot.cli.prompts import Prompt


def build_report(
    prompts: Sequence[Prompt], records: Mapping[str, dict[str, measure.Record]], arms: Sequence[measure.Arm]
) -> dict[str, Any]:
    """The figures of every arm, overall and by dataset, and every difference from plain."""
    names = list(dict.fromkeys(prompt.dataset for prompt in prompts))
    groups = {name: [records[p.key] for p in prompts if p.dataset == name] for name in names}
    everything = [records[prompt.key] for prompt in prompts]
    by_arm = {
        arm.name: {
            "overall": _figures(everything, arm),
            "datasets": {name: _figures(rows, arm) for name, rows in groups.items()},
        }
        for arm in arms
    }
    differences = [
        {"arm": arm.name, "id": prompt.id, "token": index}
        for arm in arms
        for prompt, row in zip(prompts, everything, strict=True)
        if (index := measure.first_difference(row[measure.PLAIN.name], row[arm.name])) is not None
    ]
    first = by_arm[arms[0].name]
    report = {**first["overall"], "datasets": first["datasets"], "arms": by_arm, "differences": differences}
    report["identical"] = not differences
    report["errors"] = sum(r["error"] is not None for row in everything for r in row.values())
    return report


def _figures(rows: Sequence[dict[str, measure.Record]], arm: measure.Arm) -> dict[str, Any]:
    return measure.summarise([row[measure.PLAIN.name] for row in rows], [row[arm.name] for row in rows])


def print_report(report: dict[str, Any]) -> None:
    """Tables for people; the last line says whether the answers are identical."""
    rows = []
    for arm, figures in report["arms"].items():
        groups = figures["datasets"] if len(figures["datasets"]) > 1 else {}
        rows += [_row(name, arm, figure) for name, figure in {**groups, "all": figures["overall"]}.items()]
    table(
        f"{report['prompts']} prompts, {report['hardware']['cpu']}",
        rows,
        left=("dataset", "arm"),
        right=("prompts", "width", "τ", "plain/s", "tokens/s", "ratio", "same"),
    )
    for difference in report["differences"]:
        fail(f"{difference['arm']}: {difference['id']} differs from plain at token {difference['token']}")
    if report["identical"]:
        say("identical: yes", style="bold green")
    else:
        say(f"identical: NO ({len(report['differences'])} differences)", style="bold red")


def _row(dataset: str, arm: str, figures: dict[str, Any]) -> list[str]:
    width = sum(figures["width"]) / len(figures["width"])
    return [
        dataset,
        arm,
        str(figures["prompts"]),
        number(width, 1),
        number(figures["tau"]),
        number(figures["plain_tokens_per_s"], 1),
        number(figures["spec_tokens_per_s"], 1),
        number(figures["speedup"]),
        "yes" if figures["identical"] else "NO",
    ]
