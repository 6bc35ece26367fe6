"""Which blocks a training step sees: anchors in answers, in an order that a run can take up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockpilot.training.draft_data import Answer
from blockpilot.training.draft_loss import ABSENT, Labels
from blockpilot.training.draft_model import Blocks

Reader = Callable[[], Answer]  # reads one when it is needed
POOL = 16  # batches sorted by length together, so that padding stays small


@dataclass
class Order:
    """Passes over answers in seeded orders; `epoch`, `at` and `size` are all that a resumed run needs.

    Args:
        size: answers of the pass. batch: answers of a step.
    """

    seed: int
    batch: int
    size: int
    epoch: int = 0
    at: int = 0
    _made: tuple[tuple[int, int], list[list[int]]] | None = field(default=None, repr=False, compare=False)

    def next(self, lengths: Sequence[int]) -> list[int]:
        """Answers of the next step; `lengths` may have grown, which the next pass takes up."""
        steps = self.size // self.batch
        if self.at >= steps:
            self.epoch, self.at, self.size = self.epoch + 1, 0, len(lengths)
        chosen = self._pass(lengths)[self.at]
        self.at += 1
        return chosen

    def _pass(self, lengths: Sequence[int]) -> list[list[int]]:
        key = (self.epoch, self.size)
        if self._made is None or self._made[0] != key:
            self._made = key, self._make(lengths)
        return self._made[1]

    def _make(self, lengths: Sequence[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        batches = []
        for start in range(0, self.size, self.batch * POOL):
            pool = sorted(order[start : start + self.batch * POOL], key=lambda i: lengths[i])
            batches += [pool[i : i + self.batch] for i in range(0, len(pool), self.batch)]
        whole = [b for b in batches if len(b) == self.batch]
        return [whole[i] for i in torch.randperm(len(whole), generator=generator).tolist()]


def make_blocks(
    answers: Sequence[Answer],
    anchors: Sequence[Tensor],
    width: int,
    mask_token_id: int,
    weights: Tensor,
) -> tuple[Blocks, Labels]:
    """Blocks of `width` at the given anchors, and labels of columns 1 … width − 1 row by row.

    Args:
        anchors: per answer, N positions; −1 stands for none. weights: [width − 1].

    Returns:
        blocks, and labels of [S·N·(width − 1)] rows.
    """
    length = max(len(a.ids) for a in answers)
    size, teachers = answers[0].features.shape[1], answers[0].teacher_ids.shape[1]
    features = answers[0].features.new_zeros(len(answers), length, size)
    every = torch.zeros(len(answers), length + 1, dtype=torch.long)
    anchor = torch.stack(list(anchors))
    offset = torch.arange(1, width)
    ids = torch.full((*anchor.shape, width - 1), ABSENT)
    first = torch.zeros(*anchor.shape, dtype=torch.long)
    teacher_ids = torch.zeros(*ids.shape, teachers, dtype=torch.long)
    teacher_p = torch.zeros(*ids.shape, teachers, dtype=torch.float32)
    for i, a in enumerate(answers):
        features[i, : len(a.features)] = a.features
        tokens = torch.tensor(a.ids)
        every[i, : len(tokens)] = tokens
        here = anchor[i].clamp_min(0)
        first[i] = tokens[here]
        at = here[:, None] + offset
        known = (at < len(a.ids)) & (anchor[i] >= 0)[:, None]
        ids[i] = torch.where(known, tokens[at.clamp_max(len(a.ids) - 1)], ABSENT)
        said = (at - a.start).clamp(0, len(a.teacher_ids) - 1)
        teacher_ids[i], teacher_p[i] = a.teacher_ids[said], a.teacher_p[said]
    block = torch.cat([first[..., None], torch.full_like(ids, mask_token_id)], -1)
    weight = weights.expand(ids.shape)
    labels = Labels(ids.flatten(), weight.flatten(), teacher_ids.flatten(0, 2), teacher_p.flatten(0, 2))
    return Blocks(features, anchor.clamp_min(0), block, every), labels


def random_anchors(answer: Answer, count: int, generator: torch.Generator) -> Tensor:
    """`count` different answered positions with an id after them, −1 where there are not as many."""
    last = len(answer.ids) - 1  # the id after an anchor must exist
    places = torch.randperm(max(0, last - answer.start), generator=generator)[:count] + answer.start
    return torch.cat([places, places.new_full((count - len(places),), -1)])


def all_anchors(answer: Answer) -> Tensor:
    """Every position that a step of decoding may start at."""
    return torch.arange(answer.start, len(answer.ids) - 1)
