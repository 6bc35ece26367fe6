"""Triton kernels of `choose`: row statistics by chunk, then filter cuts, then scores by chunk, then the row's
id.

Whatever is reduced is a maximum, a minimum or a sum of integers, so the tiles cannot change a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockpilot_kernels.choose.filters import inside_cut, load_row, order_key, row_best, row_cuts, scaled
from blockpilot_kernels.offsets import row_offsets

# (rows, ids) of one program, ids at most. The interpreter pays per program, a GPU wants many of them.
TILE_CUDA = (1, 2048)
TILE_INTERPRETER = (64, 256)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
CUT_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def row_stats(
    LOGITS, BANNED, X, BEST, INDEX, BAD, N, V, S, n_chunks, ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Per row and chunk: highest allowed logit, the lowest id that holds it, and 1 if a logit is not finite.

    X [N, V] becomes the logits with −inf at banned ids, and with 0 for −0 and for what is not finite: that
    row's result is thrown away.
    """
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_r = r < N
    m = m_r[:, None] & (i < V)[None, :]
    o = row_offsets(r, i, V)
    raw = tl.load(LOGITS + o, mask=m, other=0.0)
    finite = tl.abs(raw) < float("inf")
    barred = tl.where(m, 0, 1)
    for s in range(S):
        banned = tl.load(BANNED + r * S + s, mask=m_r, other=-1)
        barred = tl.where(i[None, :] == banned[:, None], 1, barred)
    x = tl.where(barred != 0, -float("inf"), tl.where(finite & (raw != 0.0), raw, 0.0))
    tl.store(X + o, x, mask=m)
    best = tl.max(x, 1)
    p = r * n_chunks + tl.program_id(1)
    tl.store(BEST + p, best, mask=m_r)
    tl.store(INDEX + p, tl.min(tl.where(x == best[:, None], i[None, :], V), 1), mask=m_r)
    tl.store(BAD + p, tl.max(tl.where(finite, 0, 1), 1), mask=m_r)


@triton.jit
def row_scores(
    X, NOISE, TEMPERATURE, MIN_P, ROW_BEST, CUT_KEY, CUT_ID, BEST, INDEX, N, V, n_chunks,
    FILTERED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Per row and chunk: highest score of a kept id and the lowest id that holds it. Greedy rows score by
    logit."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_r = r < N
    x = load_row(X, r, m_r, i, V)
    m = m_r[:, None] & (i < V)[None, :]
    noise = tl.load(NOISE + row_offsets(r, i, V), mask=m, other=0.0)
    temperature = tl.load(TEMPERATURE + r, mask=m_r, other=0.0)
    z = scaled(x, row_best(ROW_BEST, r, m_r, n_chunks, CHUNKS), temperature)
    kept = x > -float("inf")
    if FILTERED:
        cut_key = tl.load(CUT_KEY + r, mask=m_r, other=0)
        cut_id = tl.load(CUT_ID + r, mask=m_r, other=0)
        least = tl.minimum(tl.load(MIN_P + r, mask=m_r, other=0.0), 1.0)
        kept = kept & inside_cut(order_key(x), i, cut_key, cut_id) & (tl.exp(z) >= least[:, None])
    score = tl.where(kept, z + noise, -float("inf"))
    score = tl.where(temperature[:, None] > 0, score, x)
    best = tl.max(score, 1)
    p = r * n_chunks + tl.program_id(1)
    tl.store(BEST + p, best, mask=m_r)
    tl.store(INDEX + p, tl.min(tl.where(score == best[:, None], i[None, :], V), 1), mask=m_r)


@triton.jit
def row_ids(BEST, INDEX, BAD, IDS, FINITE, N, V, n_chunks, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """The row's id from its chunks; 0 if the row is not finite."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    m_r = r < N
    m = m_r[:, None] & (c < n_chunks)[None, :]
    p = row_offsets(r, c, n_chunks)
    best = tl.load(BEST + p, mask=m, other=-float("inf"))
    index = tl.load(INDEX + p, mask=m, other=V)
    bad = tl.max(tl.load(BAD + p, mask=m, other=0), 1)
    ids = tl.min(tl.where(best == tl.max(best, 1)[:, None], index, V), 1)
    tl.store(IDS + r, tl.where((bad == 0) & (ids < V), ids, 0).to(tl.int64), mask=m_r)
    tl.store(FINITE + r, tl.where(bad == 0, 1, 0).to(tl.int8), mask=m_r)


def choose(
    logits: Tensor,
    noise: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    banned: Tensor | None,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """See `blockpilot_kernels.choose.choose`."""
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows == 0:
        return ids, finite
    tile = Tile.of(logits)
    bans = logits.new_empty((rows, 0), dtype=torch.int64) if banned is None else banned.contiguous()
    x, best = torch.empty_like(logits, memory_format=torch.contiguous_format), tile.partial(torch.float32)
    index, bad = tile.partial(torch.int32), tile.partial(torch.int32)
    row_stats[tile.by_chunk](
        logits.contiguous(), bans, x, best, index, bad, rows, vocab, bans.shape[1], tile.chunks,
        ROWS=tile.rows, CHUNK=tile.width, **OPTIONS,
    )  # fmt: skip
    if noise is not None:
        params = [t.contiguous() for t in (temperature, top_k, top_p, min_p)]
        best, index = _score(tile, x, noise.contiguous(), params, best, filtered)
    flags = finite.view(torch.int8)
    row_ids[tile.by_row](
        best, index, bad, ids, flags, rows, vocab, tile.chunks, ROWS=tile.rows, CHUNKS=tile.padded, **OPTIONS
    )
    return ids, finite


def _score(
    tile: Tile, x: Tensor, noise: Tensor, params: list[Tensor], row_max: Tensor, filtered: bool
) -> tuple[Tensor, Tensor]:
    """Best score and its id per row and chunk. params: temperature, top_k, top_p, min_p."""
    shape = (*x.shape, tile.chunks)
    sizes = {"ROWS": tile.rows, "CHUNK": tile.width, "CHUNKS": tile.padded}
    cut_key, cut_id = torch.empty_like(params[1]), torch.empty_like(params[1])
    if filtered:
        row_cuts[tile.by_row](x, *params[:3], row_max, cut_key, cut_id, *shape, **sizes, **CUT_OPTIONS)
    best, index = tile.partial(torch.float32), tile.partial(torch.int32)
    row_scores[tile.by_chunk](
        x, noise, params[0], params[3], row_max, cut_key, cut_id, best, index, *shape,
        FILTERED=filtered, **sizes, **OPTIONS,
    )  # fmt: skip
    return best, index


@dataclass(frozen=True)
class Tile:
    """How [N, V] is cut into programs: `rows` × `width` ids each, `chunks` of them across a row."""

    shape: tuple[int, int]
    device: torch.device
    rows: int
    width: int

    @classmethod
    def of(cls, logits: Tensor) -> Tile:
        rows, widest = TILE_CUDA if logits.is_cuda else TILE_INTERPRETER
        n, vocab = logits.shape
        return cls((n, vocab), logits.device, rows, min(widest, triton.next_power_of_2(vocab)))

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.shape[1], self.width)

    @property
    def padded(self) -> int:
        """`chunks` as the power of two that a Triton range needs."""
        return triton.next_power_of_2(self.chunks)

    @property
    def by_row(self) -> tuple[int, ...]:
        return (triton.cdiv(self.shape[0], self.rows),)

    @property
    def by_chunk(self) -> tuple[int, ...]:
        return (*self.by_row, self.chunks)

    def partial(self, dtype: torch.dtype) -> Tensor:
        """Uninitialised [N, chunks]."""
        return torch.empty((self.shape[0], self.chunks), dtype=dtype, device=self.device)
