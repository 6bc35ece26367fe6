"""SpecBlock's loss: a slot learns where the ones before it were right, and a head learns how far down a slot's list the
target's id stands (arXiv 2605.07243)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from blockpilot.training.draft_loss import ABSENT, DraftIds, Labels, position_weights, row_loss
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
        self, model: SpecBlockModel, hidden: Tensor, number: Tensor, given: Labels, vocabulary: DraftIds
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Σ over first, second, … blocks of the weighted means over their slots, and of `rank_loss`; of the R rows that
        count also rightness [R] bool and slot [R].

        A label that the drafter cannot say ends what counts, and its rank is the last class.

        Args:
            hidden: [M, K, H] of blocks before the final norm. number: [M] 0 of a first block, 1 of a second, ….
            given: labels [M, K], their teachers [M, K, 16].
        """
        k, ids, labels = hidden.shape[1], vocabulary.seen.to(hidden.device), vocabulary.keep(given)
        live, known = given.ids != ABSENT, labels.ids != ABSENT
        column = torch.where(known, torch.searchsorted(ids, labels.ids), -1)
        true = _standing(model, hidden, column, live)
        if self.valid_prefix:
            live = unbroken(live, true == 0)
        rows = live.flatten().nonzero()[:, 0]
        block, slot, counts, true = number[rows // k], rows % k, known.flatten()[rows], true.flatten()[rows]
        normed = model.normed(hidden.flatten(0, 1)[rows])
        logits = F.linear(normed, model.lm_head).float()
        loss = row_loss(logits, Labels(*(t.flatten(0, 1)[rows] for t in vars(labels).values())), ids, self.distil)
        group, weights = block * k + slot, position_weights(k, self.gamma).to(loss.device)
        share = weights[slot] / torch.bincount(group, counts.float())[group].clamp_min(1)
        scores = model.ranked(normed, logits)
        held = torch.zeros_like(live).flatten().index_put((rows,), scores.argmax(-1) == true)
        ranked = unbroken(live, held.view_as(live)).flatten()[rows]
        total = (loss * share * counts).sum() + rank_loss(scores[ranked], true[ranked], block[ranked])
        return total, (true == 0)[counts], slot[counts]


def _standing(model: SpecBlockModel, hidden: Tensor, column: Tensor, present: Tensor) -> Tensor:
    """Rank classes [M, K] of `column` [M, K] where `present`; a pass of its own, so that gradients need few rows."""
    rows = present.flatten().nonzero()[:, 0]
    logits = F.linear(model.normed(hidden.detach().flatten(0, 1)[rows]).detach(), model.lm_head.detach())
    true = column.new_full((column.numel(),), len(RANKS))
    return true.index_put((rows,), rank_classes(logits, column.flatten()[rows])).view_as(column)


def unbroken(present: Tensor, right: Tensor) -> Tensor:
    """[M, K] bool: slots that are present and behind right ones alone; present, right [M, K] bool."""
    before = F.pad(right[:, :-1], (1, 0), value=True)
    return present & before.long().cumprod(1).bool()


def rank_classes(logits: Tensor, column: Tensor) -> Tensor:
    """[N] int64 class of the rank of `column` [N] in logits [N, V']; −1, an id that the drafter lacks, is beyond all."""
    above = (logits > logits.gather(1, column.clamp_min(0)[:, None])).sum(-1)
    edges = torch.tensor(RANKS, device=logits.device)
    return torch.where(column < 0, len(RANKS), torch.bucketize(above, edges, right=True))


def rank_loss(scores: Tensor, true: Tensor, block: Tensor) -> Tensor:
    """Σ over block numbers of the mean loss of the rank head's rows, weighted by class.

    A row's target is soft, ∝ (1 + |c − t| + max(t − c, 0))⁻² over classes c; it weighs min(1, 10/count of its class t),
    and what it loses is multiplied by 1 + |t − ĉ| + max(t − ĉ, 0): a branch too few costs more than one too many.

    Args:
        scores: [R, 4]. true: [R] classes t; ĉ is the one with the highest score. block: [R] numbers.
    """
    classes = torch.arange(len(RANKS) + 1, device=scores.device)
    soft = _distance(true[:, None], classes) ** -2.0
    loss = -(soft / soft.sum(-1, keepdim=True) * scores.float().log_softmax(-1)).sum(-1)
    group = block * len(classes) + true
    weight = (FEW / torch.bincount(group)[group]).clamp_max(1.0)
    share = weight / torch.bincount(block, weight)[block]
    return (loss * share * _distance(true, scores.argmax(-1))).sum()


def _distance(true: Tensor, other: Tensor) -> Tensor:
    """1 + |t − c| + max(t − c, 0)."""
    off = true - other
    return (1 + off.abs() + off.clamp_min(0)).float()
