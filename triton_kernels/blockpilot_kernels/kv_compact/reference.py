"""`kv_compact` in plain PyTorch: the meaning of the op."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_compact(k: Tensor, v: Tensor, bad: Tensor, begin: Tensor, source: Tensor, count: Tensor) -> None:
    """See `blockpilot_kernels.kv_compact.kv_compact`."""
    rows, width = source.shape
    slot = torch.arange(rows, device=k.device)[:, None]
    column = torch.arange(width, device=k.device)
    last = k.shape[3] - 1
    # What is not moved is read from a place of its own and written back to it.
    after = (begin[:, None] + column).clamp(0, last)
    before = torch.where(column < count[:, None], begin[:, None] + source, after)
    for held in (k.transpose(2, 3), v.transpose(2, 3), bad):
        held[:, slot, after] = held[:, slot, before]
