"""Triton kernel and launcher of `PackedLinear`: a product of 64 rows at a time, whatever there are.

A weight of few columns is also split along K, so that enough programs stream it; who finishes last adds the parts in
their order. Tiles and splits follow from the weight's shape and type alone: no row's bits depend on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
PROGRAMS = 264  # that stream a weight at once: two on each multiprocessor of an H200
STEPS = 4  # of DEPTH that a split has at the least
COUNTERS = 2**16
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def tile_product(
    X, W, m_m, m, n, K, w_row, first, last, ROUNDS: tl.constexpr, PRODUCT: tl.constexpr, N_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[N_ROWS, COLUMNS] float32: rows m of X [M, K] times rows n of W [N, w_row] over k = first … last − 1."""
    acc = tl.zeros([N_ROWS, COLUMNS], tl.float32)
    p_x, p_w = X + m.to(tl.int64)[:, None] * K, W + n.to(tl.int64)[:, None] * w_row
    for start in range(first, last, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(p_x + k[None, :], mask=m_m[:, None] & (k < K)[None, :], other=0.0)
        if ROUNDS:
            x = x.to(tl.bfloat16)
        w = tl.load(p_w + k[None, :], mask=(k < K)[None, :], other=0.0).to(PRODUCT)
        acc = tl.dot(x.to(PRODUCT), tl.trans(w), acc, input_precision="tf32x3")
    return acc


@triton.jit
def linear_kernel(
    X, W, BIAS, OUT, PART, DONE, M, N, K, w_row,
    BIASED: tl.constexpr, SPLITS: tl.constexpr, ROUNDS: tl.constexpr, PRODUCT: tl.constexpr, N_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """OUT [M, N]. Programs of one tile of W follow each other. PART [tiles, SPLITS, N_ROWS, COLUMNS]; DONE [tiles] is
    0 before and after."""
    i_m, i_n, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n = i_m * N_ROWS + tl.arange(0, N_ROWS), i_n * COLUMNS + tl.arange(0, COLUMNS)
    m_m = m < M
    depth = tl.cdiv(tl.cdiv(K, DEPTH), SPLITS) * DEPTH
    first, last = i_s * depth, tl.minimum((i_s + 1) * depth, K)
    # Columns past the last are its copies, so that no load of W needs a mask along them.
    acc = tile_product(
        X, W, m_m, m, tl.minimum(n, N - 1), K, w_row, first, last, ROUNDS, PRODUCT, N_ROWS, COLUMNS, DEPTH
    )  # fmt: skip
    if SPLITS > 1:
        tile = i_n * tl.num_programs(0) + i_m
        o = tl.arange(0, N_ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        p_part = PART + (tile.to(tl.int64) * SPLITS) * (N_ROWS * COLUMNS) + o
        tl.store(p_part + i_s * (N_ROWS * COLUMNS), acc, mask=m_m[:, None])
        tl.debug_barrier()  # all of this program's part is there before it counts
        if tl.atomic_add(DONE + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros([N_ROWS, COLUMNS], tl.float32)
        for s in range(SPLITS):
            acc += tl.load(
                p_part + s * (N_ROWS * COLUMNS), mask=m_m[:, None], other=0.0, cache_modifier=".cg"
            )
        tl.store(DONE + tile, 0)
    if BIASED:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0)[None, :]
    tl.store(OUT + m.to(tl.int64)[:, None] * N + n[None, :], acc, mask=m_m[:, None] & (n < N)[None, :])


@dataclass(frozen=True)
class Launch:
    """What decides a row's bits beside its inputs: the weight's type and shape choose it, no number of rows does.

    Attributes:
        product: type that products are of. columns, depth: of W in one product. splits: of K.
        options: Triton's.
    """

    product: tl.dtype
    columns: int
    depth: int
    splits: int
    options: dict[str, int | bool]

    @classmethod
    def of(cls, dtype: torch.dtype, columns: int, k: int, on_cuda: bool) -> Launch:
        """For a weight [columns, k]: the tiles of a GPU, in the interpreter with products of float32."""
        wide, depth, stages = (64, 32, 2) if dtype == torch.float32 else (128, 64, 3)
        splits = min(PROGRAMS // triton.cdiv(columns, wide), triton.cdiv(k, depth) // STEPS)
        options: dict[str, int | bool] = {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": False}
        product = TYPES[dtype] if on_cuda else tl.float32
        return cls(product, wide, depth, max(splits, 1), options if on_cuda else {})

    def constants(self, rounds: bool) -> dict[str, object]:
        """What a product is compiled for."""
        fixed = {"ROUNDS": rounds, "PRODUCT": self.product, "N_ROWS": ROWS}
        return {**fixed, "COLUMNS": self.columns, "DEPTH": self.depth}


@lru_cache(maxsize=16)
def counters(device: torch.device) -> Tensor:
    """Zeros that every launch leaves as zeros: launches on a stream follow each other, so one set serves them all."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, rounds: bool) -> Tensor:
    """x [M, K] float32, weight [≥ columns, ≥ K] row-major, bias [columns] float32 → [M, columns] float32.

    rounds: x is rounded to bfloat16 first, as a weight of that type always demands.

    Raises:
        ValueError: more rows than there are counters for.
    """
    rows, k = x.shape
    out = x.new_empty((rows, columns))
    if out.numel() == 0:
        return out
    launch = Launch.of(weight.dtype, columns, k, x.is_cuda)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, launch.columns), launch.splits)
    tiles = grid[0] * grid[1]
    part, done = out, out
    if launch.splits > 1:
        if tiles > COUNTERS:
            raise ValueError(
                f"x: expected at most {COUNTERS // grid[1] * ROWS} rows, got {rows}; take fewer at once"
            )
        part, done = x.new_empty((tiles, launch.splits, ROWS, launch.columns)), counters(x.device)
    linear_kernel[grid](
        x.contiguous(), weight, out if bias is None else bias, out, part, done, rows, columns, k, weight.stride(0),
        BIASED=bias is not None, SPLITS=launch.splits, **launch.constants(rounds), **launch.options,
    )  # fmt: skip
    return out
