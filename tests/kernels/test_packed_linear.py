"""Products with packed matrices: right in every format, and a row's bits depend on the row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockpilot_kernels import dispatch, packed_decoder
from blockpilot_kernels.packed_decoder import packed_linear, weighted_rows
from tests.kernels.packed import (
    BLOCKS,
    FLOATS,
    PRODUCTS,
    Product,
    instruction_sets,
    make_product,
    random_blocks,
    threads,
)

if dispatch.extension_error() is not None:
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)

SHAPES = [(49, 32), (1, 64), (16, 32), (33, 160), (97, 96)]
ODD = [(49, 33), (7, 5), (1, 1), (31, 95)]
NAN, INF = float("nan"), float("inf")


RUNNABLE, LACKING = instruction_sets()


@pytest.fixture(params=RUNNABLE)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLOCKPILOT_ISA", request.param)
    assert torch.ops.blockpilot.isa() == request.param
    return request.param


def test_every_instruction_set_is_tested():
    if LACKING:
        pytest.skip(f"products with {', '.join(LACKING)}: this machine lacks these instructions")


def inputs(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=gen) * torch.logspace(-3, 3, rows)[:, None]


def one_by_one(product: Product, x: Tensor, rounding: str) -> Tensor:
    return torch.cat([product(x[i : i + 1], rounding) for i in range(len(x))])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "rounding"), PRODUCTS)
def test_the_dequantised_product(isa, kind, rounding, bias):
    for n, k in SHAPES + (ODD if kind in FLOATS else []):
        product = make_product(kind, n, k, bias=bias, seed=n)
        for rows in (1, 2, 3, 5, 9, 70):
            x = inputs(rows, k)
            y = product(x, rounding)
            assert (y.dtype, y.shape) == (torch.float32, (rows, n))
            product.close(y, x, rounding)


def test_roundings_differ():
    """Each of the comparisons above can fail: another rounding is further off than they allow."""
    product, x = make_product("Q8_0", 49, 96), inputs(9, 96)
    for asked, other in (
        ("none", "bfloat16"),
        ("none", "int8"),
        ("bfloat16", "none"),
        ("int8", "none"),
        ("int16", "none"),
        ("none", "int16"),
    ):
        with pytest.raises(AssertionError):
            product.close(product(x, asked), x, other)


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_largest_bytes_meet(isa, kind):
    """Integer sums at their limits: every code the largest of its sign against inputs of ±127 steps."""
    blocks = random_blocks(kind, 32, 64)
    head = 4 if kind == "Q4_1" else 2
    for code in (0, 255, 128, 127, 15, 240):
        blocks.data[..., head:] = code
        weights = packed_decoder.Weights(torch.float32)
        record = weights.linear(blocks)
        product = Product(kind, weights.blob(), record, blocks.dequantise(), None)
        for sign in (1.0, -1.0):
            x = torch.full((3, 64), sign)
            for rounding in ("int8", "int16"):
                product.close(product(x, rounding), x, "none")


@pytest.mark.parametrize(("kind", "rounding"), PRODUCTS)
def test_a_rows_bits_at_every_number_of_rows(isa, kind, rounding):
    product = make_product(kind, 49, 96, bias=True)
    x = inputs(130, 96)
    alone = one_by_one(product, x, rounding)
    for rows in (*range(1, 65), 65, 96, 127, 128, 130):
        assert torch.equal(product(x[:rows], rounding), alone[:rows]), rows


@pytest.mark.parametrize(("kind", "rounding"), PRODUCTS)
def test_a_rows_bits_beside_broken_rows(isa, kind, rounding):
    product = make_product(kind, 49, 64)
    row = inputs(7, 64)[3]
    alone = product(row[None], rounding)[0]
    for rows in (2, 3, 8, 9, 17, 64):
        for at in {0, 1, rows // 2, rows - 1}:
            for value in (NAN, INF, -INF):
                x = torch.full((rows, 64), value)
                x[at] = row
                assert torch.equal(product(x, rounding)[at], alone), (rows, at)


@given(data=st.data())
def test_a_rows_bits_anywhere(data):
    kind, rounding = data.draw(st.sampled_from(PRODUCTS))
    k = data.draw(st.integers(1, 4)) * 32 - (data.draw(st.integers(0, 31)) if kind in FLOATS else 0)
    n, rows = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    at = data.draw(st.integers(0, rows - 1))
    product = make_product(kind, n, k, bias=data.draw(st.booleans()), seed=n)
    x = inputs(rows, k, data.draw(st.integers(0, 99)))
    with threads(data.draw(st.integers(1, 3))):
        whole = product(x, rounding)
    assert torch.equal(whole[at], product(x[at : at + 1], rounding)[0])


@pytest.mark.parametrize(("kind", "rounding"), PRODUCTS)
def test_threads_do_not_matter(isa, kind, rounding):
    product = make_product(kind, 330, 96)
    x = inputs(40, 96)
    results = []
    for count in (1, 2, 3, 1):
        with threads(count):
            results.append([product(x[:rows], rounding) for rows in (1, 7, 40)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("kind", "rounding"), PRODUCTS)
def test_non_finite_inputs_spoil_their_row_only(isa, kind, rounding, value):
    product = make_product(kind, 49, 96)
    x = inputs(11, 96)
    clean = product(x, rounding)
    for at, column in ((0, 0), (5, 40), (10, 95)):
        x_bad = x.clone()
        x_bad[at, column] = value
        y = product(x_bad, rounding)
        assert not torch.isfinite(y[at]).any()
        rest = [i for i in range(11) if i != at]
        assert torch.equal(y[rest], clean[rest])


@pytest.mark.parametrize(("kind", "rounding"), PRODUCTS)
def test_zeros_give_the_bias(isa, kind, rounding):
    product = make_product(kind, 49, 96, bias=True)
    for rows in (1, 4, 9):
        assert torch.equal(product(torch.zeros(rows, 96), rounding), product.bias.expand(rows, -1))
    assert product(torch.zeros(0, 96), rounding).shape == (0, 49)


def test_rows_need_not_be_contiguous():
    product, x = make_product("Q4_0", 49, 64), inputs(6, 128)
    for view in (x[:, ::2], x[:, 64:], x[::2, :64], x.T[:64].T):
        assert torch.equal(product(view), product(view.contiguous()))


@pytest.mark.parametrize("kind", packed_decoder.FORMATS)
def test_weighted_rows(isa, kind):
    for n, k in ((49, 96), (1, 32), (70, 64), *([(49, 33)] if kind in FLOATS else [])):
        product = make_product(kind, n, k)
        p = torch.softmax(inputs(4, n), -1)
        results = []
        for count in (1, 2):
            with threads(count):
                results.append(weighted_rows(p, product.blob, product.record))
        assert torch.equal(*results)
        bound = 1e-5 * product.dense.abs().max().item() * 16  # Q4_1 adds an offset apart from its codes
        expected = p.double() @ product.dense.double()
        torch.testing.assert_close(results[0].double(), expected, atol=bound, rtol=0)


def test_other_inputs_are_refused():
    product = make_product("Q8_0", 49, 64)
    for x, message in (
        (torch.zeros(64), "x: expected 2 dimensions"),
        (torch.zeros(2, 32), "x: expected shape"),
        (torch.zeros(2, 64, dtype=torch.float64), "x: expected Float"),
    ):
        with pytest.raises(ValueError, match=message):
            product(x)
    with pytest.raises(ValueError, match="p: expected shape"):
        weighted_rows(torch.zeros(1, 48), product.blob, product.record)
    with pytest.raises(ValueError, match="rounding: expected 0 … 3, got 4"):
        torch.ops.blockpilot.packed_linear(torch.zeros(1, 64), product.blob, torch.tensor(product.record), 4)


BAD_RECORDS = {
    "another blob": {0: 1},
    "no blob": {0: -1},
    "no format": {1: 5},
    "no rows": {2: 0},
    "more rows": {2: 49 + 16},
    "more columns": {3: 128},
    "before the bytes": {4: -4},
    "between floats": {4: 66},
    "behind the bytes": {4: 1 << 40},
    "bias behind the bytes": {5: 1 << 40},
    "bias before the bytes": {5: -2},
    "bytes of which a 64-bit product says 0": {1: 0, 2: 1 << 31, 3: 1 << 31},
    "bytes of which a 64-bit product is negative": {1: 1, 2: 1 << 31, 3: 1 << 31},
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_records_that_leave_the_bytes_are_refused(name):
    product = make_product("Q8_0", 49, 64)
    record = [BAD_RECORDS[name].get(i, word) for i, word in enumerate(product.record)]
    for call in (
        lambda: packed_linear(torch.zeros(0, record[3]), product.blob, tuple(record)),
        lambda: weighted_rows(torch.zeros(0, record[2]), product.blob, tuple(record)),
    ):
        with pytest.raises(ValueError, match="plan: "):
            call()
    assert product(torch.zeros(0, 64)).shape == (0, 49)


@pytest.mark.parametrize("words", [0, 1, 5, 7])
def test_records_of_another_length_are_refused(words):
    product = make_product("F32", 49, 64)
    record = torch.tensor((*product.record, 0)[:words])
    with pytest.raises(ValueError, match="plan: expected"):
        torch.ops.blockpilot.packed_linear(torch.zeros(1, 64), product.blob, record, 0)


def test_opcheck():
    product = make_product("Q4_1", 49, 64, bias=True)
    record = torch.tensor(product.record)
    ops = torch.ops.blockpilot
    torch.library.opcheck(ops.packed_linear.default, (inputs(3, 64), product.blob, record, 1))
    torch.library.opcheck(ops.weighted_rows.default, (inputs(3, 49), product.blob, record))
