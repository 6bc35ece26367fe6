"""Triton kernels and launchers of `rms_norm`, `residual_norm`, `block_input` and `swiglu`.

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
COLUMNS = 1024  # of one program of swiglu
LONG = 8192  # elements of a row above which it takes more warps
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
LONG_OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


@triton.jit
def _normed(x, WEIGHT, i, eps, H: tl.constexpr):
    """x [ROWS, BLOCK], 0 beyond H."""
    weight = tl.load(WEIGHT + i, mask=i < H, other=0.0)
    return x * tl.rsqrt(tl.sum(x * x, 1) / H + eps)[:, None] * weight[None, :]


@triton.jit
def rms_norm_kernel(X, WEIGHT, OUT, N, eps, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """X, OUT [N, H] row-major."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    m = (r < N)[:, None] & (i < H)[None, :]
    o = row_offsets(r, i, H)
    x = tl.load(X + o, mask=m, other=0.0)
    tl.store(OUT + o, _normed(x, WEIGHT, i, eps, H), mask=m)


@triton.jit
def residual_norm_kernel(
    X, Y, WEIGHT, SUM, OUT, N, eps, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """X, Y, SUM, OUT [N, H] row-major."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    m = (r < N)[:, None] & (i < H)[None, :]
    o = row_offsets(r, i, H)
    x = tl.load(X + o, mask=m, other=0.0) + tl.load(Y + o, mask=m, other=0.0)
    tl.store(SUM + o, x, mask=m)
    tl.store(OUT + o, _normed(x, WEIGHT, i, eps, H), mask=m)


@triton.jit
def block_input_kernel(
    TOKENS, TABLE, WEIGHT, X, OUT, N, scale, eps, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """TABLE [V, H], X, OUT [N, H] row-major."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    m = (r < N)[:, None] & (i < H)[None, :]
    token = tl.load(TOKENS + r, mask=r < N, other=0)
    x = tl.load(TABLE + row_offsets(token, i, H), mask=m, other=0.0).to(tl.float32) * scale
    o = row_offsets(r, i, H)
    tl.store(X + o, x, mask=m)
    tl.store(OUT + o, _normed(x, WEIGHT, i, eps, H), mask=m)


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
    if out.numel() > 0:
        rows, grid, fixed = _rows(out)
        rms_norm_kernel[grid](x.contiguous(), weight.contiguous(), out, rows, eps, **fixed)
    return out


def residual_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `blockpilot_kernels.norm_rope.residual_norm`."""
    total, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    if out.numel() > 0:
        rows, grid, fixed = _rows(out)
        given = [t.contiguous() for t in (x, y, weight)]
        residual_norm_kernel[grid](*given, total, out, rows, eps, **fixed)
    return total, out


def block_input(
    tokens: Tensor, table: Tensor, scale: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `blockpilot_kernels.norm_rope.block_input`."""
    shape = (len(tokens), table.shape[1])
    x, out = (weight.new_empty(shape) for _ in range(2))
    if out.numel() > 0:
        rows, grid, fixed = _rows(out)
        given = [t.contiguous() for t in (tokens, table, weight)]
        block_input_kernel[grid](*given, x, out, rows, scale, eps, **fixed)
    return x, out


def _rows(out: Tensor) -> tuple[int, tuple[int, ...], dict[str, int | bool]]:
    """Rows, grid, and what a kernel over whole rows of `out` [..., H] is compiled for."""
    width = out.shape[-1]
    rows, block = out.numel() // width, triton.next_power_of_2(width)
    each = ROWS_CUDA if out.is_cuda else ROWS_INTERPRETER
    options = LONG_OPTIONS if block > LONG else OPTIONS
    return rows, (triton.cdiv(rows, each),), {"H": width, "ROWS": each, "BLOCK": block, **options}


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
