"""Triton kernel and launchers of `gumbel_noise` and `philox`. Elementwise: the tile cannot change a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot_kernels.offsets import row_offsets

LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
SCALE = tl.constexpr(2.0**-32)

# (rows, counters) of one program. The interpreter pays per program, a GPU wants many of them.
TILE_CUDA = (1, 512)
TILE_INTERPRETER = (64, 32)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def gumbel_from_integers(i):
    """uint32 → standard Gumbel float32, finite. log(1 − u) is log w divided by the rounding error of w = 1 −
    u."""
    u = tl.minimum((i.to(tl.float32) + 0.5) * SCALE, LARGEST_BELOW_ONE)
    w = 1.0 - u
    step = 1.0 - w  # exact
    tiny = step == 0.0
    exponential = tl.where(tiny, u, -tl.log(w) * (u / tl.where(tiny, 1.0, step)))
    return -tl.log(exponential)


@triton.jit
def noise_kernel(SEED, POSITION, OUT, N, V, RAW: tl.constexpr, ROWS: tl.constexpr, COUNTERS: tl.constexpr):
    """OUT [N, V] row-major: int64 integers if RAW, else float32 noise."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COUNTERS + tl.arange(0, COUNTERS)
    m_r = r < N
    seed = tl.load(SEED + r, mask=m_r, other=0)
    position = tl.load(POSITION + r, mask=m_r, other=0)
    zero = tl.zeros([ROWS, COUNTERS], tl.uint32)
    c0 = zero + c.to(tl.uint32)[None, :]
    c1 = zero + position.to(tl.uint32)[:, None]
    i0, i1, i2, i3 = tl.philox(seed[:, None], c0, c1, zero, zero)
    i = tl.interleave(tl.interleave(i0, i2), tl.interleave(i1, i3))  # id order: lane = id mod 4
    ids = tl.program_id(1) * (4 * COUNTERS) + tl.arange(0, 4 * COUNTERS)
    p_out = OUT + row_offsets(r, ids, V)
    m = m_r[:, None] & (ids < V)[None, :]
    if RAW:
        tl.store(p_out, i.to(tl.int64), mask=m)
    else:
        tl.store(p_out, gumbel_from_integers(i), mask=m)


def gumbel_noise(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """[N] int64, [N] int64 → [N, vocab] float32."""
    return _launch(seed, position, vocab, torch.float32)


def philox(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """[N] int64, [N] int64 → [N, vocab] int64 in [0, 2³²)."""
    return _launch(seed, position, vocab, torch.int64)


def _launch(seed: Tensor, position: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    rows = seed.shape[0]
    out = torch.empty((rows, vocab), dtype=dtype, device=seed.device)
    if rows == 0:
        return out
    tile_rows, counters = TILE_CUDA if seed.is_cuda else TILE_INTERPRETER
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(vocab, 4 * counters))
    noise_kernel[grid](
        seed.contiguous(),
        position.contiguous(),
        out,
        rows,
        vocab,
        RAW=dtype == torch.int64,
        ROWS=tile_rows,
        COUNTERS=counters,
        **OPTIONS,
    )
    return out
