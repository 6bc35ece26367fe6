"""Steps of training a SpecBlock drafter (arXiv 2605.07243)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockpilot.training.draft_batches import make_blocks
from blockpilot.training.draft_loss import DraftIds, Labels
from blockpilot.training.draft_training import DraftTrainer
from blockpilot.training.specblock_loss import BlockLoss
from blockpilot.training.specblock_model import BLOCKS, SpecBlockModel

SHARE = 4  # one in so many anchors has later blocks; the first block of every pair is run in any case


class SpecBlockTrainer(DraftTrainer):
    """See `DraftTrainer`: a step runs the first block of every anchor and, behind some, two that go on from random
    slots.

    Args:
        valid_prefix: as in `BlockLoss`.
    """

    model: SpecBlockModel
    vocabulary: DraftIds

    def __init__(self, *parts: Any, valid_prefix: bool = True) -> None:
        super().__init__(*parts)
        self._block_loss = BlockLoss(self.recipe.gamma, self.recipe.distil, valid_prefix)

    def _loss(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        k, device = width - 1, self.embedding.device
        answers, anchors = self._answers()
        blocks, given = make_blocks(answers, anchors, BLOCKS * k + 1, 0, torch.ones(1, dtype=torch.float32))
        s, n = blocks.anchor.shape
        starts = torch.randint(1, k + 1, (s, -(-n // SHARE), BLOCKS - 1), generator=self.generator)
        begins = [torch.zeros(s, n, dtype=torch.long), *starts.cumsum(-1).unbind(-1)]
        labels = _behind(given, begins, k)
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            made = self.model.drafts(blocks.to(device), self.embedding, starts.to(device))
            hidden = torch.cat([x.flatten(0, 1) for x in made])
            loss, right, slot = self._block_loss(self.model, hidden, labels, self.vocabulary)
        return loss, right.cpu(), slot.cpu()


def _behind(labels: Labels, begins: Sequence[Tensor], k: int) -> Labels:
    """[M, k] of labels [S·N·3K]: those that begin [S, N'] ids, each of `begins`, behind the first N' anchors."""
    anchor = torch.arange(begins[0].numel()).view_as(begins[0]) * BLOCKS * k
    first = torch.cat([(anchor[:, : b.shape[1]] + b).flatten() for b in begins])
    return Labels(*(t[first[:, None] + torch.arange(k)] for t in vars(labels).values()))
