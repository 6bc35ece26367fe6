"""Block attention: right against a float64 reference, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from blockpilot_kernels.block_attention import KV_CHUNK, AttentionTiles, block_attention

SLOTS, HEADS, KV_HEADS, DIM, LENGTH = 4, 6, 2, 32, 4 * KV_CHUNK


def make_cache(seed: int = 0, dtype: torch.dtype = torch.float32):
    gen = torch.Generator().manual_seed(seed)
    k = torch.randn(SLOTS + 1, KV_HEADS, LENGTH, DIM, generator=gen).to(dtype)
    v = torch.randn(SLOTS + 1, KV_HEADS, LENGTH, DIM, generator=gen).to(dtype)
    return k, v, torch.zeros(SLOTS + 1, LENGTH, dtype=torch.bool)


def run(q, cache, slots, counts, starts, *, bound=LENGTH, **options):
    """Rows of slot i sit at starts[i], starts[i] + 1, …; its keys end after them."""
    k, v, bad = cache
    total = sum(counts)
    padded = -(-total // 16) * 16
    x = torch.full((padded, HEADS, DIM), float("nan"))
    x[:total] = q
    position = torch.zeros(padded, dtype=torch.long)
    position[:total] = torch.cat([torch.arange(c) + s for c, s in zip(counts, starts, strict=True)])
    extent = torch.zeros(SLOTS + 1, dtype=torch.long)
    for slot, count, start in zip(slots, counts, starts, strict=True):
        extent[slot] = start + count
    tiles = AttentionTiles.build(slots, counts, padded, HEADS // KV_HEADS)
    return block_attention(x, k, v, bad, tiles, position, extent, bound, **options)


def oracle(q, cache, slot, count, start, causal, window):
    k, v, _ = cache
    end = start + count
    keys = k[slot, :, :end].double().repeat_interleave(HEADS // KV_HEADS, 0)
    values = v[slot, :, :end].double().repeat_interleave(HEADS // KV_HEADS, 0)
    scores = torch.einsum("nhd,hld->nhl", q.double(), keys) / DIM**0.5
    row, key = torch.arange(count)[:, None] + start, torch.arange(end)
    seen = torch.ones(count, end, dtype=torch.bool)
    if causal:
        seen &= key <= row
    if window is not None:
        seen &= (row - key).abs() < window
    p = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("nhl,hld->nhd", p, values).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_matches_float64(causal, window, dtype):
    cache = make_cache(dtype=dtype)
    slots, counts, starts = (2, 0, 3), (5, 1, 19), (60, 0, 130)
    q = torch.randn(sum(counts), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    out = run(q, cache, slots, counts, starts, causal=causal, window=window)
    expected = [
        oracle(part, cache, s, c, at, causal, window)
        for part, s, c, at in zip(q.split(counts), slots, counts, starts, strict=True)
    ]
    torch.testing.assert_close(out[: sum(counts)].double(), torch.cat(expected), atol=2e-6, rtol=1e-5)
    assert torch.equal(out[sum(counts) :], torch.zeros_like(out[sum(counts) :]))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bound", [KV_CHUNK * 2, LENGTH])
def test_row_is_independent_of_block_batch_and_bound(bound, threads):
    """A query alone equals the same query inside a wide block, a batch, another slot order and a larger
    bound."""
    cache = make_cache()
    q = torch.randn(9, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [
        run(q[j : j + 1], cache, (1,), (1,), (70 + j,), bound=2 * KV_CHUNK, causal=True)[0] for j in range(9)
    ]
    torch.set_num_threads(threads)
    try:
        block = run(q, cache, (1,), (9,), (70,), bound=bound, causal=True)
        other = torch.randn(21, HEADS, DIM)
        batch = run(
            torch.cat([other[:3], q, other[3:]]),
            cache,
            (3, 1, 0),
            (3, 9, 18),
            (7, 70, 90),
            bound=bound,
            causal=True,
        )
    finally:
        torch.set_num_threads(before)
    for j in range(9):
        assert torch.equal(alone[j], block[j])
        assert torch.equal(alone[j], batch[3 + j])


def test_unwritten_entries_may_hold_nan():
    clean = make_cache()
    dirty = tuple(t.clone() for t in clean)
    for t in dirty[:2]:
        t[1, :, 76:] = float("nan")
        t[[0, 2, 3, 4]] = float("nan")
    dirty[2][1, 76:] = True
    q = torch.randn(6, HEADS, DIM)
    for causal in (True, False):
        a = run(q, clean, (1,), (6,), (70,), causal=causal)
        b = run(q, dirty, (1,), (6,), (70,), causal=causal)
        assert torch.equal(a, b)


def test_rows_before_a_non_finite_key_are_untouched_and_rows_after_it_are_nan():
    """A rejected draft may carry NaN: what precedes it must not change, what sees it must not look healthy."""
    cache = make_cache()
    q = torch.randn(6, HEADS, DIM)
    clean = run(q, cache, (1,), (6,), (70,), causal=True)
    k, v, bad = (t.clone() for t in cache)
    v[1, 1, 73] = float("inf")
    bad[1, 73] = True
    out = run(q, (k, v, bad), (1,), (6,), (70,), causal=True)
    assert torch.equal(out[:3], clean[:3])
    assert torch.isnan(out[3:6]).all()
