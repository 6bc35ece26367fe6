"""`qk_rope_append` and `context_append` in plain PyTorch: the meaning of the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels.norm_rope.reference import apply_rope, rms_norm


def qk_rope_append(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    to: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bad: Tensor,
    eps: float,
) -> Tensor:
    """See `blockpilot_kernels.qk_rope_append.qk_rope_append`."""
    heads = k_cache.shape[1]
    q, k, v = qkv.split([qkv.shape[1] - 2 * heads, heads, heads], 1)
    k = apply_rope(k if k_norm is None else rms_norm(k, k_norm, eps), cos, sin)
    _write(k, v, to, k_cache, v_cache, bad)
    return apply_rope(q if q_norm is None else rms_norm(q, q_norm, eps), cos, sin)


def context_append(
    kv: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    to: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bad: Tensor,
    eps: float,
) -> None:
    """See `blockpilot_kernels.qk_rope_append.context_append`."""
    for i, norm in enumerate(k_norm):
        k = apply_rope(rms_norm(kv[:, i, 0], norm, eps), cos, sin)
        _write(k, kv[:, i, 1], to, k_cache[i], v_cache[i], bad[i])


def _write(k: Tensor, v: Tensor, to: Tensor, k_cache: Tensor, v_cache: Tensor, bad: Tensor) -> None:
    """k, v [N, Hkv, D] to places; rows without one go to the first place of the last slot."""
    slots, heads, length, dim = k_cache.shape
    place = torch.where(to < 0, (slots - 1) * length, to)
    slot, head = place // length, torch.arange(heads, device=k.device)
    at = ((slot[:, None] * heads + head) * length + (place - slot * length)[:, None]).flatten()
    k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
    k_cache.view(-1, dim).index_copy_(0, at, k.reshape(-1, dim))
    v_cache.view(-1, dim).index_copy_(0, at, v.reshape(-1, dim))
    finite = torch.isfinite(k).all(-1).all(-1) & torch.isfinite(v).all(-1).all(-1)
    bad.view(-1).index_copy_(0, place, ~finite)
