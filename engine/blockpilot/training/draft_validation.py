"""What a drafter in training would be worth: τ by width from teacher-forced answers, without decoding.

Greedy answers are the same at every width, so the drafter's guesses from every anchor say which steps decoding
would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from blockpilot.training.draft_batches import Reader, all_anchors, make_blocks

if TYPE_CHECKING:
    from blockpilot.training.draft_kinds import Model

ROWS = 512  # rows whose logits exist at once


@torch.no_grad()
def right_guesses(
    model: Model,
    reader: Reader,
    embedding: Tensor,
    head: Tensor,
    ids: Tensor,
    width: int,
    vocabulary: Tensor | None = None,
) -> Tensor:
    """[anchors, width − 1] bool: which columns of a block at every anchor guess the answer's id.

    Args:
        embedding, head: [V, H]. ids: [C] sorted, every label among them: what is looked at first. Other ids are
            looked at only where these guess right, so that the answer is that of the whole vocabulary.
        vocabulary: [V'] the ids that the drafter drafts; None: all, and only then `ids` are looked at first.
    """
    answer = reader()
    weights = torch.ones(width - 1, dtype=torch.float32)
    blocks, labels = make_blocks([answer], [all_anchors(answer)], width, model.mask_token_id, weights)
    hidden = model.guesses(blocks.to(embedding.device), embedding).flatten(0, 2)
    first = (ids if vocabulary is None else vocabulary).to(head.device)
    known = labels.ids.to(head.device)
    right = first[_best(hidden, model.head_rows(head, first))].eq(known)
    if vocabulary is None:
        candidates = right.nonzero()[:, 0]
        right[candidates] = _best(hidden[candidates], head).eq(known[candidates])
    return right.cpu().view(-1, width - 1)


def _best(hidden: Tensor, head: Tensor) -> Tensor:
    """[M, H], [C, H] → the row of the highest logit [M]."""
    parts = [F.linear(h.to(head.dtype), head).argmax(-1) for h in hidden.split(ROWS)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device=head.device)


def count_steps(right: Tensor) -> tuple[int, int]:
    """(committed, steps) of decoding a whole answer, from `right_guesses`."""
    accepted = right.long().cumprod(1).sum(1).tolist()
    at = steps = 0
    while at < len(accepted):
        at += min(accepted[at] + 1, len(accepted) - at)
        steps += 1
    return len(accepted), steps


def validate(
    model: Model,
    readers: Sequence[Reader],
    embedding: Tensor,
    head: Tensor,
    ids: Tensor,
    widths: Sequence[int],
    vocabulary: Tensor | None = None,
) -> tuple[dict[int, float], list[float]]:
    """Mean τ over answers by width, and the share of right guesses by column at the widest.

    Args:
        ids: those that training saw; guesses beyond them are seldom right, which saves looking (`right_guesses`).
        vocabulary: [V'] the ids that the drafter drafts; None: all.
    """
    labels = [torch.tensor(a.ids[a.start :]) for a in (reader() for reader in readers)]
    ids = torch.cat([ids, *labels]).unique()
    taus: dict[int, float] = {}
    accuracy: list[float] = []
    for width in sorted(widths):
        each, right, offered = [], torch.zeros(width - 1), torch.zeros(width - 1)
        for reader in readers:
            guesses = right_guesses(model, reader, embedding, head, ids, width, vocabulary)
            if len(guesses) == 0:
                continue
            committed, steps = count_steps(guesses)
            each.append(committed / steps)
            right += guesses.sum(0)
            offered += (len(guesses) - torch.arange(width - 1)).clamp_min(0)
        taus[width] = sum(each) / max(1, len(each))
        accuracy = (right / offered.clamp_min(1)).tolist()
    return taus, accuracy
