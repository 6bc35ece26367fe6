"""Kernels that call one device function of the package, so that tests can feed it what its kernels never
meet."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot_kernels.gumbel_noise.kernel import gumbel_from_integers
from blockpilot_kernels.offsets import row_offsets


@triton.jit
def transform_kernel(INTEGERS, OUT, N, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    integers = tl.load(INTEGERS + i, mask=i < N, other=0)
    tl.store(OUT + i, gumbel_from_integers(integers.to(tl.uint32)), mask=i < N)


@triton.jit
def offsets_kernel(ROWS, OUT, width, N: tl.constexpr, COLUMNS: tl.constexpr):
    r, i = tl.arange(0, N), tl.arange(0, COLUMNS)
    tl.store(OUT + r[:, None] * COLUMNS + i[None, :], row_offsets(tl.load(ROWS + r), i, width))


def transform(integers: Tensor, device: torch.device) -> Tensor:
    """[n] int64 → [n] float32 noise."""
    out = torch.empty(len(integers), device=device)
    size = triton.next_power_of_2(len(integers))
    transform_kernel[(1,)](integers.to(device), out, len(integers), SIZE=size)
    return out.cpu()


def offsets(rows: Tensor, columns: int, width: int, device: torch.device) -> Tensor:
    """[n] int32 rows → [n, columns] int64 offsets."""
    out = torch.empty((len(rows), columns), dtype=torch.int64, device=device)
    offsets_kernel[(1,)](rows.to(device), out, width, N=len(rows), COLUMNS=columns)
    return out.cpu()


@triton.jit
def product_kernel(A, B, OUT, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    o = i[:, None] * SIZE + i[None, :]
    tl.store(OUT + o, tl.dot(tl.load(A + o), tl.load(B + o)).to(tl.bfloat16))


def product(a: Tensor, b: Tensor) -> Tensor:
    """[n, n] bfloat16 twice → [n, n] bfloat16."""
    out = torch.empty_like(a)
    product_kernel[(1,)](a, b, out, SIZE=a.shape[0])
    return out
