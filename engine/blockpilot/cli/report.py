"""`blockpilot report`: one HTML page of everything measured on a pair.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockpilot.cli.console import emit_json, progress, say
from blockpilot.cli.options import JsonOption

if TYPE_CHECKING:
    from blockpilot.training.page import Page

JSON_KEYS = {
    "html": "the page",
    "images": "the PNG files beside it",
    "sections": "title and numbers of each section by its anchor",
}
LabelsOption = Annotated[
    list[Path] | None, typer.Option("--labels", help="What `label` wrote; repeatable, for several sets.")
]
PolicyReportOption = Annotated[
    Path | None, typer.Option("--policy-report", help="What `train-policy --report` wrote.")
]
CalibrationOption = Annotated[Path | None, typer.Option("--calibration", help="What `calibrate` wrote.")]
LogOption = Annotated[
    Path | None, typer.Option("--training-log", help="A drafter's training log, JSON lines.")
]
BenchOption = Annotated[
    list[Path] | None, typer.Option("--bench", help="What `bench --output` wrote; repeatable.")
]


def run(
    labels: LabelsOption = None,
    policy_report: PolicyReportOption = None,
    calibration: CalibrationOption = None,
    training_log: LogOption = None,
    bench: BenchOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page; its PNGs go beside it.")] = Path(
        "report.html"
    ),
    json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page, and its pictures as PNG, from whatever was measured. Needs matplotlib."""
    files = {
        "labels": labels or (),
        "policy_report": policy_report,
        "calibration": calibration,
        "training_log": training_log,
        "bench": bench or (),
    }
    page = _build(files, output)
    if json:
        found = {part.key: {"title": part.title, "numbers": part.numbers} for part in page.parts}
        emit_json({"html": str(page.html), "images": [str(p) for p in page.images], "sections": found})
    else:
        say(f"{len(page.parts)} sections written to {page.html}, {len(page.images)} pictures beside it")


def _build(files: dict[str, Any], output: Path) -> Page:
    from blockpilot.training.page import build_page, read_inputs
    from blockpilot.training.page.build import sections
    from blockpilot.training.page.drawing import check_matplotlib

    check_matplotlib()
    inputs = read_inputs(**files)
    with progress("sections", total=len(sections(inputs))) as advance:
        return build_page(inputs, output, advance)
