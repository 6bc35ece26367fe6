"""Triton kernel and launcher of `kv_compact`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"num_warps": 4}


@triton.jit
def kv_compact_kernel(
    K, V, BAD, BEGIN, SOURCE, COUNT, S, H, C, W, D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One row, and one of its slot's layers and heads: nobody else reads or writes these places."""
    r, layer, head = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    j, d = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_D)
    count, begin = tl.load(COUNT + r), tl.load(BEGIN + r)
    column = tl.load(SOURCE + r.to(tl.int64) * W + j, mask=(j < W) & (j < count), other=0)
    moves = (j < count) & (column != j)
    slot = layer.to(tl.int64) * S + r
    before, after = begin + column, begin + j
    m = moves[:, None] & (d < D)[None, :]
    o_head = (slot * H + head) * C
    o_before, o_after = (
        (o_head + before)[:, None] * D + d[None, :],
        (o_head + after)[:, None] * D + d[None, :],
    )
    k, v = tl.load(K + o_before, mask=m), tl.load(V + o_before, mask=m)
    bad = tl.load(BAD + slot * C + before, mask=moves & (head == 0))
    tl.debug_barrier()  # every source is read
    tl.store(K + o_after, k, mask=m)
    tl.store(V + o_after, v, mask=m)
    tl.store(BAD + slot * C + after, bad, mask=moves & (head == 0))


def kv_compact(k: Tensor, v: Tensor, bad: Tensor, begin: Tensor, source: Tensor, count: Tensor) -> None:
    """See `blockpilot_kernels.kv_compact.kv_compact`."""
    layers, slots, heads, length, dim = k.shape
    rows, width = source.shape
    if rows == 0 or width == 0:
        return
    given = [t.contiguous() for t in (begin, source, count)]
    kv_compact_kernel[(rows, layers * heads)](
        k, v, bad.view(torch.int8), *given, slots, heads, length, width,
        D=dim, COLUMNS=triton.next_power_of_2(width), BLOCK_D=triton.next_power_of_2(dim), **OPTIONS,
    )  # fmt: skip
