"""Triton kernels and launcher of `block_attention`: keys in chunks at fixed positions, then the chunks in order.

A program takes up to 64 (query, head) rows of one slot that share a KV head, and one chunk of its keys. Tiles have the
same shape whatever there is to do, and a block of keys that is masked for a row multiplies its sums by 1 and adds 0:
neither the rows beside it, nor the chunks behind it, nor the bound change a row's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    q, K, V, BAD, position, begin, end, extent, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, PRODUCT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Weighted values [M, BLOCK_D], highest score and mass [M] of queries q [M, BLOCK_D] over keys begin … end − 1."""
    d = tl.arange(0, q.shape[1])
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    top = tl.full([q.shape[0]], LOWEST, tl.float32)
    mass = tl.zeros([q.shape[0]], tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        bad = tl.load(BAD + key, mask=key < extent, other=1) != 0
        o_k = key[:, None] * D + d[None, :]
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


@triton.jit(do_not_specialize=["chunks"])
def attend_kernel(
    Q, K, V, BAD, SPANS, POSITION, EXTENT, OUT, PART, TOP, MASS,
    q_row, q_head, kv_slot, kv_head, length, heads, chunks, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr,
    PRODUCT: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS of a span's M queries, one KV head, one chunk. To OUT [N, heads · D] if WHOLE, else sums to PART [spans,
    KV heads, chunks, M, D], with the highest score and the mass of each row in TOP and MASS; nothing for chunks past
    the slot's keys."""
    i_s, i_h, i_c = tl.program_id(0) // (M // ROWS), tl.program_id(1), tl.program_id(2)
    o_m = tl.program_id(0) % (M // ROWS) * ROWS
    p_span = SPANS + i_s * 3
    slot, first, count = tl.load(p_span).to(tl.int64), tl.load(p_span + 1), tl.load(p_span + 2)
    extent = tl.load(EXTENT + slot).to(tl.int32)
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
        q, K + o_kv, V + o_kv, BAD + slot * length, position, begin, end, extent, scale,
        CAUSAL, WINDOW, D, PRODUCT, KEYS,
    )  # fmt: skip
    if WHOLE:
        mass = tl.where(m_q, mass, 1.0)
        o_out = row.to(tl.int64) * (heads * D) + head * D
        # −0 becomes 0, as it does where chunks are combined.
        tl.store(OUT + o_out[:, None] + d[None, :], (acc + 0.0) / mass[:, None], mask=m_qd)
    else:
        o_part = ((i_s * tl.num_programs(1) + i_h).to(tl.int64) * chunks + i_c) * M + m
        tl.store(TOP + o_part, tl.where(mass == mass, top, HIGHEST), mask=m_q)  # NaN is not skipped
        tl.store(MASS + o_part, mass, mask=m_q)
        tl.store(PART + o_part[:, None] * D + d[None, :], acc, mask=m_qd & (mass != 0.0)[:, None])


@triton.jit(do_not_specialize=["chunks"])
def combine_kernel(
    PART, TOP, MASS, SPANS, EXTENT, OUT, heads, chunks,
    GROUPS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """ROWS queries of a span and KV head over its chunks, in order of position. A chunk a row saw nothing of is
    skipped."""
    i_h = tl.program_id(1)
    p_span = SPANS + tl.program_id(0) * 3
    slot, first, count = tl.load(p_span).to(tl.int64), tl.load(p_span + 1), tl.load(p_span + 2)
    m, d = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    if tl.program_id(2) * ROWS >= count:
        return
    m_q, m_d = m < count, d < D
    o_part = (tl.program_id(0) * tl.num_programs(1) + i_h).to(tl.int64) * chunks * M + m
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for _ in range(tl.cdiv(tl.load(EXTENT + slot).to(tl.int32), CHUNK)):
        its_top = tl.load(TOP + o_part, mask=m_q, other=LOWEST)
        m_seen = its_top != LOWEST
        its_mass = tl.load(MASS + o_part, mask=m_seen, other=0.0)
        m_part = m_seen[:, None] & m_d[None, :]
        part = tl.load(PART + o_part[:, None] * D + d[None, :], mask=m_part, other=0.0)
        higher = tl.maximum(top, its_top)
        base = tl.where(higher == LOWEST, 0.0, higher)
        kept, added = tl.exp(top - base), tl.exp(its_top - base)
        mass = mass * kept + its_mass * added
        acc = acc * kept[:, None] + part * added[:, None]
        top = higher
        o_part += M
    mass = tl.where(m_q, mass, 1.0)
    o_out = (first + m).to(tl.int64) // GROUPS * (heads * D) + (i_h * GROUPS + (first + m) % GROUPS) * D
    tl.store(OUT + o_out[:, None] + d[None, :], acc / mass[:, None], mask=m_q[:, None] & m_d[None, :])


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
        return cls(TYPES[dtype], SPAN, 32 if dim > 128 else 64, 8, options)


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
) -> Tensor:
    """See `blockpilot_kernels.block_attention.block_attention`."""
    n, heads, dim = q.shape
    out = q.new_zeros((n, heads * dim))
    chunks = triton.cdiv(bound, CHUNK)
    if q.stride(2) != 1:
        q = q.contiguous()
    given = (q, k_cache, v_cache, bad.view(torch.int8))
    for spans in tiles.spans.split(wave(len(tiles.spans), k_cache.shape[1], chunks, dim)):
        _attend(*given, spans, position.contiguous(), extent.contiguous(), out, chunks, causal, window)
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
    out: Tensor,
    chunks: int,
    causal: bool,
    window: int | None,
) -> None:
    """Fill the rows of `spans` in `out`."""
    if len(spans) == 0:
        return
    heads, dim = q.shape[1:]
    kv_heads, launch = k.shape[1], Launch.of(k.dtype, dim, q.is_cuda)
    fixed = sizes(heads // kv_heads, dim)
    whole = chunks == 1
    shape = (0,) if whole else (len(spans), kv_heads, chunks, SPAN)
    part, top, mass = q.new_empty((*shape, dim)), q.new_empty(shape), q.new_empty(shape)
    attend_kernel[(len(spans) * (SPAN // launch.rows), kv_heads, chunks)](
        q, k, v, bad, spans, position, extent, out, part, top, mass,
        *q.stride()[:2], *k.stride()[:2], bad.stride(0), heads, chunks, dim**-0.5,
        CAUSAL=causal, WINDOW=window or 0, WHOLE=whole, PRODUCT=launch.product, KEYS=launch.keys,
        ROWS=launch.rows, **fixed, **launch.options,
    )  # fmt: skip
    if not whole:
        combine_kernel[(len(spans), kv_heads, SPAN // launch.combined)](
            part, top, mass, spans, extent, out, heads, chunks,
            ROWS=launch.combined, **fixed, **launch.options,
        )  # fmt: skip
