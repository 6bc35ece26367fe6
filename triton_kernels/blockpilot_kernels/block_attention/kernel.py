"""Triton kernel and launcher of `block_attention`: keys in chunks at fixed positions, then the chunks in order.

A program takes up to 64 (query, head) rows of one slot that share a KV head, and one chunk of its keys. Tiles have the
same shape whatever there is to do, and a block of keys that is masked for a row multiplies its sums by 1 and adds 0:
neither the rows beside it, nor the chunks behind it, nor the bound change a row's bits.

The rows of a tree share the chunks before the one that their anchor is in. From there on, each is a program of its own,
which finds its keys along its path and sums them at their positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot_kernels.block_attention.combine import combine_kernel
from blockpilot_kernels.block_attention.reference import SPAN, AttentionTiles

CHUNK = 512  # keys of one program
SCRATCH = 64 * 2**20  # bytes that unfinished chunks may take, or those of one span where they are more
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LOWEST = tl.constexpr(-float("inf"))
HIGHEST = tl.constexpr(float("inf"))


@triton.jit
def _visible(position, key, extent, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[M], [KEYS] → [M, KEYS]: which keys each query sees."""
    seen = (position[:, None] >= 0) & (key < extent)[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        distance = position[:, None] - key[None, :]
        seen = seen & (distance < WINDOW) & (-distance < WINDOW)
    return seen


@triton.jit
def _key_range(position, m_q, extent, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """First and last + 1 of the keys that any of the queries sees."""
    first, last = 0, extent
    highest = tl.max(tl.where(m_q, position, 0), 0)
    if CAUSAL:
        last = tl.minimum(last, highest + 1)
    if WINDOW > 0:
        last = tl.minimum(last, highest + WINDOW)
        lowest = tl.min(tl.where(m_q, position, extent), 0)
        first = tl.maximum(lowest - WINDOW + 1, 0)
    return first, last


@triton.jit
def _add_scores(score, top, mass):
    """Highest score and mass of each row with `score` [M, KEYS]; what is kept of earlier sums; the new weights."""
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == LOWEST, 0.0, higher)
    p, kept = tl.exp(score - base[:, None]), tl.exp(top - base)
    return higher, mass * kept + tl.sum(p, 1), kept, p


@triton.jit
def _sums(
    q, K, V, BAD, PATH, position, begin, end, extent, anchor, deepest, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, D: tl.constexpr, PRODUCT: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Weighted values [M, BLOCK_D], highest score and mass [M] of queries q [M, BLOCK_D] over keys begin … end − 1.
    PATH is that of the one row that looks behind its anchor."""
    d = tl.arange(0, q.shape[1])
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    top = tl.full([q.shape[0]], LOWEST, tl.float32)
    mass = tl.zeros([q.shape[0]], tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        place = key
        if TREE:
            m_path = (key >= anchor) & (key - anchor < deepest)
            place = tl.load(PATH + key - anchor, mask=m_path, other=0).to(tl.int32)
            place = tl.where(m_path, place, key)
        bad = tl.load(BAD + place, mask=key < extent, other=1) != 0
        o_k = place[:, None] * D + d[None, :]
        readable = (bad == 0)[:, None] & (d < D)[None, :]
        k = tl.load(K + o_k, mask=readable, other=0.0).to(PRODUCT)
        score = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        # A key that is not finite scores +inf: inf − inf makes the rows that see it NaN.
        score = tl.where(bad[None, :], HIGHEST, score)
        score = tl.where(_visible(position, key, extent, CAUSAL, WINDOW), score, LOWEST)
        top, mass, kept, p = _add_scores(score, top, mass)
        v = tl.load(V + o_k, mask=readable, other=0.0).to(PRODUCT)
        acc = acc * kept[:, None]
        acc = tl.dot(p.to(V.dtype.element_ty).to(PRODUCT), v, acc, input_precision="tf32x3")
    return acc, top, mass


@triton.jit
def _part_of_tree(i_c, count, anchor, chunks, GROUPS: tl.constexpr, TAILS: tl.constexpr, CHUNK: tl.constexpr):
    """Queries (first, last + 1) of a span and the chunk that a program takes: all of them in a chunk before the
    anchor's, or those of one row in one of the TAILS chunks that a path may be in."""
    tail, chunk = i_c - chunks, anchor // CHUNK
    alone = tail >= 0
    first = tl.where(alone, tail // TAILS * GROUPS, 0)
    last = tl.where(alone, tl.minimum(first + GROUPS, count), tl.where(i_c < chunk, count, 0))
    return first, last, tl.where(alone, chunk + tail % TAILS, i_c)


@triton.jit(do_not_specialize=["chunks", "deepest"])
def attend_kernel(
    Q, K, V, BAD, SPANS, POSITION, EXTENT, PATH, OUT, PART, TOP, MASS,
    q_row, q_head, kv_slot, kv_head, length, heads, chunks, deepest, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TAILS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    WHOLE: tl.constexpr, PRODUCT: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS of a span's M queries, one KV head, one chunk. To OUT [N, heads · D] if WHOLE, else sums to PART [spans,
    KV heads, chunks, M, D], with the highest score and the mass of each row in TOP and MASS; nothing for chunks past
    the slot's keys. PATH [N, deepest] if TAILS > 0."""
    i_s, i_h, i_c = tl.program_id(0) // (M // ROWS), tl.program_id(1), tl.program_id(2)
    p_span = SPANS + i_s * 3
    slot, first, count = tl.load(p_span).to(tl.int64), tl.load(p_span + 1), tl.load(p_span + 2)
    extent = tl.load(EXTENT + slot, mask=slot >= 0, other=0).to(tl.int32)
    o_m, anchor = 0, 0
    if TAILS > 0:
        anchor = tl.load(PATH + (first // GROUPS).to(tl.int64) * deepest).to(tl.int32)
        o_m, count, i_c = _part_of_tree(i_c, count, anchor, chunks, GROUPS, TAILS, CHUNK)
        PATH += ((first + o_m) // GROUPS).to(tl.int64) * deepest
    o_m += tl.program_id(0) % (M // ROWS) * ROWS
    if (o_m >= count) | ((i_c > 0) & (i_c * CHUNK >= extent)):
        return
    m, d = o_m + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    m_q, m_d = m < count, d < D
    row = (first + m) // GROUPS
    head = i_h * GROUPS + (first + m) % GROUPS
    position = tl.load(POSITION + row, mask=m_q, other=-1).to(tl.int32)
    o_q = row.to(tl.int64) * q_row + head * q_head
    m_qd = m_q[:, None] & m_d[None, :]
    # Products are of the cache's type, PRODUCT only where that cannot be multiplied: widened at once.
    q = tl.load(Q + o_q[:, None] + d[None, :], mask=m_qd, other=0.0).to(K.dtype.element_ty).to(PRODUCT)
    o_kv = slot * kv_slot + i_h.to(tl.int64) * kv_head
    lowest, last = _key_range(position, m_q, extent, CAUSAL, WINDOW)
    begin, end = tl.maximum(lowest // KEYS * KEYS, i_c * CHUNK), tl.minimum(last, (i_c + 1) * CHUNK)
    acc, top, mass = _sums(
        q, K + o_kv, V + o_kv, BAD + slot * length, PATH, position, begin, end, extent, anchor, deepest, scale,
        CAUSAL, WINDOW, TAILS > 0, D, PRODUCT, KEYS,
    )  # fmt: skip
    if WHOLE:
        mass = tl.where(m_q & (slot >= 0), mass, 1.0)
        o_out = row.to(tl.int64) * (heads * D) + head * D
        # −0 becomes 0, as it does where chunks are combined.
        tl.store(OUT + o_out[:, None] + d[None, :], (acc + 0.0) / mass[:, None], mask=m_qd)
    else:
        o_part = ((i_s * tl.num_programs(1) + i_h).to(tl.int64) * chunks + i_c) * M + m
        tl.store(TOP + o_part, tl.where(mass == mass, top, HIGHEST), mask=m_q)  # NaN is not skipped
        tl.store(MASS + o_part, mass, mask=m_q)
        tl.store(PART + o_part[:, None] * D + d[None, :], acc, mask=m_qd & (mass != 0.0)[:, None])


@dataclass(frozen=True)
class Launch:
    """What decides a row's bits beside its inputs: the cache's type and head dimension choose it, no batch does.

    Attributes:
        product: type that products are of. rows, keys: of one product, divisors of SPAN and CHUNK.
        combined: rows of a program that combines chunks. options: Triton's.
    """

    product: tl.dtype
    rows: int
    keys: int
    combined: int
    options: dict[str, int | bool]

    @classmethod
    def of(cls, dtype: torch.dtype, dim: int, on_cuda: bool) -> Launch:
        """The largest tiles whose sums fit in the registers of a GPU, or in the interpreter the fewest programs."""
        if not on_cuda:
            return cls(tl.float32, SPAN, 64, SPAN, {})
        options = {"num_warps": 8 if dim > 128 else 4, "num_stages": 2, "enable_fp_fusion": False}
        # A float32 is split in three for tensor cores, so that each operand takes twice its place.
        if dtype == torch.float32:
            return cls(tl.float32, 16, 32, 8, {**options, "num_stages": 1})
        return cls(TYPES[dtype], SPAN, 32 if dim > 64 else 64, 8, options)


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bad: Tensor,
    tiles: AttentionTiles,
    position: Tensor,
    extent: Tensor,
    bound: int,
    causal: bool,
    window: int | None,
    path: Tensor | None,
) -> Tensor:
    """See `blockpilot_kernels.block_attention.block_attention`."""
    n, heads, dim = q.shape
    out = q.new_empty((n, heads * dim))
    chunks = triton.cdiv(bound, CHUNK)
    if q.stride(2) != 1:
        q = q.contiguous()
    given = (q, k_cache, v_cache, bad.view(torch.int8))
    where = (position.contiguous(), extent.contiguous(), None if path is None else path.contiguous())
    for spans in tiles.spans.split(wave(len(tiles.spans), k_cache.shape[1], chunks, dim)):
        _attend(*given, spans, *where, out, chunks, causal, window)
    return out


def sizes(groups: int, dim: int) -> dict[str, int]:
    """What both kernels are compiled for."""
    block = max(16, triton.next_power_of_2(dim))  # a product has 16 columns at the least
    return {"GROUPS": groups, "D": dim, "M": SPAN, "CHUNK": CHUNK, "BLOCK_D": block}


def wave(spans: int, kv_heads: int, chunks: int, dim: int) -> int:
    """How many of the spans are done at once: as many as unfinished chunks leave room for, one at the least."""
    if chunks > 1:
        spans = min(spans, SCRATCH // _span_bytes(kv_heads, chunks, dim))
    return max(spans, 1)


def scratch_bytes(kv_heads: int, dim: int, keys: int) -> int:
    """Bytes at most that unfinished chunks of `keys` keys take."""
    chunks = triton.cdiv(keys, CHUNK)
    return max(SCRATCH, _span_bytes(kv_heads, chunks, dim)) if chunks > 1 else 0


def _span_bytes(kv_heads: int, chunks: int, dim: int) -> int:
    return kv_heads * chunks * SPAN * (dim + 2) * 4


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bad: Tensor,
    spans: Tensor,
    position: Tensor,
    extent: Tensor,
    path: Tensor | None,
    out: Tensor,
    chunks: int,
    causal: bool,
    window: int | None,
) -> None:
    """Fill the rows of `spans` in `out`."""
    if len(spans) == 0:
        return
    rows, heads, dim = q.shape
    kv_heads, launch = k.shape[1], Launch.of(k.dtype, dim, q.is_cuda)
    fixed = sizes(heads // kv_heads, dim)
    whole, groups = chunks == 1, fixed["GROUPS"]
    # A slot has no more keys behind its anchor than rows.
    tails = 0 if path is None else min(chunks, 1 + triton.cdiv(rows - 1, CHUNK))
    parts = chunks + tails * min(rows, SPAN // groups)
    shape = (0,) if whole else (len(spans), kv_heads, chunks, SPAN)
    part, top, mass = q.new_empty((*shape, dim)), q.new_empty(shape), q.new_empty(shape)
    attend_kernel[(len(spans) * (SPAN // launch.rows), kv_heads, parts)](
        q, k, v, bad, spans, position, extent, position if path is None else path, out, part, top, mass,
        *q.stride()[:2], *k.stride()[:2], bad.stride(0), heads, chunks, 0 if path is None else path.shape[1], dim**-0.5,
        CAUSAL=causal, WINDOW=window or 0, TAILS=tails, WHOLE=whole, PRODUCT=launch.product, KEYS=launch.keys,
        ROWS=launch.rows, **fixed, **launch.options,
    )  # fmt: skip
    if not whole:
        combine_kernel[(len(spans), kv_heads, SPAN // launch.combined)](
            part, top, mass, spans, extent, out, heads, chunks,
            ROWS=launch.combined, **fixed, **launch.options,
        )  # fmt: skip
