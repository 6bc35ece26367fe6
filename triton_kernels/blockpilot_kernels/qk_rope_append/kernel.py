"""Triton kernel and launchers of `qk_rope_append` and `context_append`.

A program takes a block of the queries' heads of its rows, or all heads of their keys and values, so that it knows
alone whether one of these is not finite. A head is summed over a range that its length alone decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of one program. The interpreter pays per program, a GPU wants many of them.
ROWS_CUDA = 1
ROWS_INTERPRETER = 64
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _turned(P, WEIGHT, m, i, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves [ROWS, HEADS, D/2] of the heads at P [ROWS, HEADS] in rotary embedding, after a norm."""
    p = P[:, :, None] + i[None, None, :]
    a, b = tl.load(p, mask=m, other=0.0), tl.load(p + D // 2, mask=m, other=0.0)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 2) + tl.sum(b * b, 2)) / D + eps)
        m_i = i < D // 2
        a = a * scale[:, :, None] * tl.load(WEIGHT + i, mask=m_i, other=0.0)[None, None, :]
        b = b * scale[:, :, None] * tl.load(WEIGHT + D // 2 + i, mask=m_i, other=0.0)[None, None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _store_kept(P, m, x):
    """Store x at P in its type; 1 where what is kept there is not finite."""
    kept = x.to(P.dtype.element_ty)
    tl.store(P, kept, mask=m)
    return tl.where(m & ((tl.abs(kept.to(tl.float32)) < float("inf")) == 0), 1, 0)


@triton.jit
def append_kernel(
    QKV, Q_NORM, K_NORM, COS, SIN, TO, Q, K, V, BAD, N, x_row, x_head, cache_layer, bad_layer, length, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Layer i of QKV has 2 · KV_HEADS heads behind those of layer i − 1; queries, HEADS of them, come before the first.
    Q [N, HEADS, D] row-major."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h, i = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    layer = tl.program_id(2)
    m_r, m_i = r < N, (i < D // 2)[None, None, :]
    row = r.to(tl.int64)
    m_t = m_r[:, None] & (i < D // 2)[None, :]
    o_t = row[:, None] * (D // 2) + i[None, :]
    cos = tl.load(COS + o_t, mask=m_t, other=0.0)[:, None, :]
    sin = tl.load(SIN + o_t, mask=m_t, other=0.0)[:, None, :]
    p_row = QKV + row[:, None] * x_row
    if tl.program_id(1) < (HEADS + BLOCK_H - 1) // BLOCK_H:
        head = tl.program_id(1) * BLOCK_H + h
        m = (m_r[:, None] & (head < HEADS)[None, :])[:, :, None] & m_i
        a, b = _turned(p_row + (head * x_head)[None, :], Q_NORM, m, i, cos, sin, eps, D, NORM)
        p_q = Q + ((row * HEADS)[:, None] + head[None, :])[:, :, None] * D + i[None, None, :]
        tl.store(p_q, a, mask=m)
        tl.store(p_q + D // 2, b, mask=m)
        return
    to = tl.load(TO + r, mask=m_r, other=-1)
    m_to = to >= 0
    slot, place = to // length, to % length
    p_k = p_row + ((HEADS + layer * 2 * KV_HEADS + h) * x_head)[None, :]
    m = (m_to[:, None] & (h < KV_HEADS)[None, :])[:, :, None] & m_i
    a, b = _turned(p_k, K_NORM + layer * D, m, i, cos, sin, eps, D, NORM)
    o = ((slot * KV_HEADS)[:, None] + h[None, :]) * length + place[:, None]
    o = layer.to(tl.int64) * cache_layer + o[:, :, None] * D + i[None, None, :]
    p_v = (p_k + KV_HEADS * x_head)[:, :, None] + i[None, None, :]
    c, d = tl.load(p_v, mask=m, other=0.0), tl.load(p_v + D // 2, mask=m, other=0.0)
    bad = _store_kept(K + o, m, a) | _store_kept(K + o + D // 2, m, b)
    bad = bad | _store_kept(V + o, m, c) | _store_kept(V + o + D // 2, m, d)
    tl.store(BAD + layer.to(tl.int64) * bad_layer + to, tl.max(tl.max(bad, 2), 1).to(tl.int8), mask=m_to)


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
    rows, heads, dim = qkv.shape
    q = qkv.new_empty((rows, heads - 2 * k_cache.shape[1], dim))
    if qkv.stride(2) != 1:
        qkv = qkv.contiguous()
    _launch(qkv, q_norm, k_norm, cos, sin, to, q, k_cache[None], v_cache[None], bad[None], eps)
    return q


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
    rows, dim = kv.shape[0], kv.shape[4]
    heads = kv.contiguous().view(rows, -1, dim)
    _launch(heads, k_norm, k_norm, cos, sin, to, heads[:, :0], k_cache, v_cache, bad, eps)


def sizes(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    """What the kernel is compiled for beside the rows of a program."""
    blocks = {"BLOCK_H": triton.next_power_of_2(kv_heads), "BLOCK_D": triton.next_power_of_2(dim // 2)}
    return {"HEADS": heads, "KV_HEADS": kv_heads, "D": dim, **blocks}


def _launch(
    x: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    to: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bad: Tensor,
    eps: float,
) -> None:
    """x [N, heads of all kinds, D], q [N, Hq, D], caches [L, S, Hkv, C, D]."""
    layers, _, kv_heads, length, dim = k.shape
    if x.shape[0] * layers == 0:
        return
    fixed, each = sizes(q.shape[1], kv_heads, dim), ROWS_CUDA if x.is_cuda else ROWS_INTERPRETER
    blocks = triton.cdiv(q.shape[1], fixed["BLOCK_H"]) + 1
    norms = [x if t is None else t.contiguous() for t in (q_norm, k_norm)]
    append_kernel[(triton.cdiv(x.shape[0], each), blocks, layers)](
        x, *norms, cos.contiguous(), sin.contiguous(), to.contiguous(), q, k, v, bad.view(torch.int8),
        x.shape[0], *x.stride()[:2], k.stride(0), bad.stride(0), length, eps,
        NORM=k_norm is not None, ROWS=each, **fixed, **OPTIONS,
    )  # fmt: skip
