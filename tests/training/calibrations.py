"""Calibrations whose every cost is a formula, so that what is read off them has one right answer."""

from __future__ import annotations

from itertools import product

from blockpilot.policies import Pair
from blockpilot.training.calibration import Calibration
from blockpilot.training.calibration_rows import PHASES, Spread, StepCost


def modelled(requests: int, context: int, width: int) -> float:
    """Milliseconds: 5 plain; 20 + 2 a request + 0.5 a row of Σ width when drafting; 0.01 a token of context."""
    drafting = 20 + 2 * requests + 0.5 * requests * width
    return (5 if width == 1 else drafting) + 0.01 * context


def row(requests: int = 1, context: int = 100, width: int = 1, nodes: int = 0) -> StepCost:
    """A chain's cell, or a tree's, whose nodes cost as much as columns."""
    ms = modelled(requests, context, nodes + 1 if nodes else width)
    spreads = {phase: Spread(1.0, 0.5, 2.0) for phase in PHASES}
    return StepCost(requests, context, width, 15, {**spreads, "total": Spread(ms, ms - 1, ms + 1)}, nodes)


def calibration(requests=(1, 4), contexts=(100, 300), widths=(1, 2, 4, 8), **over) -> Calibration:
    values = {
        "pair": Pair("some-target", "some-drafter"),
        "dtype": "float32",
        "weights": "stored",
        "device": "cpu",
        "backend": "auto",
        "threads": 2,
        "hardware": {"cpu": "a processor"},
        "versions": {"python": "3.12"},
        "rows": tuple(row(*cell) for cell in product(requests, contexts, widths)),
    }
    return Calibration(**{**values, **over})
