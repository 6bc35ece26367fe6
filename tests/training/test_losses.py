"""The two losses against their formulas."""

from __future__ import annotations

import pytest
import torch

from blockpilot.training.losses import loss_of, targets

VALUES = torch.tensor([[1.0, 2.0, 2.0], [3.0, 1.0, 2.0]], dtype=torch.float64)
SCORES = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.5, 2.0]])


def test_cross_entropy_shares_ties():
    target = targets("cross_entropy", VALUES)
    assert target.tolist() == [[0, 0.5, 0.5], [1, 0, 0]]
    logp = torch.log_softmax(SCORES, -1)
    expected = -(0.5 * logp[0, 1] + 0.5 * logp[0, 2] + logp[1, 0]) / 2
    assert loss_of("cross_entropy", SCORES, target).item() == pytest.approx(expected.item())


def test_expected_gain_is_relative_to_the_best_fixed_width():
    target = targets("expected_gain", VALUES)  # means 2, 1.5, 2: the first of the best is fixed, worth 2
    assert target.tolist() == [[0, 0.5, 0.5], [0, -1, -0.5]]
    p = torch.softmax(SCORES, -1)
    expected = -(0.5 * p[0, 1] + 0.5 * p[0, 2] - p[1, 1] - 0.5 * p[1, 2]) / 2
    assert loss_of("expected_gain", SCORES, target).item() == pytest.approx(expected.item())


def test_expected_gain_prefers_what_is_worth_more_on_average_to_what_is_best_more_often():
    """Width 0 is best by a little in two of three rows that look alike; width 1 by a lot in the third."""
    values = torch.tensor([[1.01, 1.0], [1.01, 1.0], [1.0, 3.0]], dtype=torch.float64)
    for loss, chosen in (("cross_entropy", 0), ("expected_gain", 1)):
        scores = torch.zeros(2, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss_of(loss, scores.expand(3, 2), targets(loss, values)), scores)
        assert int(gradient.argmin()) == chosen
