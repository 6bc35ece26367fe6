"""SpecBlock's loss: a slot learns where the ones before it were right, and a head learns how far down a slot's list the
target's id stands (arXiv 2605.07243)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from blockpilot.training.draft_loss import ABSENT, LEAST, DraftIds, Labels, position_weights, row_loss
from blockpilot.training.specblock_model import SpecBlockModel

RANKS = (1, 4, 10)  # the last rank of a class; beyond them lies one more
FEW = 10  # rows of a class that weigh one each; those of a larger one share this weight


@dataclass(frozen=True)
class BlockLoss:
    """The loss of blocks of K slots.

    Attributes:
        gamma: slot k weighs exp(−k/γ). distil: as in `row_loss`.
        valid_prefix: whether a slot counts only where the ones before it are right; if not, all do.
    """

    gamma: float
    distil: float
    valid_prefix: bool = True

    def __call__(
        self, model: SpecBlockModel, hidden: Tensor, given: Labels, vocabulary: DraftIds
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean over blocks of the weighted sum of their slots' losses, and `rank_loss`; of the R rows that count also
        rightness [R] bool and slot [R].

        A label that the drafter cannot say ends what counts, and its rank is the last class. The published loss is a
        mean of every slot by itself, but of late slots few rows are left, whose noise then drowns what the first learn.

        Args:
            hidden: [M, K, H] of blocks before the final norm. given: labels [M, K], their teachers [M, K, 16], on the
                CPU.
        """
        k, device = hidden.shape[1], hidden.device
        labels = Labels(*(t.to(device) for t in vars(vocabulary.keep(given)).values()))
        ids, live, known = vocabulary.seen.to(device), (given.ids != ABSENT).to(device), labels.ids != ABSENT
        column = torch.where(known, torch.searchsorted(ids, labels.ids), -1)
        true = _standing(model, hidden, column)
        if self.valid_prefix:
            live = unbroken(live, true == 0)
        rows = live.flatten().nonzero()[:, 0]
        slot, counts, true = rows % k, known.flatten()[rows], true.flatten()[rows]
        normed = model.normed(hidden.flatten(0, 1)[rows])
        logits = F.linear(normed, model.lm_head).float()
        labels = Labels(*(t.flatten(0, 1)[rows] for t in vars(labels).values()))
        loss = row_loss(logits, labels, ids, self.distil)
        weights = position_weights(k, self.gamma).to(device)[slot] * counts
        begun = (counts & (slot == 0)).sum().clamp_min(1)
        scores = model.ranked(normed, logits)
        held = torch.zeros_like(live).flatten().index_put((rows,), scores.argmax(-1) == true)
        ranked = unbroken(live, held.view_as(live)).flatten()[rows]
        total = (loss * weights).sum() / begun + rank_loss(scores[ranked], true[ranked])
        return total, (true == 0)[counts], slot[counts]


@torch.no_grad()
def _standing(model: SpecBlockModel, hidden: Tensor, column: Tensor) -> Tensor:
    """Rank classes of `column` [M, K]; a pass of its own, so that gradients need few rows."""
    # A weight that is no leaf: autocast would keep the copy that it makes here, which has no gradient.
    logits = F.linear(model.normed(hidden).flatten(0, 1), model.lm_head.detach())
    return rank_classes(logits, column.flatten()).view_as(column)


def unbroken(present: Tensor, right: Tensor) -> Tensor:
    """[M, K] bool: slots that are present and behind right ones alone; present, right [M, K] bool."""
    before = F.pad(right[:, :-1], (1, 0), value=True)
    return present & before.long().cumprod(1).bool()


def rank_classes(logits: Tensor, column: Tensor) -> Tensor:
    """[N] int64 class of the rank of `column` [N] in logits [N, V']; that of −1, an id without a row, is the last."""
    above = (logits > logits.gather(1, column.clamp_min(0)[:, None])).sum(-1)
    edges = torch.tensor(RANKS, device=logits.device)
    return torch.where(column < 0, len(RANKS), torch.bucketize(above, edges, right=True))


def rank_loss(scores: Tensor, true: Tensor) -> Tensor:
    """Mean loss of the rank head's rows, weighted by class; 0 without any.

    A row's target is soft, ∝ (1 + |c − t| + max(t − c, 0))⁻² over classes c; it weighs min(1, 10/count of its class t),
    and what it loses is multiplied by 1 + |t − ĉ| + max(t − ĉ, 0): a branch too few costs more than one too many.

    Args:
        scores: [R, 4]. true: [R] classes t; ĉ is the one with the highest score.
    """
    classes = torch.arange(len(RANKS) + 1, device=scores.device)
    soft = _distance(true[:, None], classes) ** -2.0
    loss = -(soft / soft.sum(-1, keepdim=True) * scores.float().log_softmax(-1)).sum(-1)
    weight = (FEW / torch.bincount(true, minlength=len(classes)).clamp_min(1)).clamp_max(1.0)[true]
    return (loss * weight * _distance(true, scores.argmax(-1))).sum() / weight.sum().clamp_min(LEAST)


def _distance(true: Tensor, other: Tensor) -> Tensor:
    """1 + |t − c| + max(t − c, 0)."""
    off = true - other
    return (1 + off.abs() + off.clamp_min(0)).float()
