"""What a page is built of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A caption, column headings and rows of text; the first `names` columns are words, the others figures."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1


@dataclass(frozen=True)
class Picture:
    """A PNG: its name in file names, what it shows, its bytes."""

    name: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        key: its anchor. title: its heading. text: paragraphs. pictures, tables: in this order below them.
        numbers: the figures behind it, JSON-ready.
    """

    key: str
    title: str
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    numbers: dict[str, Any] = field(default_factory=dict)


def figure(value: float | None, digits: int = 3) -> str:
    """A number for a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(share: float | None, sign: bool = False) -> str:
    """A share for a table; a dash where there is none."""
    return "–" if share is None else f"{100 * share:{'+' if sign else ''}.1f} %"


def count(value: float) -> str:
    """A large count in thousands or millions."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
