"""Attention of ragged blocks over a static KV cache, bitwise independent of everything beside the row."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.block_attention import reference
from blockpilot_kernels.block_attention.reference import KV_CHUNK, SPAN, AttentionTiles
from blockpilot_kernels.tiled_linear.reference import TILE
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["KV_CHUNK", "AttentionTiles", "block_attention", "scratch_bytes"]

CACHE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bad: Tensor,
    tiles: AttentionTiles,
    position: Tensor,
    extent: Tensor,
    bound: int,
    *,
    causal: bool,
    window: int | None = None,
    path: Tensor | None = None,
) -> Tensor:
    """softmax(q·Kᵀ/√D)·V for packed query rows over their slots' cached keys, summed in float32.

    The Triton kernel multiplies in the cache's type, as tensor cores do: with one of 16 bits, queries and
    probabilities are rounded to it. Keys are split at fixed positions and the parts combined in their order
    (Flash-Decoding; FlashAttention-2, arXiv 2307.08691).

    Args:
        q: [N, Hq, D] float32, N a multiple of 16. With a float16 cache on the triton backend, at most 65504 in size.
        k_cache, v_cache: [S, Hkv, C, D] float32, bfloat16 or float16, C a multiple of 64; unwritten entries may hold
            anything, NaN included.
        bad: [S, C] bool, True where a written key or value is not finite: a row that sees it becomes NaN.
        tiles: see `AttentionTiles`; built for N rows, the heads of this group size, and slots below S.
        position: [N] int64 absolute position of each row.
        extent: [S] int64 keys written per slot; only positions < extent exist.
        bound: multiple of 64, at least the largest extent among the slots.
        causal: keys at positions ≤ the row's; otherwise every key of the slot.
        window: sliding window length; |position − key| < window.
        path: [N, P] int64, for trees: the place of the key of each row's ancestor, the anchor first and rising, its own
            the last that counts; the keys before the anchor lie at the places of their positions. A row sees these
            alone, summed as though they lay side by side. `tiles` were built `apart`, `causal` is True, and a slot has
            no more keys behind its anchor than rows. None: every key lies at the place of its position.

    Returns:
        [N, Hq·D] float32; rows that are padding are 0.

    Raises:
        ValueError: wrong shape, dtype, strides or device; a path without `causal`, or with more than 64 query heads a
            KV head.
    """
    _validate(q, k_cache, v_cache, bad, position, extent)
    _validate_tiles(q, k_cache.shape[1], tiles)
    _validate_keys(k_cache, bound, window)
    _validate_path(q, k_cache.shape[1], causal, path)
    given = (q, k_cache, v_cache, bad, tiles, position, extent, bound)
    if dispatch.backend_for("block_attention", q) == "triton":
        from blockpilot_kernels.block_attention import kernel

        # Every position is below the capacity, so a longer window sees the same keys, and 32 bits hold this one.
        return kernel.block_attention(*given, causal, window and min(window, k_cache.shape[2]), path)
    return reference.block_attention(*given, causal=causal, window=window, path=path)


def scratch_bytes(tiles: int, kv_heads: int, dim: int, keys: int, device: str) -> int:
    """Bytes that `block_attention` holds beside its inputs and result, at most.

    Args:
        tiles: of 16 queries. kv_heads, dim: as in the cache. keys: the bound. device: its type, such as "cuda".
    """
    if dispatch.backend_of(device) == "triton":
        from blockpilot_kernels.block_attention import kernel

        return kernel.scratch_bytes(kv_heads, dim, keys)
    # A tile's keys and values are there twice in fp32 while they are masked, and its scores three times.
    return 4 * tiles * kv_heads * keys * (4 * dim + 3 * TILE)


def _validate(q: Tensor, k: Tensor, v: Tensor, bad: Tensor, position: Tensor, extent: Tensor) -> None:
    op = "block_attention"
    expect_dim(op, "q", q, 3)
    expect_dim(op, "k_cache", k, 4)
    rows, heads, dim = q.shape
    slots, kv_heads, length, _ = k.shape
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: q: expected a multiple of {kv_heads} KV heads, got {heads} heads")
    if k.dtype not in CACHE_TYPES:
        known = ", ".join(str(t).removeprefix("torch.") for t in CACHE_TYPES)
        raise ValueError(f"{op}: k_cache: expected one of {known}, got {k.dtype}; convert it with .to()")
    expect(op, "q", q, torch.float32, (rows, heads, dim), q)
    expect(op, "k_cache", k, k.dtype, (slots, kv_heads, length, dim), q)
    expect(op, "v_cache", v, k.dtype, (slots, kv_heads, length, dim), q)
    expect(op, "bad", bad, torch.bool, (slots, length), q)
    expect(op, "position", position, torch.int64, (rows,), q)
    expect(op, "extent", extent, torch.int64, (slots,), q)
    if k.stride() != v.stride() or k.stride()[2:] != (dim, 1) or bad.stride(1) != 1:
        raise ValueError(
            f"{op}: k_cache, v_cache, bad: expected equal strides and each head's positions one after the other, got "
            f"{k.stride()}, {v.stride()} and {bad.stride()}; allocate them alike"
        )


def _validate_tiles(q: Tensor, kv_heads: int, tiles: AttentionTiles) -> None:
    """What was built for other rows or heads would reach beyond the operands."""
    op, (rows, heads, _) = "block_attention", q.shape
    if rows % TILE:
        raise ValueError(f"{op}: q: expected a multiple of {TILE} rows, got {rows}; pad them")
    expect(op, "tiles.scatter", tiles.scatter, torch.int64, (rows * heads // kv_heads,), q)
    expect(op, "tiles.spans", tiles.spans, torch.int32, (len(tiles.spans), 3), q)


def _validate_keys(k: Tensor, bound: int, window: int | None) -> None:
    if bound % KV_CHUNK or not KV_CHUNK <= bound <= k.shape[2]:
        raise ValueError(
            f"block_attention: bound: expected a multiple of {KV_CHUNK} up to the cache's {k.shape[2]}, got {bound}"
        )
    if window is not None and window < 1:
        raise ValueError(f"block_attention: window: expected None or at least 1, got {window}")


def _validate_path(q: Tensor, kv_heads: int, causal: bool, path: Tensor | None) -> None:
    if path is None:
        return
    op, (rows, heads, _) = "block_attention", q.shape
    expect_dim(op, "path", path, 2)
    expect(op, "path", path, torch.int64, (rows, path.shape[1]), q)
    if not causal:
        raise ValueError(
            f"{op}: causal: expected True with a path, got False; a node sees its ancestors alone"
        )
    if heads // kv_heads > SPAN:
        raise ValueError(
            f"{op}: q: expected at most {SPAN} heads a KV head with a path, got {heads // kv_heads}; draft chains"
        )
