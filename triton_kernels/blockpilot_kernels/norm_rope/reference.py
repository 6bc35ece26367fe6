"""Row-wise glue in plain PyTorch, fp32.

Only exactly rounded operations and `torch.exp`, `torch.rsqrt` are used: `F.silu` and `torch.sigmoid` take another
code path for the last elements of a buffer, which would tie a value's bits to its position.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] float32, weight [H] → x / sqrt(mean(x²) + eps) · weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: x [n, heads, D] float32, cos and sin [n, D/2] float32."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2·I] float32 → silu(gate) · up, [n, I]."""
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up
