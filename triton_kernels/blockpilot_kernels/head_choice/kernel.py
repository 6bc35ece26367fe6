"""Triton kernels and launcher of `head_choice`: the head in tiles of its rows, the best of each, then of all.

A maximum does not depend on the order in which it is found, so that only the products decide a row's result; their
tiles are as fixed as those of `PackedLinear`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot_kernels.choose.kernel import OPTIONS as COMBINE_OPTIONS
from blockpilot_kernels.choose.kernel import row_ids
from blockpilot_kernels.tiled_linear import PackedLinear
from blockpilot_kernels.tiled_linear.kernel import ROWS, Launch, tile_product

LARGEST = tl.constexpr(2**31 - 1)
COLUMNS = 64  # of one product, for scores need registers too


@triton.jit
def head_kernel(
    X, W, IDS, NOISE, SOURCE, TEMPERATURE, BANNED, BEST, INDEX, BAD, M, N, K, w_row, V, S, tiles, scale,
    MAPPED: tl.constexpr, SAMPLED: tl.constexpr, ROUNDS: tl.constexpr, PRODUCT: tl.constexpr, N_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Per row and tile, [M, tiles]: highest score, the lowest id that holds it, and 1 if a logit is not finite."""
    m, n = (
        tl.program_id(0) * N_ROWS + tl.arange(0, N_ROWS),
        tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS),
    )
    m_m, m_n = m < M, n < N
    acc = tile_product(
        X, W, m_m, m, tl.minimum(n, N - 1), K, w_row, 0, K, ROUNDS, PRODUCT, N_ROWS, COLUMNS, DEPTH
    )  # fmt: skip
    logit = acc * scale
    unfit = tl.where(tl.abs(logit) < float("inf"), 0, 1) & m_n[None, :].to(tl.int32)
    name = n
    if MAPPED:
        name = tl.load(IDS + n, mask=m_n, other=0).to(tl.int32)
    score = logit
    if SAMPLED:
        temperature = tl.load(TEMPERATURE + m, mask=m_m, other=0.0)
        drawn = temperature > 0
        p_noise = NOISE + tl.load(SOURCE + m, mask=m_m, other=0) * V
        noise = tl.load(p_noise[:, None] + name[None, :], mask=drawn[:, None] & m_n[None, :], other=0.0)
        score = tl.where(drawn[:, None], logit / tl.where(drawn, temperature, 1.0)[:, None] + noise, logit)
    for s in range(S):
        barred = tl.load(BANNED + m.to(tl.int64) * S + s, mask=m_m, other=-1)
        score = tl.where(name[None, :] == barred[:, None], -float("inf"), score)
    score = tl.where((unfit == 0) & m_n[None, :], score, -float("inf"))
    name = tl.where(m_n, name, LARGEST)
    best = tl.max(score, 1)
    o = m.to(tl.int64) * tiles + tl.program_id(1)
    tl.store(BEST + o, best, mask=m_m)
    tl.store(INDEX + o, tl.min(tl.where(score == best[:, None], name[None, :], LARGEST), 1), mask=m_m)
    tl.store(BAD + o, tl.max(unfit, 1), mask=m_m)


def launch_of(dtype: torch.dtype, columns: int, k: int, on_cuda: bool) -> Launch:
    """As for the product alone, in narrower tiles."""
    return replace(Launch.of(dtype, columns, k, on_cuda), columns=COLUMNS)


def head_choice(
    hidden: Tensor,
    head: PackedLinear,
    scale: float,
    ids: Tensor | None,
    noise: Tensor | None,
    source: Tensor,
    temperature: Tensor,
    banned: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `blockpilot_kernels.head_choice.head_choice`."""
    rows, k = hidden.shape
    chosen, finite = source.new_empty(rows), source.new_empty(rows, dtype=torch.bool)
    if rows == 0:
        return chosen, finite
    weight, columns = head.matrix, head.out_features
    launch = launch_of(weight.dtype, columns, k, hidden.is_cuda)
    tiles = triton.cdiv(columns, COLUMNS)
    best = hidden.new_empty((rows, tiles))
    index, bad = (torch.empty_like(best, dtype=torch.int32) for _ in range(2))
    given = [source if t is None else t.contiguous() for t in (ids, noise, source, temperature, banned)]
    head_kernel[(triton.cdiv(rows, ROWS), tiles)](
        hidden.contiguous(), weight, *given, best, index, bad, rows, columns, k, weight.stride(0),
        0 if noise is None else noise.shape[1], 0 if banned is None else banned.shape[1], tiles, scale,
        MAPPED=ids is not None, SAMPLED=noise is not None, **launch.constants(head.rounds), **launch.options,
    )  # fmt: skip
    each = 1 if hidden.is_cuda else ROWS  # the interpreter pays per program
    row_ids[(triton.cdiv(rows, each),)](
        best, index, bad, chosen, finite.view(torch.int8), rows, LARGEST.value, tiles,
        ROWS=each, CHUNKS=triton.next_power_of_2(tiles), **COMBINE_OPTIONS,
    )  # fmt: skip
    return (chosen if ids is None else torch.where(finite, chosen, ids[0])), finite
