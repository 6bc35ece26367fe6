"""Held-out comparison of ways to choose a width, with bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.training.dataset import Examples, best, worth
from blockpilot.training.held_out import (
    FEW_PROMPTS,
    LEAST_PROMPTS,
    Bootstrap,
    Group,
    HeldOutReport,
    Interval,
    Section,
    SplitHalf,
)

__all__ = [
    "Bootstrap",
    "Group",
    "HeldOutReport",
    "Interval",
    "Picked",
    "Section",
    "SplitHalf",
    "compare",
    "conclude",
    "warnings_of",
]


@dataclass(frozen=True)
class Picked:
    """Prompts of one evaluation set, with the columns [N] that predictor and shuffled control picked for them."""

    examples: Examples
    chosen: Tensor
    control: Tensor

    def select(self, rows: Sequence[int]) -> Picked:
        """The prompts at the given rows."""
        index = torch.tensor(rows, dtype=torch.long)
        return Picked(self.examples.select(rows), self.chosen[index], self.control[index])


def compare(
    train: Examples,
    held_out: Examples,
    chosen: Tensor,
    control: Tensor,
    *,
    block_size: int,
    cost: Mapping[int, float] | None,
    bootstrap: Bootstrap,
    evaluation: Picked | None = None,
) -> Section:
    """The section of one measure.

    Args:
        train, held_out: the two parts; only `best_fixed` and the split-half oracle's ties look at `train`.
        chosen, control: columns [N] the predictor and the shuffled-label control picked for `held_out`.
        cost: None for τ, seconds of a step by width for tokens per second.
        evaluation: prompts of evaluation sets, each of which gets a group of its own.
    """
    window = held_out.window
    prior = worth(train.tau, window, cost).mean(0)
    scorer = _Scorer(int(best(prior[None])), block_size, cost)
    picked = Picked(held_out, chosen, control)
    values = worth(held_out.tau, window, cost)
    at_block = window.index(block_size) if block_size in window else None
    label = best(values)
    whole = scorer.group(picked, bootstrap)
    return Section(
        measure="tau" if cost is None else "tokens_per_second",
        strategies=whole.strategies,
        gains=whole.gains,
        best_fixed_width=window[scorer.fixed],
        picks=whole.picks,
        best_widths=_histogram(label, window),
        accuracy=_share(chosen == label),
        control_accuracy=_share(control == label),
        block_size_best=None if at_block is None else _share(values[:, at_block] == values.amax(-1)),
        block_size_label=None if at_block is None else _share(label == at_block),
        regret=whole.regret,
        by_family=scorer.groups(picked, held_out.families, bootstrap),
        by_dataset=scorer.groups(picked, held_out.datasets, bootstrap),
        evaluation={}
        if evaluation is None
        else scorer.groups(evaluation, evaluation.examples.datasets, bootstrap),
        split_half=_split_half(picked, prior, scorer, bootstrap),
    )


@dataclass(frozen=True)
class _Scorer:
    """One measure: the best fixed column, the drafter's block size, and the cost, None for τ."""

    fixed: int
    block_size: int
    cost: Mapping[int, float] | None

    def strategies(self, picked: Picked) -> dict[str, Tensor]:
        """Value per prompt [N] of every way to choose."""
        window = picked.examples.window
        values = worth(picked.examples.tau, window, self.cost)
        found = {}
        if self.block_size in window:
            found["drafter_block"] = values[:, window.index(self.block_size)]
        if self.cost is not None and 1 in self.cost:
            found["plain"] = values.new_full((len(values),), 1 / self.cost[1])
        return found | {
            "best_fixed": values[:, self.fixed],
            "predictor": _take(values, picked.chosen),
            "shuffled_control": _take(values, picked.control),
            "random": values.mean(-1),
            "oracle": values.amax(-1),
        }

    def group(self, picked: Picked, bootstrap: Bootstrap) -> Group:
        """The figures of all the prompts given."""
        found = self.strategies(picked)
        oracle, mine = found["oracle"], found["predictor"]
        gains = {f"predictor - {k}": mine - v for k, v in found.items() if k != "predictor"}
        gains["oracle - best_fixed"] = oracle - found["best_fixed"]
        return Group(
            prompts=len(picked.examples),
            strategies={k: bootstrap.interval(v) for k, v in found.items()},
            gains={k: bootstrap.interval(v) for k, v in gains.items()},
            picks=_histogram(picked.chosen, picked.examples.window),
            regret=float((oracle - mine).mean()),
        )

    def groups(self, picked: Picked, names: Sequence[str | None], bootstrap: Bootstrap) -> dict[str, Group]:
        """A group for each name, in sorted order; prompts without a name are in none."""
        found = {}
        for name in sorted({n for n in names if n is not None}):
            rows = [i for i, n in enumerate(names) if n == name]
            found[name] = self.group(picked.select(rows), bootstrap.of(len(rows)))
        return found


def _split_half(picked: Picked, prior: Tensor, scorer: _Scorer, bootstrap: Bootstrap) -> SplitHalf | None:
    """Widths chosen on the first halves and scored on the second; of equal ones, the best on the training part.

    Args:
        prior: mean training value of each width [C].
    """
    examples = picked.examples
    if examples.halves is None:
        return None
    rows = torch.isfinite(examples.halves).all(-1).all(-1).nonzero()[:, 0].tolist()
    if not rows:
        return None
    first, second = worth(examples.halves[rows], examples.window, scorer.cost).unbind(1)
    tied = first == first.amax(-1, keepdim=True)
    chosen = best(torch.where(tied, prior, -torch.inf))
    found = {
        "best_fixed": second[:, scorer.fixed],
        "predictor": _take(second, picked.chosen[rows]),
        "split_half_oracle": _take(second, chosen),
        "oracle": second.amax(-1),
    }
    pairs = [
        ("split_half_oracle", "best_fixed"),
        ("predictor", "best_fixed"),
        ("predictor", "split_half_oracle"),
    ]
    bootstrap = bootstrap.of(len(rows))
    return SplitHalf(
        prompts=len(rows),
        strategies={k: bootstrap.interval(v) for k, v in found.items()},
        gains={f"{a} - {b}": bootstrap.interval(found[a] - found[b]) for a, b in pairs},
    )


def tau_by_width(examples: Examples, bootstrap: Bootstrap) -> dict[int, Interval]:
    """Mean τ of every width."""
    return {w: bootstrap.interval(examples.tau[:, i]) for i, w in enumerate(examples.window)}


def conclude(section: Section) -> str:
    """Whether the predictor beats the best fixed width, from the paired interval."""
    gain, unit = section.gains["predictor - best_fixed"], section.measure.replace("_", " ")
    figures = f"{gain.mean:+.4g} {unit}, 95 % interval [{gain.low:+.4g}, {gain.high:+.4g}]"
    against = f"the best fixed width ({section.best_fixed_width})"
    if supported(section):
        return f"The predictor beats {against}: {figures}, above zero."
    if gain.low > 0:
        count = sum(section.picks.values())
        return (
            f"The predictor is ahead of {against}: {figures}, on too few held-out prompts ({count}) to tell."
        )
    if gain.high < 0:
        return f"The predictor is worse than {against}: {figures}, below zero."
    return f"The predictor does not beat {against}: {figures}, not above zero."


def supported(section: Section) -> bool:
    """Whether the predictor's interval over the best fixed width is above zero, on prompts enough to tell."""
    enough = sum(section.picks.values()) >= LEAST_PROMPTS
    return enough and section.gains["predictor - best_fixed"].low > 0


def _take(values: Tensor, columns: Tensor) -> Tensor:
    return values.gather(1, columns[:, None])[:, 0]


def _histogram(columns: Tensor, window: tuple[int, ...]) -> dict[int, int]:
    counts = torch.bincount(columns, minlength=len(window)).tolist()
    return dict(zip(window, counts, strict=True))


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())


def warnings_of(
    held_out: Examples, sections: tuple[Section, Section | None], left_out: int, repeated: int
) -> tuple[str, ...]:
    """What a reader of a report must know first; sections: acceptance, and throughput if there is a cost."""
    found, (acceptance, throughput) = [], sections
    if throughput is not None and (behind := _behind_plain(throughput)):
        found.append(behind)
    if len(held_out) < FEW_PROMPTS:
        found.append(
            f"only {len(held_out)} prompts are held out, fewer than {FEW_PROMPTS}: the intervals are rough"
        )
    if acceptance.split_half is None:
        found.append("no split-half oracle: the labels hold no halves of the answers; label again to have it")
    if left_out:
        found.append(f"{left_out} held-out prompts are also in the training part and are left out")
    if repeated:
        found.append(f"{repeated} evaluation prompts are also among the labels and are left out")
    return tuple(found)


def _behind_plain(section: Section) -> str | None:
    plain, fixed = (section.strategies.get(name) for name in ("plain", "best_fixed"))
    if plain is None or fixed is None or plain.mean <= fixed.mean:
        return None
    return (
        f"plain decoding is faster than the best fixed width, {section.best_fixed_width}, on the held-out prompts: "
        f"{plain.mean:.4g} against {fixed.mean:.4g} tokens/s; drafting does not pay for requests like these"
    )
