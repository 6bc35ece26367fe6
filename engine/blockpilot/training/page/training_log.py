"""A drafter's training log, and the line fitted to its τ.

JSON lines. {"kind": "train", "step", "blocks", "tokens", "cpu_seconds", "loss", "accuracy" (by offset), "lr"} and
{"kind": "validation", "step", "blocks", "cpu_seconds", "tau" ({width: τ}), "accuracy"}; blocks, tokens and
cpu_seconds count from the start of training. Other kinds are counted, not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.training.page.checks import check_number, refuse_constant

_NUMBERS = {
    "train": ("step", "blocks", "tokens", "cpu_seconds", "loss", "lr"),
    "validation": ("step", "blocks", "cpu_seconds"),
}
LEAST_POINTS = 3


@dataclass(frozen=True)
class TrainingLog:
    """Records in the order of their steps; a resumed run replaces what it repeats.

    Attributes:
        train, validation: the records. others: lines of other kinds.
    """

    train: tuple[dict[str, Any], ...]
    validation: tuple[dict[str, Any], ...]
    others: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths validated anywhere, ascending."""
        return tuple(sorted({w for record in self.validation for w in record["tau"]}))

    def curve(self, width: int, axis: str) -> list[tuple[float, float]]:
        """(x, τ) at one width against "blocks", "tokens" or "cpu_hours", where x is known and above zero."""
        points = ((self._at(r, axis), r["tau"].get(width)) for r in self.validation)
        return [(x, tau) for x, tau in points if x and tau is not None]

    def _at(self, record: dict[str, Any], axis: str) -> float | None:
        if axis == "cpu_hours":
            return float(record["cpu_seconds"]) / 3600
        if axis == "blocks":
            return float(record["blocks"])
        before = [r["tokens"] for r in self.train if r["step"] <= record["step"]]
        return float(before[-1]) if before else None


@dataclass(frozen=True)
class Extrapolation:
    """τ = intercept + slope · ln x by least squares: a guess beyond `last`, not a measurement.

    Attributes:
        points: how many of the last points it was fitted to. first, last: their range of x.
        residual: root mean square of what is left, in τ. ceiling: the width, which τ cannot pass.
    """

    intercept: float
    slope: float
    points: int
    first: float
    last: float
    residual: float
    ceiling: int

    def at(self, x: float) -> float:
        """τ guessed at x."""
        return min(self.intercept + self.slope * math.log(x), float(self.ceiling))


def extrapolate(curve: Sequence[tuple[float, float]], width: int) -> Extrapolation | None:
    """The line through the later half of a curve, at least 3 points of it; None: too few."""
    used = list(curve)[-max(LEAST_POINTS, (len(curve) + 1) // 2) :]
    if len({x for x, _ in used}) < LEAST_POINTS:
        return None
    x, y = np.log([x for x, _ in used]), np.array([tau for _, tau in used])
    slope, intercept = np.polyfit(x, y, 1)
    residual = float(np.sqrt(((intercept + slope * x - y) ** 2).mean()))
    return Extrapolation(
        float(intercept), float(slope), len(used), used[0][0], used[-1][0], residual, width
    )  # fmt: skip


def read_training_log(path: str | Path) -> TrainingLog:
    """Reads a log; a torn last line is left out.

    Raises:
        ValueError: which line is malformed and how, or no line is a training or validation record.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: expected a readable training log, got {error.strerror or error}"
        ) from error
    kept: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
    others = 0
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            record = _parse(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if record["kind"] not in kept:
            others += 1
            continue
        records = kept[record["kind"]]
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    if not any(kept.values()):
        raise ValueError(f"{path}: expected lines of kind train or validation, got {others} others")
    return TrainingLog(tuple(kept["train"]), tuple(kept["validation"]), others)


def _parse(line: bytes) -> dict[str, Any]:
    record = json.loads(line, parse_constant=refuse_constant)
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError(f"expected an object with a kind, got {line[:60]!r}")
    if record["kind"] not in _NUMBERS:
        return record
    for name in _NUMBERS[record["kind"]]:
        check_number(name, record.get(name))
    accuracy = record.get("accuracy")
    if not isinstance(accuracy, list):
        raise ValueError(f"accuracy: expected a list by offset, got {accuracy!r}")
    for value in accuracy:
        check_number("accuracy", value, optional=True)
    return record if record["kind"] == "train" else {**record, "tau": _tau(record.get("tau"))}


def _tau(found: Any) -> dict[int, float]:
    if not isinstance(found, dict) or not all(w.isdecimal() and int(w) >= 1 for w in found):
        raise ValueError(f"tau: expected an object of τ by width, got {found!r}")
    for width, tau in found.items():
        check_number(f"tau[{width}]", tau)
    return {int(w): float(tau) for w, tau in found.items()}
