"""One measured cell of a calibration: the spread of a step's phases, checked wherever it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

PHASES = ("draft", "verify", "accept", "commit", "host", "total")
DIGITS = 4  # a tenth of a microsecond: below what a clock call costs
_SPREAD = ("median", "p10", "p90")
_COUNTS = ("requests", "context", "width", "steps")
_ROW = {*_COUNTS, "sum_width", "ms"}


@dataclass(frozen=True)
class Spread:
    """Milliseconds of one phase over the measured steps."""

    median: float
    p10: float
    p90: float

    def __post_init__(self) -> None:
        for name in _SPREAD:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf:
                raise ValueError(f"{name}: expected finite milliseconds >= 0, got {value!r}")
        if not self.p10 <= self.median <= self.p90:
            raise ValueError(f"expected p10 <= median <= p90, got {self.p10}, {self.median}, {self.p90}")

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of the same phase of one or more steps."""
        ms = [1000 * s for s in seconds]
        tenths = quantiles(ms, n=10, method="inclusive") if len(ms) > 1 else ms
        return cls(*(round(x, DIGITS) for x in (median(ms), tenths[0], tenths[-1])))


@dataclass(frozen=True)
class StepCost:
    """What a step of `requests` requests costs, each with `context` cached tokens and a block of `width`.

    Attributes:
        steps: how many were measured. ms: spread of every phase and of the whole step, `PHASES`.
        nodes: of each request's tree, the anchor included; 0 of a chain.
    """

    requests: int
    context: int
    width: int
    steps: int
    ms: dict[str, Spread]
    nodes: int = 0

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "nodes"):
            value, least = getattr(self, name), int(name != "nodes")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an int >= {least}, got {value!r}")
        if set(self.ms) != set(PHASES):
            raise ValueError(f"ms: expected phases {list(PHASES)}, got {sorted(self.ms)}")
        if self.total <= 0:
            raise ValueError(f"ms: expected a total above 0, got {self.total!r}")

    @property
    def sum_width(self) -> int:
        """Σ width or nodes: the rows that the step computes."""
        return self.requests * (self.nodes or self.width)

    @property
    def total(self) -> float:
        """Median milliseconds of the whole step."""
        return self.ms["total"].median

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        counts = {"requests": self.requests, "context": self.context, "width": self.width}
        ms = {phase: asdict(self.ms[phase]) for phase in PHASES}
        counts |= {"nodes": self.nodes} if self.nodes else {}
        return {**counts, "sum_width": self.sum_width, "steps": self.steps, "ms": ms}


def parse_rows(found: Any, name: str = "rows", more: frozenset[str] = frozenset()) -> tuple[StepCost, ...]:
    """The rows of a calibration's JSON under the key `name`; `more`: keys that they have beside those of chains.

    Raises:
        ValueError: which row, what was expected and what it holds.
    """
    if not isinstance(found, list):
        raise ValueError(f"{name}: expected a list, got {type(found).__name__}")
    rows = []
    for i, row in enumerate(found):
        try:
            rows.append(_parse_row(row, _ROW | more))
        except ValueError as error:
            raise ValueError(f"{name}[{i}]: {error}") from error
    return tuple(rows)


def _parse_row(row: Any, keys: set[str]) -> StepCost:
    if not isinstance(row, dict) or set(row) != keys:
        raise ValueError(f"expected keys {sorted(keys)}, got {_keys(row)}")
    if not isinstance(row["ms"], dict):
        raise ValueError(f"ms: expected an object, got {row['ms']!r}")
    ms = {phase: _parse_spread(phase, value) for phase, value in row["ms"].items()}
    counts = {name: row[name] for name in (*_COUNTS, "nodes") if name in keys}
    cost = StepCost(**counts, ms=ms)
    if row["sum_width"] != cost.sum_width:
        raise ValueError(f"sum_width: expected requests * width = {cost.sum_width}, got {row['sum_width']!r}")
    return cost


def _parse_spread(phase: str, value: Any) -> Spread:
    if not isinstance(value, dict) or set(value) != set(_SPREAD):
        raise ValueError(f"ms.{phase}: expected keys {list(_SPREAD)}, got {_keys(value)}")
    try:
        return Spread(**value)
    except ValueError as error:
        raise ValueError(f"ms.{phase}: {error}") from error


def _keys(value: Any) -> Any:
    return sorted(value) if isinstance(value, dict) else value
