"""Norm and rotary embedding of queries and keys, and keys and values into the cache, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.qk_rope_append import reference
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["context_append", "qk_rope_append"]


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
    """`norm_rope` of a layer's queries and keys; keys and values are written to the cache in place.

    Args:
        qkv: [N, Hq + 2·Hkv, D] float32, the queries first, then the keys. q_norm, k_norm: [D] float32, or both None.
        cos, sin: [N, D/2] float32 at the rows' positions.
        to: [N] int64 slot · C + place that a row's key and value are written to; −1: nowhere. No place occurs twice.
        k_cache, v_cache: [S, Hkv, C, D] float32, bfloat16 or float16. The last slot is nobody's: it may be written.
        bad: [S, C] bool, becomes whether a value that was written there is not finite.

    Returns:
        [N, Hq, D] float32 queries; those of rows without a place hold anything.

    Raises:
        ValueError: wrong shape, dtype, strides or device, or one norm without the other.
    """
    op = "qk_rope_append"
    _validate(op, qkv, cos, sin, to, k_cache[None], v_cache[None], bad[None])
    rows, heads, dim = qkv.shape
    queries = heads - 2 * k_cache.shape[1]
    expect(
        op, "qkv", qkv, torch.float32, (rows, max(queries, 1) + 2 * k_cache.shape[1], k_cache.shape[3]), qkv
    )
    if (q_norm is None) != (k_norm is None):
        raise ValueError(
            f"{op}: q_norm, k_norm: expected both or neither, got one; pass a weight of ones for the other"
        )
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            expect(op, name, norm, torch.float32, (dim,), qkv)
    if dispatch.backend_for(op, qkv) == "triton":
        from blockpilot_kernels.qk_rope_append import kernel

        return kernel.qk_rope_append(qkv, q_norm, k_norm, cos, sin, to, k_cache, v_cache, bad, eps)
    return reference.qk_rope_append(qkv, q_norm, k_norm, cos, sin, to, k_cache, v_cache, bad, eps)


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
    """The same for the keys and values alone of L layers, which share rows and places.

    Args:
        kv: [N, L, 2, Hkv, D] float32, the keys first. k_norm: [L, D] float32.
        k_cache, v_cache: [L, S, Hkv, C, D]. bad: [L, S, C] bool. The others are as in `qk_rope_append`.

    Raises:
        ValueError: wrong shape, dtype, strides or device.
    """
    op = "context_append"
    _validate(op, kv, cos, sin, to, k_cache, v_cache, bad)
    layers, _, heads, _, dim = k_cache.shape
    expect(op, "kv", kv, torch.float32, (kv.shape[0], layers, 2, heads, dim), kv)
    expect(op, "k_norm", k_norm, torch.float32, (layers, dim), kv)
    if dispatch.backend_for("qk_rope_append", kv) == "triton":
        from blockpilot_kernels.qk_rope_append import kernel

        kernel.context_append(kv, k_norm, cos, sin, to, k_cache, v_cache, bad, eps)
    else:
        reference.context_append(kv, k_norm, cos, sin, to, k_cache, v_cache, bad, eps)


def _validate(
    op: str, x: Tensor, cos: Tensor, sin: Tensor, to: Tensor, k: Tensor, v: Tensor, bad: Tensor
) -> None:
    """Of caches [L, S, Hkv, C, D]."""
    expect_dim(op, "k_cache", k, 5)
    rows, dim = x.shape[0], k.shape[4]
    expect(op, "k_cache", k, k.dtype, (*k.shape[:4], dim // 2 * 2), x)
    expect(op, "v_cache", v, k.dtype, tuple(k.shape), x)
    expect(op, "bad", bad, torch.bool, (k.shape[0], k.shape[1], k.shape[3]), x)
    expect(op, "to", to, torch.int64, (rows,), x)
    for name, table in (("cos", cos), ("sin", sin)):
        expect(op, name, table, torch.float32, (rows, dim // 2), x)
    for name, tensor in (("k_cache", k), ("v_cache", v), ("bad", bad)):
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {name}: expected contiguous memory, got strides {tensor.stride()}")
