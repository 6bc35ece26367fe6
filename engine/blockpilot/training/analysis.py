"""What τ by prompt and width says about choosing widths: fixed ones, the oracle, noise, locality.

An oracle that knows each prompt's best width is always ahead of a fixed one, even where widths differ by nothing
but noise: the largest of several noisy figures lies above their mean. `noise_control` says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from blockpilot.training.acceptance import AcceptanceTable, Values, check_subset

REACH = 3  # the paper's claim: the best width lies within B±3
PERCENT = 95
_DRAWN_AT_ONCE = 1_000_000


@dataclass(frozen=True)
class Spread:
    """Mean of a figure over simulations and the range that holds 95 % of them."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class NoiseControl:
    """What an oracle gains where widths differ by noise alone, as shares (0.03 is 3 %).

    Attributes:
        residual: standard deviation of the noise, in τ. freedom: degrees of freedom it was divided by.
        simulations: how many tables were drawn.
        over_block, over_best_fixed: the gain over width B (None: not in the window) and the best fixed width.
    """

    residual: float
    freedom: int
    simulations: int
    over_block: Spread | None
    over_best_fixed: Spread


@dataclass(frozen=True)
class Locality:
    """Where each prompt's best width, of all measured ones, lies.

    Attributes:
        differs: share of prompts where some width beats B; None: B was not measured.
        differs_lowest: share whose best width, the lowest on a tie, is another than B.
        within: share with a best width in B±3.
        tied: share where several widths are equally best.
        best: prompts by best width, the lowest on a tie. reaching: prompts by width that reaches the maximum.
    """

    differs: float | None
    differs_lowest: float | None
    within: float
    tied: float
    best: dict[int, int]
    reaching: dict[int, int]


@dataclass(frozen=True)
class Chosen:
    """Somebody's choice of widths: for how many prompts it is as good as the oracle, and its mean τ."""

    prompts: int
    equal_oracle: int
    tau: float


@dataclass(frozen=True)
class Analysis:
    """What one set of prompts shows. Gains are shares: 0.03 is 3 %.

    Attributes:
        tau_by_width: mean τ at every measured width.
        at_block: mean τ at width B; None: not measured.
        window: what a policy would choose from; best fixed width, oracle and noise are about it.
        oracle: mean τ of each prompt's best width in the window.
        noise: None for fewer than two prompts or widths.
    """

    name: str
    prompts: int
    block_size: int
    tau_by_width: dict[int, float]
    at_block: float | None
    window: tuple[int, ...]
    best_fixed_width: int
    best_fixed: float
    oracle: float
    gain_over_block: float | None
    gain_over_best_fixed: float
    noise: NoiseControl | None
    locality: Locality
    chosen: Chosen | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        plain: dict[str, Any] = _by_name(asdict(self))
        return plain


def analyse(
    table: AcceptanceTable,
    window: Sequence[int] | None = None,
    *,
    simulations: int = 2000,
    seed: int = 0,
) -> Analysis:
    """Figures of one set; `window` replaces the table's own.

    Raises:
        ValueError: a window that was not measured, or fewer than one simulation.
    """
    widths = tuple(sorted(set(table.window if window is None else window)))
    check_subset("window", widths, table.widths)
    tau = table.columns(widths)
    by_width = tau.mean(0)
    fixed = int(by_width.argmax())
    oracle = float(tau.max(1).mean())
    block = widths.index(table.block_size) if table.block_size in widths else None
    at_block = None if table.block_column is None else float(table.tau[:, table.block_column].mean())
    enough = min(tau.shape) > 1
    return Analysis(
        name=table.name,
        prompts=len(table.ids),
        block_size=table.block_size,
        tau_by_width={w: float(t) for w, t in zip(table.widths, table.tau.mean(0), strict=True)},
        at_block=at_block,
        window=widths,
        best_fixed_width=widths[fixed],
        best_fixed=float(by_width[fixed]),
        oracle=oracle,
        gain_over_block=oracle / at_block - 1 if at_block else None,
        gain_over_best_fixed=oracle / float(by_width[fixed]) - 1,
        noise=noise_control(tau, block, simulations=simulations, seed=seed) if enough else None,
        locality=locality(table),
        chosen=None if table.chosen is None else _chosen(table, widths),
    )


def noise_control(
    tau: Values, block: int | None, *, simulations: int = 2000, seed: int = 0, freedom: int | None = None
) -> NoiseControl:
    """The oracle's gain in tables of additive prompt and width effects with Gaussian residuals.

    Where prompts gain from width at different rates, that is among the residuals, and the control is too high:
    a gain above it is no noise, one below it proves nothing.

    Args:
        tau: [N, C]; its effects and the size of its residuals are kept.
        block: column of width B, or None.
        freedom: what the sum of squared residuals is divided by; default (N − 1)(C − 1), what is left once a
            mean per prompt and per width is fitted.

    Raises:
        ValueError: fewer than two prompts or widths, or fewer than one simulation.
    """
    if min(tau.shape) < 2 or simulations < 1:
        raise ValueError(
            f"noise control: expected at least 2 prompts, 2 widths and 1 simulation, got {tau.shape[0]}, "
            f"{tau.shape[1]} and {simulations}"
        )
    n, c = tau.shape
    freedom = (n - 1) * (c - 1) if freedom is None else freedom
    expected = tau.mean(1, keepdims=True) + tau.mean(0) - tau.mean()
    residual = float(np.sqrt(((tau - expected) ** 2).sum() / freedom))
    generator = np.random.default_rng(seed)
    over_block, over_fixed = [], []
    batch = max(1, _DRAWN_AT_ONCE // tau.size)
    for start in range(0, simulations, batch):
        count = min(batch, simulations - start)
        drawn = expected + residual * generator.standard_normal((count, n, c))
        oracle, fixed = drawn.max(2).mean(1), drawn.mean(1)
        over_fixed.append(oracle / fixed.max(1) - 1)
        if block is not None:
            over_block.append(oracle / fixed[:, block] - 1)
    beside_block = None if block is None else _spread(np.concatenate(over_block))
    return NoiseControl(residual, freedom, simulations, beside_block, _spread(np.concatenate(over_fixed)))


def locality(table: AcceptanceTable) -> Locality:
    """Best widths of all the measured ones against the block size."""
    top = table.tau == table.tau.max(1, keepdims=True)
    lowest = top.argmax(1)
    near = [abs(w - table.block_size) <= REACH for w in table.widths]
    block = table.block_column
    counts = np.bincount(lowest, minlength=len(table.widths))
    return Locality(
        differs=None if block is None else float((~top[:, block]).mean()),
        differs_lowest=None if block is None else float((lowest != block).mean()),
        within=float(top[:, near].any(1).mean()),
        tied=float((top.sum(1) > 1).mean()),
        best=dict(zip(table.widths, counts.tolist(), strict=True)),
        reaching=dict(zip(table.widths, top.sum(0).tolist(), strict=True)),
    )


def _chosen(table: AcceptanceTable, window: tuple[int, ...]) -> Chosen:
    best = table.columns(window).max(1)
    mine = [table.tau[i, table.widths.index(w)] for i, w in enumerate(table.chosen or ())]
    return Chosen(len(mine), int((np.array(mine) >= best).sum()), float(np.mean(mine)))


def _spread(values: Values) -> Spread:
    tail = (100 - PERCENT) / 200
    low, high = np.quantile(values, [tail, 1 - tail])
    return Spread(float(values.mean()), float(low), float(high))


def _by_name(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _by_name(v) for k, v in value.items()}
    return [_by_name(v) for v in value] if isinstance(value, (list, tuple)) else value
