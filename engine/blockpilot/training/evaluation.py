"""Held-out comparison of ways to choose a width, with bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockpilot.training.dataset import Examples, best, worth

PERCENT = 95


@dataclass(frozen=True)
class Interval:
    """A mean over held-out prompts with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Section:
    """Every strategy under one measure: "tau" or "tokens_per_second".

    Attributes:
        measure: what the figures are.
        strategies: mean per strategy: drafter_block (where labelled), best_fixed, predictor,
            shuffled_control, random (expectation over the window), oracle (each prompt's best width,
            known afterwards).
        gains: paired differences: predictor minus each other strategy, and oracle minus best_fixed.
        best_fixed_width: the width with the highest mean on the training part.
        picks: how often the predictor chose each width.
        best_widths: how often each width was the best one.
        accuracy, control_accuracy: share of prompts whose best width (lowest on a tie) was chosen.
        block_size_best: share of prompts where no width beats the drafter's block size; None: not labelled.
        block_size_label: share of prompts whose best width (lowest on a tie) is the drafter's block size.
        regret: oracle minus predictor, mean.
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


@dataclass(frozen=True)
class HeldOutReport:
    """What a policy is worth on prompts that chose nothing about it.

    Attributes:
        objective: what training maximised. window, block_size: widths, drafter block size.
        train, held_out: prompts in either part. split: how they were parted.
        acceptance: figures in τ. throughput: figures in tokens per second, where a cost table was given.
        tau_by_width: held-out mean τ of every width.
        conclusion: one sentence on predictor against best fixed width under the objective.
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
    conclusion: str = field(default="")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        plain: dict[str, Any] = _jsonable(asdict(self))
        return plain


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    return [_jsonable(v) for v in value] if isinstance(value, (list, tuple)) else value


class Bootstrap:
    """Resamples of n prompts, the same for every figure, so that differences are paired."""

    def __init__(self, n: int, resamples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rows = torch.randint(n, (resamples, n), generator=generator)

    def interval(self, values: Tensor) -> Interval:
        """Mean and percentile interval of per-prompt values [n]."""
        means = values.double()[self._rows].mean(-1)
        tail = (100 - PERCENT) / 200
        low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return Interval(float(values.double().mean()), low, high)


def compare(
    train: Examples,
    held_out: Examples,
    chosen: Tensor,
    control: Tensor,
    *,
    block_size: int,
    cost: Mapping[int, float] | None,
    bootstrap: Bootstrap,
) -> Section:
    """The section of one measure.

    Args:
        train, held_out: the two parts; only `best_fixed` looks at `train`.
        chosen, control: columns [N] the predictor and the shuffled-label control picked for `held_out`.
        cost: None for τ, seconds of a step by width for tokens per second.
    """
    window = held_out.window
    values = worth(held_out.tau, window, cost)
    fixed = int(best(worth(train.tau, window, cost).mean(0, keepdim=True)))
    at_block = window.index(block_size) if block_size in window else None
    label = best(values)
    per_prompt = _strategies(values, fixed, at_block, chosen, control)
    oracle, mine = per_prompt["oracle"], per_prompt["predictor"]
    gains = {f"predictor - {k}": mine - v for k, v in per_prompt.items() if k != "predictor"}
    gains["oracle - best_fixed"] = oracle - per_prompt["best_fixed"]
    return Section(
        measure="tau" if cost is None else "tokens_per_second",
        strategies={k: bootstrap.interval(v) for k, v in per_prompt.items()},
        gains={k: bootstrap.interval(v) for k, v in gains.items()},
        best_fixed_width=window[fixed],
        picks=_histogram(chosen, window),
        best_widths=_histogram(label, window),
        accuracy=_share(chosen == label),
        control_accuracy=_share(control == label),
        block_size_best=None if at_block is None else _share(values[:, at_block] == oracle),
        block_size_label=None if at_block is None else _share(label == at_block),
        regret=float((oracle - mine).mean()),
    )


def _strategies(
    values: Tensor, fixed: int, at_block: int | None, chosen: Tensor, control: Tensor
) -> dict[str, Tensor]:
    """Value per prompt [N] of every way to choose; columns of `values` [N, C]."""
    block = {} if at_block is None else {"drafter_block": values[:, at_block]}
    return block | {
        "best_fixed": values[:, fixed],
        "predictor": _take(values, chosen),
        "shuffled_control": _take(values, control),
        "random": values.mean(-1),
        "oracle": values.amax(-1),
    }


def tau_by_width(examples: Examples, bootstrap: Bootstrap) -> dict[int, Interval]:
    """Mean τ of every width."""
    return {w: bootstrap.interval(examples.tau[:, i]) for i, w in enumerate(examples.window)}


def conclude(section: Section) -> str:
    """Whether the predictor beats the best fixed width, from the paired interval."""
    gain, unit = section.gains["predictor - best_fixed"], section.measure.replace("_", " ")
    figures = f"{gain.mean:+.4g} {unit}, 95 % interval [{gain.low:+.4g}, {gain.high:+.4g}]"
    against = f"the best fixed width ({section.best_fixed_width})"
    if gain.low > 0:
        return f"The predictor beats {against}: {figures}, above zero."
    if gain.high < 0:
        return f"The predictor is worse than {against}: {figures}, below zero."
    return f"The predictor does not beat {against}: {figures}, not above zero."


def _take(values: Tensor, columns: Tensor) -> Tensor:
    return values.gather(1, columns[:, None])[:, 0]


def _histogram(columns: Tensor, window: tuple[int, ...]) -> dict[int, int]:
    counts = torch.bincount(columns, minlength=len(window)).tolist()
    return dict(zip(window, counts, strict=True))


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())
