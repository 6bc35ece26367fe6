"""The figures of a held-out report against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from blockpilot.training.dataset import Examples, best, equally_best, worth
from blockpilot.training.evaluation import Bootstrap, Interval, compare, conclude

WINDOW = (2, 4, 8)


def examples(tau: list[list[float]]) -> Examples:
    names = tuple(str(i) for i in range(len(tau)))
    return Examples(names, names, torch.zeros(len(tau), 1), torch.tensor(tau, dtype=torch.float64), WINDOW)


TRAIN = examples([[1.0, 2.0, 1.5], [1.0, 1.0, 4.0], [1.5, 2.0, 1.0]])  # means 1.167, 1.667, 2.167
HELD = examples([[1.0, 2.0, 3.0], [2.0, 2.0, 1.0], [1.5, 3.0, 3.5], [1.0, 4.0, 2.0]])
CHOSEN, CONTROL = torch.tensor([2, 0, 1, 1]), torch.tensor([0, 0, 0, 0])


def section(cost=None, block_size=4, chosen=CHOSEN):
    bootstrap = Bootstrap(len(HELD), 500, seed=0)
    return compare(TRAIN, HELD, chosen, CONTROL, block_size=block_size, cost=cost, bootstrap=bootstrap)


def test_means_in_tau():
    s = section()
    assert s.measure == "tau" and s.best_fixed_width == 8
    assert {k: v.mean for k, v in s.strategies.items()} == pytest.approx({
        "drafter_block": (2 + 2 + 3 + 4) / 4,
        "best_fixed": (3 + 1 + 3.5 + 2) / 4,
        "predictor": (3 + 2 + 3 + 4) / 4,
        "shuffled_control": (1 + 2 + 1.5 + 1) / 4,
        "random": (6 + 5 + 8 + 7) / 3 / 4,
        "oracle": (3 + 2 + 3.5 + 4) / 4,
    })  # fmt: skip
    assert s.gains["predictor - best_fixed"].mean == pytest.approx((0 + 1 - 0.5 + 2) / 4)
    assert s.gains["oracle - best_fixed"].mean == pytest.approx((0 + 1 + 0 + 2) / 4)
    assert s.regret == pytest.approx(0.5 / 4)


def test_shares_and_histograms_count_the_lowest_width_on_a_tie():
    s = section()
    assert s.best_widths == {2: 1, 4: 1, 8: 2} and s.picks == {2: 1, 4: 2, 8: 1}
    assert (s.accuracy, s.control_accuracy) == (3 / 4, 1 / 4)
    assert (s.block_size_best, s.block_size_label) == (2 / 4, 1 / 4)  # the second prompt is a tie of 2 and 4


def test_tokens_per_second_divide_by_the_cost_of_the_width():
    cost = {2: 0.5, 4: 1.0, 8: 4.0}
    s = section(cost)
    assert s.measure == "tokens_per_second"
    assert s.best_fixed_width == 2  # train means 2.33, 1.67, 0.54
    assert s.strategies["predictor"].mean == pytest.approx((3 / 4 + 4 + 3 + 4) / 4)
    assert s.strategies["oracle"].mean == pytest.approx((2 + 4 + 3 + 4) / 4)
    assert s.best_widths == {2: 3, 4: 1, 8: 0}


def test_a_block_size_that_was_not_labelled_is_left_out():
    s = section(block_size=16)
    assert "drafter_block" not in s.strategies and "predictor - drafter_block" not in s.gains
    assert s.block_size_best is None and s.block_size_label is None


def test_only_the_best_fixed_width_looks_at_the_training_part():
    flipped = examples([[3.0, 2.0, 1.0]])
    bootstrap = Bootstrap(len(HELD), 500, seed=0)
    s = compare(flipped, HELD, CHOSEN, CONTROL, block_size=4, cost=None, bootstrap=bootstrap)
    assert s.best_fixed_width == 2
    old = section().strategies
    assert {k: v for k, v in s.strategies.items() if k != "best_fixed"} == {
        k: v for k, v in old.items() if k != "best_fixed"
    }


def test_equal_values_have_an_interval_of_no_width():
    interval = Bootstrap(5, 100, seed=0).interval(torch.full((5,), 2.5))
    assert (interval.mean, interval.low, interval.high) == (2.5, 2.5, 2.5)


def test_intervals_have_the_normal_width_and_follow_the_seed():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 + 1
    interval = Bootstrap(400, 4000, seed=1).interval(values)
    half = 1.96 * values.std().item() / math.sqrt(400)
    assert interval.low == pytest.approx(values.mean().item() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean().item() + half, abs=0.1 * half)
    assert Bootstrap(400, 4000, seed=1).interval(values) == interval
    assert Bootstrap(400, 4000, seed=2).interval(values) != interval


def test_a_difference_is_paired():
    """A constant advantage on noisy prompts has an interval of no width, unlike unpaired ones."""
    tau = torch.rand(50, 1, dtype=torch.float64) * 5 + torch.tensor([[0.0, 0.25, 0.0]])
    data = examples(tau.tolist())
    picks, control = torch.full((50,), 1), torch.zeros(50, dtype=torch.long)
    s = compare(
        data.select([0]), data, picks, control, block_size=2, cost=None, bootstrap=Bootstrap(50, 200, 0)
    )
    gain = s.gains["predictor - drafter_block"]
    assert gain.low == pytest.approx(0.25) and gain.high == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (best(HELD.tau), "does not beat"),  # gains 0, 1, 0, 2: a resample of zeros is common enough
        (torch.tensor([2, 2, 2, 2]), "does not beat"),  # the best fixed width itself
        (torch.tensor([0, 2, 0, 2]), "does not beat"),
    ],
)
def test_the_conclusion_needs_an_interval_above_zero(chosen, words):
    assert words in conclude(section(chosen=chosen))


def test_the_conclusion_says_plainly_which_way():
    s = replace(section(), picks={2: 4, 4: 6, 8: 0})

    def with_gain(low, mean, high):
        gains = {**s.gains, "predictor - best_fixed": Interval(mean, low, high)}
        return conclude(type(s)(**{**vars(s), "gains": gains}))

    assert with_gain(0.1, 0.2, 0.3).startswith("The predictor beats the best fixed width (8): +0.2 tau")
    assert with_gain(0.0, 0.2, 0.3).startswith("The predictor does not beat")
    assert with_gain(-0.3, -0.2, -0.1).startswith("The predictor is worse than")


def test_best_and_worth():
    tau = torch.tensor([[1.0, 1.0, 0.5], [0.5, 1.0, 1.0]], dtype=torch.float64)
    assert best(tau).tolist() == [0, 1]
    assert worth(tau, WINDOW, None) is tau
    assert worth(tau, WINDOW, {2: 0.5, 4: 1.0, 8: 0.25}).tolist() == [[2.0, 1.0, 2.0], [1.0, 1.0, 4.0]]


def test_training_labels_share_ties_equally():
    tau = torch.tensor([[1.0, 2.0, 2.0], [3.0, 1.0, 2.0]], dtype=torch.float64)
    assert equally_best(tau).tolist() == [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]
