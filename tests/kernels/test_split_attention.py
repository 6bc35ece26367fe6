"""Triton's block attention over more keys than one program takes: chunks, their combination, its scratch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from blockpilot_kernels import dispatch
from blockpilot_kernels.block_attention import scratch_bytes
from tests.kernels.attention import Sizes, assert_right, attend
from tests.kernels.backends import Backend
from tests.kernels.conftest import forced_backend

kernel = pytest.importorskip("blockpilot_kernels.block_attention.kernel")
LONG = Sizes(heads=4, kv_heads=1, dim=16, length=3 * kernel.CHUNK)
BLOCK = ((1,), (5,), (2 * kernel.CHUNK - 2,))  # its rows end in two chunks


@pytest.fixture
def op() -> Iterator[Backend]:
    yield from forced_backend("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 300), (False, 700)])
def test_chunks_match_float64(op, causal, window, dtype, poisoned):
    """Also where a window begins behind the first chunk, and where scratch held NaN."""
    slots, counts, starts = (1, 3, 0), (5, 2, 1), (2 * kernel.CHUNK - 2, 0, kernel.CHUNK - 1)
    q = LONG.queries(sum(counts))
    assert_right(op, q, LONG.cache(dtype), slots, counts, starts, causal, window, bound=LONG.length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_is_independent_of_chunks_block_and_batch(op, dtype, poisoned):
    """Its bits are those it has alone: at the least bound, in one chunk or several, in any block, batch and slot."""
    cache, q = LONG.cache(dtype), LONG.queries(5)
    cache[0][3], cache[1][3] = cache[0][1], cache[1][1]
    for start in (kernel.CHUNK - 5, 2 * kernel.CHUNK - 2):
        others = LONG.queries(4, seed=7)
        rows = torch.cat([others[:1], q, others[1:]])
        batch = attend(op, rows, cache, (0, 3, 2), (1, 5, 3), (0, start, 900), bound=LONG.length, causal=True)
        for j in range(5):
            least = -(-(start + j + 1) // 64) * 64
            alone = attend(op, q[j : j + 1], cache, (1,), (1,), (start + j,), bound=least, causal=True)[0]
            assert torch.equal(alone, batch[1 + j])


def test_scratch_is_bounded_and_its_bound_changes_no_bit(op, monkeypatch):
    """With room for one piece of 64 queries the others wait, and come out the same."""
    sizes = Sizes(heads=8, kv_heads=1, dim=16, length=2 * kernel.CHUNK)
    cache, q = sizes.cache(), sizes.queries(18)
    block = ((2, 0), (9, 9), (600, 700))
    launches: list[int] = []
    real = kernel._attend
    monkeypatch.setattr(kernel, "_attend", lambda *given: (launches.append(len(given[4])), real(*given)))
    whole = attend(op, q, cache, *block, bound=sizes.length, causal=True)
    monkeypatch.setattr(kernel, "SCRATCH", 1)
    assert torch.equal(whole, attend(op, q, cache, *block, bound=sizes.length, causal=True))
    assert launches == [6, 1, 1, 1, 1, 1, 1]  # two of them of padding


@pytest.mark.parametrize("keys", [65_536, 131_072])
def test_what_a_long_context_takes_is_what_is_said(op, keys):
    """8 pieces of 64 queries and 8 KV heads of 128 values: 64 MiB, or what one piece needs."""
    chunks = keys // kernel.CHUNK
    one = 8 * chunks * 64 * (128 + 2) * 4
    said = scratch_bytes(8 * 4, 8, 128, keys, op.device.type)
    assert kernel.wave(8, 8, chunks, 128) * one <= said <= 1.1 * 64 * 2**20
    with dispatch.forced("reference"):
        assert scratch_bytes(8 * 4, 8, 128, keys, "cpu") > 100 * said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_a_gpu(op, dtype, poisoned, monkeypatch):
    """The rows and keys that a program takes there, which the interpreter would be slow with."""
    real = kernel.Launch.of
    tiles = real(dtype, LONG.dim, on_cuda=True)
    monkeypatch.setattr(kernel.Launch, "of", lambda *given: replace(tiles, product=real(*given).product))
    q = LONG.queries(24)
    assert_right(op, q, LONG.cache(dtype), (1,), (24,), (kernel.CHUNK - 9,), bound=2 * kernel.CHUNK)


def test_a_non_finite_key_reaches_exactly_the_rows_that_see_it(op, poisoned):
    """In a chunk that holds nothing else a row sees, and in one of many."""
    cache, q = LONG.cache(), LONG.queries(5)
    start = kernel.CHUNK - 2
    clean = attend(op, q, cache, (1,), (5,), (start,), bound=LONG.length, causal=True)
    for place, healthy in ((kernel.CHUNK, 2), (start - 300, 0), (kernel.CHUNK + 2, 4)):
        k, v, bad = (t.clone() for t in cache)
        k[1, 0, place, 3] = float("nan")
        bad[1, place] = True
        out = attend(op, q, (k, v, bad), (1,), (5,), (start,), bound=LONG.length, causal=True)
        assert torch.equal(out[:healthy], clean[:healthy])
        assert torch.isnan(out[healthy:5]).all()


def test_a_score_that_is_not_a_number_is_not_skipped(op, poisoned):
    """Finite query and key may multiply to inf − inf: a row that sees nothing else in that chunk is NaN too."""
    cache, q, key = LONG.cache(), LONG.queries(2), kernel.CHUNK
    for t in (cache[0], q):
        t[..., :2] = 0
    q[1, :, :2] = 3e38
    cache[0][1, 0, key, :2] = torch.tensor([3e38, -3e38])
    out = attend(op, q, cache, (1,), (2,), (key - 1,), bound=LONG.length, causal=True)
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()


def test_a_query_that_is_not_finite_harms_itself_only(op, poisoned):
    cache, q = LONG.cache(), LONG.queries(5)
    clean = attend(op, q, cache, *BLOCK, bound=LONG.length, causal=True)
    q[2, 1, 0] = float("nan")
    out = attend(op, q, cache, *BLOCK, bound=LONG.length, causal=True).view(16, LONG.heads, LONG.dim)
    kept = torch.ones(16, LONG.heads, dtype=torch.bool)
    kept[2, 1] = False
    assert torch.equal(out[kept], clean.view_as(out)[kept])
    assert torch.isnan(out[2, 1]).all()
