"""Triton kernels and launchers of `rms_norm`, `norm_rope` and `swiglu`.

A row is summed by one program over a range that its length alone decides, so nothing beside it can change its bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot_kernels.offsets import row_offsets

# Rows of one program. The interpreter pays per program, a GPU wants many of them.
ROWS_CUDA = 1
ROWS_INTERPRETER = 128
HEADS_CUDA = 8  # (row, head) pairs
HEADS_INTERPRETER = 512
COLUMNS = 1024  # of one program of swiglu
LONG = 8192  # elements of a row above which it takes more warps
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
LONG_OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


@triton.jit
def rms_norm_kernel(X, WEIGHT, OUT, N, eps, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """X, OUT [N, H] row-major."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    m = (r < N)[:, None] & (i < H)[None, :]
    o = row_offsets(r, i, H)
    x = tl.load(X + o, mask=m, other=0.0)
    weight = tl.load(WEIGHT + i, mask=i < H, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    tl.store(OUT + o, x * scale[:, None] * weight[None, :], mask=m)


@triton.jit
def norm_rope_kernel(
    X, WEIGHT, COS, SIN, OUT, N, row_stride, head_stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS (row, head) pairs of X, N of them in all; OUT [N, D] row-major, COS and SIN [N / HEADS, D/2]."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    m_i = i < D // 2
    m = (r < N)[:, None] & m_i[None, :]
    row = (r // HEADS).to(tl.int64)
    p_x = X + (row * row_stride + r % HEADS * head_stride)[:, None] + i[None, :]
    a = tl.load(p_x, mask=m, other=0.0)
    b = tl.load(p_x + D // 2, mask=m, other=0.0)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
        a = a * scale[:, None] * tl.load(WEIGHT + i, mask=m_i, other=0.0)[None, :]
        b = b * scale[:, None] * tl.load(WEIGHT + D // 2 + i, mask=m_i, other=0.0)[None, :]
    o_table = row_offsets(row, i, D // 2)
    cos = tl.load(COS + o_table, mask=m, other=0.0)
    sin = tl.load(SIN + o_table, mask=m, other=0.0)
    p_out = OUT + row_offsets(r, i, D)
    tl.store(p_out, a * cos - b * sin, mask=m)
    tl.store(p_out + D // 2, b * cos + a * sin, mask=m)


@triton.jit
def swiglu_kernel(X, OUT, N, WIDTH, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """X [N, 2·WIDTH], OUT [N, WIDTH], both row-major."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = (r < N)[:, None] & (i < WIDTH)[None, :]
    p_x = X + row_offsets(r, i, 2 * WIDTH)
    gate = tl.load(p_x, mask=m, other=0.0)
    up = tl.load(p_x + WIDTH, mask=m, other=0.0)
    tl.store(OUT + row_offsets(r, i, WIDTH), gate / (1.0 + tl.exp(-gate)) * up, mask=m)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `blockpilot_kernels.norm_rope.rms_norm`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    if out.numel() == 0:
        return out
    rows = out.numel() // width
    block = triton.next_power_of_2(width)
    each = ROWS_CUDA if x.is_cuda else ROWS_INTERPRETER
    rms_norm_kernel[(triton.cdiv(rows, each),)](
        x.contiguous(), weight.contiguous(), out, rows, eps,
        H=width, ROWS=each, BLOCK=block, **(LONG_OPTIONS if block > LONG else OPTIONS),
    )  # fmt: skip
    return out


def norm_rope(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """See `blockpilot_kernels.norm_rope.norm_rope`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    if x.stride(2) != 1:
        x = x.contiguous()
    n, heads, dim = x.shape
    each = HEADS_CUDA if x.is_cuda else HEADS_INTERPRETER
    norm_rope_kernel[(triton.cdiv(n * heads, each),)](
        x, cos if weight is None else weight.contiguous(), cos.contiguous(), sin.contiguous(), out,
        n * heads, x.stride(0), x.stride(1), eps,
        HEADS=heads, D=dim, NORM=weight is not None, ROWS=each, BLOCK=triton.next_power_of_2(dim // 2),
        **OPTIONS,
    )  # fmt: skip
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """See `blockpilot_kernels.norm_rope.swiglu`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if out.numel() == 0:
        return out
    each = ROWS_CUDA if gate_up.is_cuda else ROWS_INTERPRETER
    grid = (triton.cdiv(rows, each), triton.cdiv(width, COLUMNS))
    block = min(COLUMNS, triton.next_power_of_2(width))
    swiglu_kernel[grid](gate_up.contiguous(), out, rows, width, ROWS=each, BLOCK=block, **OPTIONS)
    return out
