"""Products of BF16 matrices with inputs rounded to bfloat16: the order of their sums, and numbers at the limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.packed_decoder import Weights
from tests.kernels.packed import Product, instruction_sets, make_product, threads

if dispatch.extension_error() is not None:
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)

# Rows and columns that do not fill their panels and blocks, few and many blocks.
SHAPES = [(1, 1), (33, 31), (49, 33), (17, 287), (70, 1000)]
ROWS = (*range(1, 65), 65, 80, 97, 128, 145)
SMALLEST = 2.0**-126  # of float32's normal range


@pytest.fixture(params=instruction_sets()[0])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLOCKPILOT_ISA", request.param)
    return request.param


def inputs(rows: int, columns: int) -> Tensor:
    """Rows of very different sizes."""
    gen = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=gen) * torch.logspace(-3, 3, rows)[:, None]


def blockwise(product: Product, x: Tensor, chains: int) -> Tensor:
    """x · Wᵀ in float32: of each block of 32 columns so many sums, of every `chains`-th column, added to the total.

    A product of two bfloat16 numbers has 16 bits, so it needs no rounding before it is added.
    """
    pad = (0, -x.shape[1] % 32)
    x = torch.nn.functional.pad(x.bfloat16().float(), pad)
    w = torch.nn.functional.pad(product.dense, pad)
    total = torch.zeros(len(x), len(w))
    for block in range(0, x.shape[1], 32):
        sums = torch.zeros(chains, len(x), len(w))
        for k in range(block, block + 32):
            sums[k % chains] += x[:, k, None] * w[:, k]
        total += sums.sum(0)
    return total


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_order_of_the_sums(isa, n, k):
    """AMX keeps even and odd columns of a block apart; everything else adds them in turn."""
    product = make_product("BF16", n, k)
    x = inputs(37, k)
    assert torch.equal(product(x, "bfloat16"), blockwise(product, x, 2 if isa == "amx" else 1))


def test_the_orders_differ():
    product, x = make_product("BF16", 70, 1000), inputs(37, 1000)
    assert not torch.equal(blockwise(product, x, 1), blockwise(product, x, 2))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_no_further_off_than_float32_sums_may_be(isa, n, k):
    """At most 32 additions in a block and one for each block, each off by half a unit of the last place."""
    product = make_product("BF16", n, k, bias=True)
    x = inputs(70, k)
    terms = x.bfloat16().double().abs() @ product.dense.double().abs().T + product.bias.double().abs()
    off = (product(x, "bfloat16").double() - product.expected(x, "bfloat16")).abs()
    assert (off <= (32 + -(-k // 32) + 1) * 2.0**-24 * 1.001 * terms).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_rows_bits_at_every_number_of_rows_and_threads(isa, n, k):
    product = make_product("BF16", n, k, bias=True)
    x = inputs(max(ROWS), k)
    alone = torch.cat([product(row[None], "bfloat16") for row in x])
    for rows in ROWS:
        assert torch.equal(product(x[-rows:], "bfloat16"), alone[-rows:]), rows
    for count in (2, 3):
        with threads(count):
            for rows in (1, 16, 33, 128):
                assert torch.equal(product(x[:rows], "bfloat16"), alone[:rows]), (rows, count)


def packed_as_bf16(dense: Tensor) -> Product:
    weights = Weights(torch.bfloat16)
    record = weights.linear(dense)
    return Product("BF16", weights.blob(), record, dense, None)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 70])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_weight_spoils_its_output_only(isa, value, rows):
    dense = make_product("BF16", 49, 333).dense
    x = inputs(rows, 333)
    clean = packed_as_bf16(dense)(x, "bfloat16")
    dense[21, 301] = value
    y = packed_as_bf16(dense)(x, "bfloat16")
    others = [i for i in range(49) if i != 21]
    assert not torch.isfinite(y[:, 21]).any()
    assert torch.equal(y[:, others], clean[:, others])


def test_an_infinite_weight_meets_its_sign(isa):
    """Infinity stays infinity, and becomes NaN where it meets zero or its opposite."""
    dense = torch.ones(33, 64)
    dense[0, 3], dense[1, 4] = float("inf"), -float("inf")
    dense[2, 3], dense[2, 40] = float("inf"), -float("inf")
    x = torch.ones(20, 64)
    x[7, 3] = 0
    y = packed_as_bf16(dense)(x, "bfloat16")
    assert y[0, :3].tolist()[:2] == [float("inf"), -float("inf")] and y[0, 2].isnan()
    assert y[7, 0].isnan() and y[7, 1] == -float("inf") and torch.equal(y[0, 3:], torch.full((30,), 64.0))


def test_sums_beyond_the_largest_number_are_infinite(isa):
    dense = torch.full((33, 64), 2.0**100)
    y = packed_as_bf16(dense)(torch.full((18, 64), 2.0**30), "bfloat16")
    assert torch.equal(y, torch.full((18, 33), float("inf")))


@pytest.mark.parametrize("rows", [1, 18])
def test_numbers_below_the_normal_range(isa, rows):
    """AMX takes them for zero and gives zero in their place; nothing is further off than that makes it."""
    gen = torch.Generator().manual_seed(3)
    small = torch.randn(rows, 96, generator=gen) * SMALLEST / 4
    product = make_product("BF16", 49, 96)
    y = product(small, "bfloat16")
    size = product.dense.abs().amax().clamp_min(1)
    off = (y.double() - product.expected(small, "bfloat16")).abs()
    assert (off <= 96 * SMALLEST * size).all()
    assert isa != "amx" or not y.any()
    # Products on both sides of the smallest normal number.
    tiny, x = packed_as_bf16(product.dense * 2.0**-70), torch.randn(rows, 96, generator=gen) * 2.0**-60
    off = (tiny(x, "bfloat16").double() - tiny.expected(x, "bfloat16")).abs()
    assert torch.isfinite(off).all() and (off <= 200 * SMALLEST).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 3.4e38, -3.4e38, 2.0**-126])
def test_inputs_are_rounded_to_the_nearest_even(isa, value):
    one = packed_as_bf16(torch.ones(1, 1))
    for rows in (1, 3, 17):
        y = one(torch.full((rows, 1), value), "bfloat16")
        assert torch.equal(y, torch.full((rows, 1), value).bfloat16().float())
