"""Block attention: right against a float64 reference, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from blockpilot_kernels.block_attention import KV_CHUNK, AttentionTiles, block_attention
from tests.kernels.attention import LENGTH, Sizes, assert_right, attend
from tests.kernels.backends import Backend
from tests.kernels.conftest import forced_backend

SIZES = Sizes()


@pytest.fixture(params=["reference", "triton"])
def op(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that has the op by itself."""
    yield from forced_backend(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_matches_float64(op, causal, window, dtype):
    slots, counts, starts = (2, 0, 3), (5, 1, 19), (60, 0, 130)
    q = SIZES.queries(sum(counts))
    assert_right(op, q, SIZES.cache(dtype), slots, counts, starts, causal, window)


@pytest.mark.parametrize("sizes", [Sizes(1, 1, 8), Sizes(8, 1, 24), Sizes(3, 3, 80), Sizes(10, 2, 64)])
def test_shapes(op, sizes):
    """Heads and lengths that fill no tile, and blocks of more queries than one program takes."""
    slots, counts, starts = (3, 1), (1, 23), (0, 64)
    assert_right(op, sizes.queries(24), sizes.cache(), slots, counts, starts)
    assert_right(op, sizes.queries(23), sizes.cache(), (1,), (23,), (64,), causal=False, bound=2 * KV_CHUNK)


def test_padding_alone_is_zero(op):
    out = attend(op, SIZES.queries(0), SIZES.cache(), (), (), (), causal=True)
    assert torch.equal(out, torch.zeros(16, SIZES.heads * SIZES.dim))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bound", [KV_CHUNK * 2, LENGTH])
def test_row_is_independent_of_block_batch_and_bound(op, bound, threads):
    """A query alone equals the same query inside a wide block, a batch, another slot order and a larger
    bound."""
    if op.name == "triton" and threads > 1:
        pytest.skip("triton: threads of the CPU change nothing")
    cache = SIZES.cache()
    q = SIZES.queries(9)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [
        attend(op, q[j : j + 1], cache, (1,), (1,), (70 + j,), bound=2 * KV_CHUNK, causal=True)[0]
        for j in range(9)
    ]
    torch.set_num_threads(threads)
    try:
        block = attend(op, q, cache, (1,), (9,), (70,), bound=bound, causal=True)
        other = SIZES.queries(21)
        rows = torch.cat([other[:3], q, other[3:]])
        batch = attend(op, rows, cache, (3, 1, 0), (3, 9, 18), (7, 70, 90), bound=bound, causal=True)
    finally:
        torch.set_num_threads(before)
    for j in range(9):
        assert torch.equal(alone[j], block[j])
        assert torch.equal(alone[j], batch[3 + j])


def test_unwritten_entries_may_hold_nan(op):
    clean = SIZES.cache()
    dirty = tuple(t.clone() for t in clean)
    for t in dirty[:2]:
        t[1, :, 76:] = float("nan")
        t[[0, 2, 3, 4]] = float("nan")
    dirty[2][1, 76:] = True
    q = SIZES.queries(6)
    for causal in (True, False):
        a = attend(op, q, clean, (1,), (6,), (70,), causal=causal)
        b = attend(op, q, dirty, (1,), (6,), (70,), causal=causal)
        assert torch.equal(a, b)


def test_rows_before_a_non_finite_key_are_untouched_and_rows_after_it_are_nan(op):
    """A rejected draft may carry NaN: what precedes it must not change, what sees it must not look healthy."""
    cache = SIZES.cache()
    q = SIZES.queries(6)
    clean = attend(op, q, cache, (1,), (6,), (70,), causal=True)
    k, v, bad = (t.clone() for t in cache)
    v[1, 1, 73] = float("inf")
    bad[1, 73] = True
    out = attend(op, q, (k, v, bad), (1,), (6,), (70,), causal=True)
    assert torch.equal(out[:3], clean[:3])
    assert torch.isnan(out[3:6]).all()


def test_refusals_name_what_came(op):
    cache, q = SIZES.cache(), SIZES.queries(6)
    block = ((1,), (6,), (70,))
    with pytest.raises(ValueError, match="bound: expected a multiple of 64 up to the cache's 256, got 320"):
        attend(op, q, cache, *block, bound=320, causal=True)
    with pytest.raises(ValueError, match="window: expected None or at least 1, got 0"):
        attend(op, q, cache, *block, causal=True, window=0)
    with pytest.raises(ValueError, match="v_cache: expected float32"):
        attend(op, q, (cache[0], cache[1].half(), cache[2]), *block, causal=True)
    with pytest.raises(ValueError, match="k_cache: expected one of float32, bfloat16, float16, got"):
        attend(op, q, (cache[0].double(), cache[1], cache[2]), *block, causal=True)
    with pytest.raises(ValueError, match="equal strides"):
        turned = cache[1].transpose(2, 3).contiguous().transpose(2, 3)
        attend(op, q, (cache[0], turned, cache[2]), *block, causal=True)


@pytest.mark.parametrize("window", [2**20, 2**31 - 1, 2**40])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_longer_than_the_cache_hides_nothing(op, causal, window):
    block = ((1, 2), (6, 3), (70, 9))
    q, cache = SIZES.queries(9), SIZES.cache()
    wide, none = (attend(op, q, cache, *block, causal=causal, window=w) for w in (window, None))
    torch.testing.assert_close(wide, none, atol=1e-6, rtol=1e-6)
    assert torch.isfinite(wide).all()


def test_tiles_of_other_rows_or_heads_are_refused(op):
    (k, v, bad), rows = SIZES.cache(), 16
    q, groups = SIZES.queries(rows), SIZES.groups
    position, extent = torch.zeros(rows, dtype=torch.long), torch.full((len(k),), 40)

    def call(q: torch.Tensor, counts: int, padded: int, groups: int) -> None:
        tiles = AttentionTiles.build((1,), (counts,), padded, groups).to(op.device)
        given = [t.to(op.device) for t in (q, k, v, bad)]
        block_attention(
            *given, tiles, position[: len(q)].to(op.device), extent.to(op.device), 64, causal=True
        )

    call(q, rows, rows, groups)
    for wrong in ((30, 32, groups), (rows, rows, 1), (rows, rows, groups + 1), (rows, 32, groups)):
        with pytest.raises(ValueError, match=r"tiles\.scatter: expected int64 \[48\]"):
            call(q, *wrong)
    with pytest.raises(ValueError, match="q: expected a multiple of 16 rows, got 9"):
        call(q[:9], 9, 9, groups)


@pytest.mark.parametrize("bound", [128, 256])
def test_values_of_minus_zero_sum_to_plus_zero(op, bound):
    """A sum that begins at zero: whether its parts are combined later must not show in the sign."""
    k, v, bad = SIZES.cache()
    out = attend(
        op, SIZES.queries(4), (k, torch.full_like(v, -0.0), bad), (1,), (4,), (70,), bound=bound, causal=True
    )
    assert torch.equal(out, torch.zeros_like(out)) and not torch.signbit(out).any()
