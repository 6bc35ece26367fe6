"""When to update a drafter, and how much of it: a linear bandit whose arms cost seconds (arXiv 2605.07243, which says
that an update must be expected to gain more than it costs; the bounds are LinUCB's, arXiv 1003.0146).

What is uncertain is an update's gain alone: how many more tokens a step commits behind it, as a share g. What that is
worth is arithmetic: work that would take `horizon` seconds takes horizon / (1 + g). So the gain is what is learned,
linear in a context, and the seconds are what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ARMS = ("full", "head")
# What a decision knows: 1; how far τ fell below its long-run mean, as a share; share of first drafts that were
# rejected; share of tokens that the head has no row for; log(1 + rounds since the last update) / 10.
CONTEXT = ("one", "drop", "rejected", "unsayable", "waited")

# Standard deviation of each coefficient before anything is known. A share of what τ fell by may come back.
PRIOR = np.array((0.05, 0.15, 0.05, 0.05, 0.05))
NOISE = 0.005  # of a gain, beside the standard error of its measurement
SIGMAS = 1.64  # from the mean to a bound: 95 % on one side
FADE = 0.95  # weight of what an update told, once another has been seen
# Share of the seconds served that updates without a lower bound above their cost may take: with the watching, 1 %. Half
# of it is kept until τ falls by `FELL`, as a share: requests of another kind are what updates are for. Over 341
# looks at chat, by an EAGLE-3 drafter at width 4, that share had a standard deviation of 0.022 and stayed below 0.043.
EXPLORATION, FELL = 0.008, 0.08
# A gain is expected to last for this share of the seconds served so far, as nothing is known of the future, and for
# `LONGEST` at most: the kind of requests changes.
HORIZON, LONGEST = 0.5, 600.0

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Choice:
    """An update to make; `explores`: its gain may be too small, and is looked for within the budget for that."""

    arm: str
    explores: bool


@dataclass
class Arm:
    """What is known of one arm.

    Attributes:
        precision: [5, 5], weighted: [5] of the gain's coefficients, whose mean is precision⁻¹ · weighted.
        seconds: what an update takes, None before the first. tried: updates so far.
    """

    precision: Array = field(default_factory=lambda: np.diag(PRIOR**-2.0))
    weighted: Array = field(default_factory=lambda: np.zeros(len(CONTEXT)))
    seconds: float | None = None
    tried: int = 0

    def __post_init__(self) -> None:
        self._solve()

    def _solve(self) -> None:
        """As lists: decisions come between two steps, and 25 products are no work for a library with threads."""
        covariance = np.linalg.inv(self.precision)
        self._mean: list[float] = (covariance @ self.weighted).tolist()
        self._covariance: list[list[float]] = covariance.tolist()

    def gain(self, context: Sequence[float]) -> tuple[float, float]:
        """Mean and standard deviation."""
        variance = sum(x * _product(row, context) for x, row in zip(context, self._covariance, strict=True))
        return _product(self._mean, context), math.sqrt(variance)

    def learn(self, context: Sequence[float], gain: float, error: float, seconds: float) -> None:
        """Take in an update; see `Bandit.learn`."""
        x, weight = np.asarray(context), 1 / (error**2 + NOISE**2)
        prior = np.diag(PRIOR**-2.0)
        self.precision = FADE * self.precision + (1 - FADE) * prior + weight * np.outer(x, x)
        self.weighted = FADE * self.weighted + weight * gain * x
        self._solve()
        self.seconds = seconds if self.seconds is None else (self.seconds + seconds) / 2
        self.tried += 1


class Bandit:
    """Decides from numbers alone: the same ones give the same decisions.

    Attributes:
        arms: by name. explored: seconds that exploring updates took. fell: τ has fallen, and
            no update has been made since.
    """

    def __init__(self) -> None:
        self.arms = {name: Arm() for name in ARMS}
        self.explored, self.fell = 0.0, False

    def decide(self, context: Sequence[float], served: float, guess: float) -> Choice | None:
        """The update to make now; None to skip.

        The arm with the highest upper bound of its worth is made if its lower bound is above 0 too, or if the budget
        for exploration has room for it; else the next.

        Args:
            context: as `CONTEXT` names it. served: seconds that steps with drafts took so far. guess: seconds of an
                update that was never made.
        """
        bounds = []
        for name, arm in self.arms.items():
            mean, deviation = arm.gain(context)
            seconds = guess if arm.seconds is None else arm.seconds
            low, high = (saved(served, mean + s * deviation) - seconds for s in (-SIGMAS, SIGMAS))
            bounds.append((high, low, seconds, name))
        self.fell |= context[CONTEXT.index("drop")] >= FELL
        share = EXPLORATION if self.fell else EXPLORATION / 2
        for high, low, seconds, name in sorted(bounds, key=lambda b: b[0], reverse=True):
            if high > 0 and low > 0:
                return Choice(name, explores=False)
            if high > 0 and self.explored + seconds <= share * served:
                return Choice(name, explores=True)
        return None

    def learn(
        self, choice: Choice, context: Sequence[float], gain: float, error: float, seconds: float
    ) -> None:
        """Take in what an update did.

        Args:
            context: at its decision. gain: its share, measured with standard error `error`. seconds: all it took.
        """
        self.arms[choice.arm].learn(context, gain, error, seconds)
        self.explored += seconds if choice.explores else 0.0
        self.fell = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, and `from_dict` makes the same bandit of it."""
        arms = {
            name: {
                "precision": a.precision.tolist(),
                "weighted": a.weighted.tolist(),
                "seconds": a.seconds,
                "tried": a.tried,
            }
            for name, a in self.arms.items()
        }
        return {"arms": arms, "explored": self.explored, "fell": self.fell}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Bandit:
        """See `to_dict`."""
        made = cls()
        made.explored, made.fell = float(found["explored"]), bool(found["fell"])
        for name in ARMS:
            a = found["arms"][name]
            precision, weighted = (np.array(a[k], dtype=np.float64) for k in ("precision", "weighted"))
            made.arms[name] = Arm(precision, weighted, a["seconds"], a["tried"])
        return made


def saved(served: float, gain: float) -> float:
    """Seconds that a gain is expected to save; negative for a loss."""
    return min(HORIZON * served, LONGEST) * (1 - 1 / (1 + max(gain, -0.5)))


def _product(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
