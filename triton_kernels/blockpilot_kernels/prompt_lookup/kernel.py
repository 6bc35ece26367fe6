"""Triton kernel and launcher of `prompt_lookup`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PLACES = 1024
OPTIONS = {"num_warps": 4}


@triton.jit
def prompt_lookup_kernel(
    KNOWN, LENGTH, DRAFTS, OUT, stride_known, C, N, shortest, longest,
    PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program takes a slot and ranks its places PLACES at a time: longest match first, then the latest."""
    r = tl.program_id(0).to(tl.int64)
    known = KNOWN + r * stride_known
    last = tl.minimum(tl.load(LENGTH + r), C) - 1
    best = tl.full([], -1, tl.int64)
    for start in range(0, tl.maximum(last, 0), PLACES):
        place = start + tl.arange(0, PLACES).to(tl.int64)
        same = place < last
        match = tl.zeros([PLACES], tl.int64)
        for back in range(longest):
            wanted = tl.load(known + last - back, mask=last >= back, other=0)
            same = same & (place >= back)
            same = same & (tl.load(known + place - back, mask=same, other=0) == wanted)
            match += same.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(match >= shortest, match * C + place, -1)))
    column = tl.arange(0, COLUMNS).to(tl.int64)
    m = column < N
    at = best % C
    ahead = column % tl.maximum(last - at, 1)
    copied = tl.load(known + at + 1 + ahead, mask=m & (best >= 0), other=0)
    own = tl.load(DRAFTS + r * N + column, mask=m, other=0)
    tl.store(OUT + r * N + column, tl.where(best >= 0, copied, own), mask=m)


def prompt_lookup(known: Tensor, length: Tensor, drafts: Tensor, shortest: int, longest: int) -> Tensor:
    """See `blockpilot_kernels.prompt_lookup.prompt_lookup`."""
    (slots, columns), width = known.shape, drafts.shape[1]
    drafts = drafts.contiguous()
    if slots == 0 or columns == 0 or width == 0:
        return drafts.clone()
    known = known if known.stride(1) == 1 else known.contiguous()
    out = torch.empty_like(drafts)
    prompt_lookup_kernel[(slots,)](
        known,
        length.contiguous(),
        drafts,
        out,
        known.stride(0),
        columns,
        width,
        shortest,
        longest,
        PLACES=PLACES,
        COLUMNS=triton.next_power_of_2(width),
        **OPTIONS,
    )
    return out
