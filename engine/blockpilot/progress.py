"""Progress on stderr, for what the library does at length."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    what: str, total: int, *, show: bool = True, done: float = 0
) -> Iterator[Callable[[float], None]]:
    """A bar with the time left; yields a function that takes how many of `total` are done."""
    if not show:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Left())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(what, total=total, completed=int(done))
        yield lambda done: bar.update(task, completed=done)
