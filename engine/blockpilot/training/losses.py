"""What training minimises, and the targets it needs. v[n, c] is what width c is worth for prompt n."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.training.dataset import equally_best

LOSSES = ("cross_entropy", "expected_gain")


def targets(loss: str, values: Tensor) -> Tensor:
    """What `loss_of` compares the scores with, [N, C] float32, from the training values [N, C].

    "cross_entropy": a share 1/k for each of the k widths that reach the row's maximum.
    "expected_gain": (v[n, c] − v[n, f]) / mean_n v[n, f], the gain over the best fixed width f relative to what f
    is worth, so that the loss has no unit.
    """
    if loss == "cross_entropy":
        return equally_best(values)
    fixed = values[:, int(values.mean(0).argmax())]
    return ((values - fixed[:, None]) / fixed.mean()).float()


def loss_of(loss: str, scores: Tensor, target: Tensor) -> Tensor:
    """Scalar loss of scores [N, C].

    "cross_entropy": −mean_n Σ_c target[n, c] · log softmax(scores[n])[c].
    "expected_gain": −mean_n Σ_c softmax(scores[n])[c] · target[n, c], minus the expected objective when the width
    is drawn from the softmax. A width that is nearly as good as the best costs nearly nothing, where
    cross-entropy counts it as wrong.
    """
    if loss == "cross_entropy":
        return F.cross_entropy(scores, target)
    return -(torch.softmax(scores, -1) * target).sum(-1).mean()
