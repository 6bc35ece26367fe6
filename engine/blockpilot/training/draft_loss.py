"""The drafter's loss: position-decayed cross-entropy over a reduced vocabulary, with the target's own
probabilities beside its choices.

A step sees only some ids: the most frequent ones, those its labels and teachers need, and a random sample of the
rest whose share of the softmax is weighted up by how rarely it is drawn (Bengio and Senécal 2008).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 1e-12
ABSENT = -100  # a label beyond the end of an answer


@dataclass(frozen=True)
class Labels:
    """What the rows of a step should say.

    Attributes:
        ids: [M] the target's choice, `ABSENT` where there is none. weight: [M].
        teacher_ids: [M, K] its likeliest ids; teacher_p: [M, K] their probabilities, at temperature 1.
    """

    ids: Tensor
    weight: Tensor
    teacher_ids: Tensor
    teacher_p: Tensor


def position_weights(columns: int, gamma: float) -> Tensor:
    """exp(−(k−1)/γ) for k = 1 … columns (SpecForge)."""
    return torch.exp(-torch.arange(columns, dtype=torch.float32) / gamma)


class Vocabulary:
    """Chooses the ids that a step's softmax runs over.

    Args:
        counts: [V] how often the training answers hold each id. size: ids a step sees, about; half of them are
            the most frequent, the others change from step to step, an eighth at least being drawn.

    Attributes:
        seen: ids that the answers hold.
    """

    def __init__(self, counts: Tensor, size: int) -> None:
        self.total, self.size = len(counts), min(size, len(counts))
        self.seen = counts.nonzero()[:, 0]
        self.frequent = counts.argsort(descending=True, stable=True)[: (self.size + 1) // 2]

    def keep(self, labels: Labels) -> Labels:
        """Every label: the softmax takes up what they need."""
        return labels

    def choose(self, labels: Labels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sorted ids [C] of a step and what is added to their logits [C]."""
        wanted = torch.zeros(self.total, dtype=torch.bool)
        wanted[self.frequent] = True
        wanted[labels.ids[labels.ids >= 0]] = True
        wanted[labels.teacher_ids.flatten()] = True
        rest = (~wanted).nonzero()[:, 0]
        room = max(self.size // 8, self.size - int(wanted.sum()))
        share = min(1.0, room / max(1, len(rest)))
        drawn = rest[torch.rand(len(rest), dtype=torch.float32, generator=generator) < share]
        extra = torch.zeros(self.total, dtype=torch.float32)
        extra[drawn] = -math.log(share)
        wanted[drawn] = True
        ids = wanted.nonzero()[:, 0]
        return ids, extra[ids]


class DraftIds:
    """The ids [V'] sorted of a head of the drafter's own, which every step's softmax runs over.

    Attributes:
        seen: the same.
    """

    def __init__(self, ids: Tensor, total: int) -> None:
        self.seen, self._known = ids, torch.zeros(total, dtype=torch.bool)
        self._known[ids] = True

    def keep(self, labels: Labels) -> Labels:
        """Labels that it can say, the others `ABSENT`; probabilities of ids that it can, scaled to the whole."""
        sayable = (labels.ids >= 0) & self._known[labels.ids.clamp_min(0)]
        p = labels.teacher_p * self._known[labels.teacher_ids]
        whole = labels.teacher_p.sum(-1, keepdim=True) / p.sum(-1, keepdim=True).clamp_min(1e-6)
        ids = torch.where(sayable, labels.ids, ABSENT)
        return Labels(ids, labels.weight, labels.teacher_ids, p * whole)

    def choose(self, labels: Labels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """All of them, nothing added to their logits."""
        return self.seen, torch.zeros(len(self.seen), dtype=torch.float32)


def draft_loss(
    hidden: Tensor, rows: Tensor, labels: Labels, ids: Tensor, extra: Tensor, distil: float
) -> tuple[Tensor, Tensor]:
    """Mean `row_loss`, weighted, and which rows guess right among `ids` [M] bool.

    Args:
        hidden: [M, H] rows with a label. rows: [C, H] of the head, for `ids` [C].
    """
    logits = F.linear(hidden, rows.to(hidden.dtype)).float() + extra
    loss = row_loss(logits, labels, ids, distil)
    weighted = (loss * labels.weight).sum() / labels.weight.sum().clamp_min(LEAST)  # no label: no gradient
    with torch.no_grad():
        right = logits.sub(extra).argmax(-1) == torch.searchsorted(ids, labels.ids)
    return weighted, right


def row_loss(logits: Tensor, labels: Labels, ids: Tensor, distil: float) -> Tensor:
    """[M] (1 − λ)·CE(choice) + λ·Σ_k p_k·(−log q_k); λ = `distil`.

    Args:
        logits: [M, C] float32 for `ids` [C] sorted, every label among them; a teacher's id may be missing where its
            probability is 0.
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    chosen = torch.searchsorted(ids, labels.ids)
    loss = (normaliser - logits.gather(1, chosen[:, None]))[:, 0]
    if distil > 0:
        taught = torch.searchsorted(ids, labels.teacher_ids).clamp_max(len(ids) - 1)
        log_q = logits.gather(1, taught) - normaliser
        loss = (1 - distil) * loss - distil * (labels.teacher_p * log_q).sum(-1)
    return loss
