"""`head_choice` in plain PyTorch: the meaning of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels.choose.reference import lowest_argmax
from blockpilot_kernels.tiled_linear import PackedLinear


def head_choice(
    hidden: Tensor,
    head: PackedLinear,
    scale: float,
    ids: Tensor | None,
    noise: Tensor | None,
    source: Tensor,
    temperature: Tensor,
    banned: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `blockpilot_kernels.head_choice.head_choice`."""
    logits = head(hidden) * scale
    known = torch.arange(head.out_features, device=logits.device) if ids is None else ids
    finite, score = torch.isfinite(logits).all(-1), logits
    if noise is not None:
        # Not noise[source]: indexing wakes OpenMP's threads, which then spin on the cores of the next pass.
        shared = noise.index_select(0, source)
        shared = shared if ids is None else shared.index_select(1, ids)
        sampled = (temperature > 0)[:, None]
        score = torch.where(
            sampled, logits / torch.where(sampled, temperature[:, None], 1.0) + shared, logits
        )
    if banned is not None:
        for column in banned.unbind(1):
            score = torch.where(known == column[:, None], -torch.inf, score)
    return known[torch.where(finite, lowest_argmax(score), 0)], finite
