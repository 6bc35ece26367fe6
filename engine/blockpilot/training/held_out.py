"""What a held-out report holds: figures with bootstrap intervals over prompts. `report` documents its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

PERCENT = 95
FEW_PROMPTS = 50
LEAST_PROMPTS = 10  # below these an interval supports nothing


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


class Bootstrap:
    """Resamples of n prompts, the same for every figure, so that differences are paired."""

    def __init__(self, n: int, resamples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rows = torch.randint(n, (resamples, n), generator=generator)
        self._seed = seed

    def of(self, n: int) -> Bootstrap:
        """As many resamples of n other prompts."""
        return Bootstrap(n, len(self._rows), self._seed)

    def interval(self, values: Tensor) -> Interval:
        """Mean and percentile interval of per-prompt values [n]."""
        means = values.double()[self._rows].mean(-1)
        tail = (100 - PERCENT) / 200
        low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return Interval(float(values.double().mean()), low, high)


@dataclass(frozen=True)
class Group:
    """The strategies on some of the prompts: a family, an evaluation set.

    Attributes:
        prompts: how many. strategies, gains, picks, regret: as in `Section`.
    """

    prompts: int
    strategies: dict[str, Interval]
    gains: dict[str, Interval]
    picks: dict[int, int]
    regret: float


@dataclass(frozen=True)
class SplitHalf:
    """What is left of the oracle's gain on steps that did not choose the width.

    A prompt's width is chosen on the first half of its answer, and everything is scored on the second half.

    Attributes:
        prompts: held-out prompts with both halves at every width.
        strategies: best_fixed, predictor, split_half_oracle, and oracle (the best width of the second half itself).
        gains: split_half_oracle - best_fixed, predictor - best_fixed, predictor - split_half_oracle.
    """

    prompts: int
    strategies: dict[str, Interval]
    gains: dict[str, Interval]


@dataclass(frozen=True)
class Section:
    """Every strategy under one measure: "tau" or "tokens_per_second".

    Attributes:
        measure: what the figures are.
        strategies: mean per strategy: drafter_block (where labelled), plain (where its cost is known), best_fixed,
            predictor, shuffled_control, random (expectation over the window), oracle (each prompt's best width,
            known afterwards).
        gains: paired differences: predictor minus each other strategy, and oracle minus best_fixed.
        best_fixed_width: the width with the highest mean on the training part.
        picks: how often the predictor chose each width.
        best_widths: how often each width was the best one.
        accuracy, control_accuracy: share of prompts whose best width (lowest on a tie) was chosen.
        block_size_best: share of prompts where no width beats the drafter's block size; None: not labelled.
        block_size_label: share of prompts whose best width (lowest on a tie) is the drafter's block size.
        regret: oracle minus predictor, mean.
        by_family: the held-out prompts of each family.
        by_dataset: the held-out prompts of each evaluation set, where the labels name one.
        evaluation: the prompts of the evaluation label files, by evaluation set.
        split_half: None: the labels hold no halves.
    """

    measure: str
    strategies: dict[str, Interval]
    gains: dict[str, Interval]
    best_fixed_width: int
    picks: dict[int, int]
    best_widths: dict[int, int]
    accuracy: float
    control_accuracy: float
    block_size_best: float | None
    block_size_label: float | None
    regret: float
    by_family: dict[str, Group] = field(default_factory=dict)
    by_dataset: dict[str, Group] = field(default_factory=dict)
    evaluation: dict[str, Group] = field(default_factory=dict)
    split_half: SplitHalf | None = None


@dataclass(frozen=True)
class Seeds:
    """Networks that differ in their seed alone, judged on the same held-out prompts under the objective.

    Attributes:
        seeds: of the networks; the first is the one that is saved.
        predictor, gain, accuracy: one per seed: mean, mean difference to the best fixed width, share of prompts
            whose best width was chosen.
        mean, spread: of `gain` over the seeds; the spread is the sample standard deviation, 0 for one seed.
    """

    seeds: tuple[int, ...]
    predictor: tuple[float, ...]
    gain: tuple[float, ...]
    accuracy: tuple[float, ...]
    mean: float
    spread: float

    @classmethod
    def of(cls, seeds: tuple[int, ...], sections: list[Section]) -> Seeds:
        """From the section of every seed."""
        gains = tuple(s.gains["predictor - best_fixed"].mean for s in sections)
        return cls(
            seeds=seeds,
            predictor=tuple(s.strategies["predictor"].mean for s in sections),
            gain=gains,
            accuracy=tuple(s.accuracy for s in sections),
            mean=fmean(gains),
            spread=stdev(gains) if len(gains) > 1 else 0.0,
        )


@dataclass(frozen=True)
class HeldOutReport:
    """What a policy is worth on prompts that chose nothing about it.

    Attributes:
        objective: what training maximised. window, block_size: widths, drafter block size.
        train, held_out: prompts in either part. split: how they were parted.
        acceptance: figures in τ. throughput: figures in tokens per second, where a cost table was given.
        tau_by_width: held-out mean τ of every width.
        conclusion: one sentence on predictor against best fixed width under the objective.
        loss: what training minimised. seeds: over the networks trained.
        saved: the default policy: {"kind": "predictor"}, or {"kind": "fixed", "width": w} where the interval of
            predictor minus best fixed is not above zero.
        warnings: sentences on what weakens the figures.
        predictor_us: median microseconds of one call of the predictor as the loop makes it, if it was timed.
    """

    objective: str
    window: tuple[int, ...]
    block_size: int
    train: int
    held_out: int
    split: str
    acceptance: Section
    throughput: Section | None
    tau_by_width: dict[int, Interval]
    conclusion: str = ""
    loss: str = "cross_entropy"
    seeds: Seeds | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    predictor_us: float | None = None

    @property
    def judged(self) -> Section:
        """The section of the objective."""
        if self.objective == "throughput" and self.throughput is not None:
            return self.throughput
        return self.acceptance

    @property
    def fixed_width(self) -> int | None:
        """The width of the default policy; None: the predictor is the default."""
        return self.saved.get("width")

    @property
    def headline(self) -> str:
        """The conclusion, and what follows from it for the default policy."""
        if self.fixed_width is None:
            return f"{self.conclusion} The default policy is the predictor."
        return f"{self.conclusion} The default policy is the fixed width {self.fixed_width}."

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        plain: dict[str, Any] = _jsonable(asdict(self))
        return plain


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    return [_jsonable(v) for v in value] if isinstance(value, (list, tuple)) else value
