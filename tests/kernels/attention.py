"""What the tests of block attention share: a cache, calls on a backend's device, a float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot_kernels.block_attention import KV_CHUNK, AttentionTiles, block_attention
from tests.kernels.backends import Backend

Cache = tuple[Tensor, Tensor, Tensor]
SLOTS, LENGTH = 4, 4 * KV_CHUNK


@dataclass(frozen=True)
class Sizes:
    """Heads of queries, heads of keys, length of a head, positions of a slot."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    length: int = LENGTH

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    def cache(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Cache:
        """Keys, values and marks of five slots, all written."""
        gen = torch.Generator().manual_seed(seed)
        shape = (SLOTS + 1, self.kv_heads, self.length, self.dim)
        k, v = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
        return k, v, torch.zeros(SLOTS + 1, self.length, dtype=torch.bool)

    def queries(self, rows: int, seed: int = 1) -> Tensor:
        return torch.randn(rows, self.heads, self.dim, generator=torch.Generator().manual_seed(seed))


def attend(
    op: Backend,
    q: Tensor,
    cache: Cache,
    slots: Sequence[int],
    counts: Sequence[int],
    starts: Sequence[int],
    *,
    bound: int = LENGTH,
    **options,
) -> Tensor:
    """Rows of slot i sit at starts[i], starts[i] + 1, …; its keys end after them. On the CPU."""
    total, heads, dim = q.shape
    padded = max(-(-total // 16) * 16, 16)
    x = torch.full((padded, heads, dim), float("nan"))
    x[:total] = q
    position = torch.zeros(padded, dtype=torch.long)
    spread = [torch.arange(c) + s for c, s in zip(counts, starts, strict=True)]
    position[:total] = torch.cat([torch.zeros(0, dtype=torch.long), *spread])
    extent = torch.zeros(SLOTS + 1, dtype=torch.long)
    for slot, count, start in zip(slots, counts, starts, strict=True):
        extent[slot] = start + count
    tiles = AttentionTiles.build(slots, counts, padded, heads // cache[0].shape[1]).to(op.device)
    given = [t.to(op.device) for t in (x, *cache)]
    where = [t.to(op.device) for t in (position, extent)]
    return block_attention(*given, tiles, *where, bound, **options).cpu()


def oracle(
    q: Tensor, cache: Cache, slot: int, count: int, start: int, causal: bool, window: int | None
) -> Tensor:
    """[count, heads · dim] float64."""
    groups, end = q.shape[1] // cache[0].shape[1], start + count
    keys, values = (t[slot, :, :end].double().repeat_interleave(groups, 0) for t in cache[:2])
    scores = torch.einsum("nhd,hld->nhl", q.double(), keys) / q.shape[2] ** 0.5
    row, key = torch.arange(count)[:, None] + start, torch.arange(end)
    seen = torch.ones(count, end, dtype=torch.bool)
    if causal:
        seen &= key <= row
    if window is not None:
        seen &= (row - key).abs() < window
    p = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("nhl,hld->nhd", p, values).flatten(1)


# Beside the rounding of sums, a kernel that multiplies in 16 bits rounds probabilities.
ROUNDED = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def assert_right(
    op: Backend,
    q: Tensor,
    cache: Cache,
    slots: Sequence[int],
    counts: Sequence[int],
    starts: Sequence[int],
    causal: bool = True,
    window: int | None = None,
    **options,
) -> None:
    """Rows equal the oracle's within rounding; rows that are padding are 0."""
    out = attend(op, q, cache, slots, counts, starts, causal=causal, window=window, **options)
    dtype = cache[0].dtype if op.name == "triton" else torch.float32
    places = zip(q.to(dtype).split(list(counts)), slots, counts, starts, strict=True)
    expected = [oracle(part, cache, s, c, at, causal, window) for part, s, c, at in places]
    total = sum(counts)
    torch.testing.assert_close(out[:total].double(), torch.cat(expected), atol=ROUNDED[dtype], rtol=1e-5)
    assert torch.equal(out[total:], torch.zeros_like(out[total:]))
