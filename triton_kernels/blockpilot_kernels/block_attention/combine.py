"""Triton kernel that adds up what `attend_kernel` found in a slot's chunks."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-float("inf"))


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
    extent = tl.load(EXTENT + slot, mask=slot >= 0, other=0).to(tl.int32)
    for _ in range(tl.cdiv(extent, CHUNK)):
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
    mass = tl.where(m_q & (slot >= 0), mass, 1.0)
    o_out = (first + m).to(tl.int64) // GROUPS * (heads * D) + (i_h * GROUPS + (first + m) % GROUPS) * D
    tl.store(OUT + o_out[:, None] + d[None, :], acc / mass[:, None], mask=m_q[:, None] & m_d[None, :])
