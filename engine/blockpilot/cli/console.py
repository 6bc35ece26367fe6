"""What the commands share for output: people read stderr and tables, machines read stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    """One red line on stderr, whatever line breaks the message holds."""
    ERR.print(f"error: {' '.join(message.split())}", style="bold red", markup=False, soft_wrap=True)


def note(message: str) -> None:
    """One dim line on stderr."""
    ERR.print(message, style="dim", markup=False, soft_wrap=True)


def say(message: str, style: str = "") -> None:
    """One line on stdout, unwrapped and without markup."""
    OUT.print(message, style=style, markup=False, soft_wrap=True)


def finite(value: Any) -> Any:
    """`value` with NaN and infinities as None: they are not JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def to_json(value: Any) -> str:
    """JSON text of `value`, ASCII, indented by two."""
    return json.dumps(finite(value), indent=2, allow_nan=False)


def emit_json(value: Any) -> None:
    """The one thing a `--json` run writes to stdout."""
    OUT.file.write(to_json(value) + "\n")
    OUT.file.flush()


def write_report(path: Path, report: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    from blockpilot.policies.atomic import replacing

    with replacing(path) as temporary:
        temporary.write_text(to_json(report) + "\n", encoding="utf-8")


@contextmanager
def progress(description: str, total: int, completed: int = 0, ticking: bool = True) -> Iterator[Any]:
    """A progress bar on stderr; yields a function that advances it by n and may say what comes next.

    With `ticking` off it is drawn only when it advances: a drawing thread would disturb what is being timed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERR, transient=True, auto_refresh=ticking) as bar:
        task = bar.add_task(description, total=total, completed=completed)
        yield lambda n=1, doing=None: bar.update(task, advance=n, description=doing, refresh=not ticking)


def table(
    title: str, rows: Iterable[Sequence[str | Text]], left: Sequence[str], right: Sequence[str] = ()
) -> None:
    """A table on stdout: the headings of its text columns, then those of its figures. No text is markup."""
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in left:
        out.add_column(heading, overflow="fold")  # a path cut short is of no use
    for heading in right:
        out.add_column(heading, justify="right")
    for row in rows:
        out.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    OUT.print(out)


def number(value: float | None, digits: int = 2) -> str:
    """A figure for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def json_help(keys: Mapping[str, str]) -> str:
    """The part of `--help` that documents what `--json` prints."""
    return "JSON keys: " + "; ".join(f"{key}: {meaning}" for key, meaning in keys.items()) + "."
