"""Fixed-tile products: right, and a row's bits do not depend on its tile, neighbours, alignment or threads."""

from __future__ import annotations

import pytest
import torch

from blockpilot_kernels.norm_rope import apply_rope, rms_norm, swiglu
from blockpilot_kernels.tiled_linear import TILE, PackedLinear, pad_rows, row_independence

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(5, 7), (97, 24), (64, 64), (960, 576), (33, 40), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_matches_float64(shape, dtype, bias):
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(shape, generator=gen)
    b = torch.randn(shape[0], generator=gen) if bias else None
    x = torch.randn(3 * TILE, shape[1], generator=gen)
    y = PackedLinear(w, b, dtype)(x)
    exact = x.to(dtype).double() @ w.to(dtype).double().T + (0 if b is None else b.double())
    assert y.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y.double(), exact, atol=tolerance * shape[1] ** 0.5, rtol=tolerance)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_row_bits_are_its_own(shape, dtype, threads):
    gen = torch.Generator().manual_seed(1)
    linear = PackedLinear(torch.randn(shape, generator=gen), dtype=dtype)
    row = torch.randn(shape[1], generator=gen)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = linear(pad_rows(row[None]))[0]
    torch.set_num_threads(threads)
    try:
        for i in (0, 1, 5, 15, 16, 33, 47):
            buffer = torch.randn(3 * TILE * shape[1] + 3, generator=gen)
            x = buffer[i % 4 :][: 3 * TILE * shape[1]].view(3 * TILE, shape[1])
            if i % 2:
                x.fill_(float("nan"))
            x[i] = row
            assert torch.equal(linear(x)[i], alone), i
    finally:
        torch.set_num_threads(before)


def test_self_check_passes_here():
    assert all(row_independence(dtype=d) for d in DTYPES)


def test_a_plain_product_is_not_row_independent():
    """The check can fail: rows of an untiled product do change with the number of rows on common BLAS builds."""
    gen = torch.Generator().manual_seed(0)
    w, x = torch.randn(5, 7, generator=gen), torch.randn(16, 7, generator=gen)
    same = [torch.equal((x[i : i + 1] @ w.T)[0], (x @ w.T)[i]) for i in range(16)]
    padded = PackedLinear(w)(x)
    assert all(torch.equal(PackedLinear(w)(pad_rows(x[i : i + 1]))[0], padded[i]) for i in range(16))
    if all(same):
        pytest.skip("this BLAS happens to be row independent for this shape, so the contrast cannot be shown")


def test_refusals_name_what_came():
    with pytest.raises(ValueError, match=r"\[N, K\].*\(3,\)"):
        PackedLinear(torch.zeros(3))
    with pytest.raises(ValueError, match="float16"):
        PackedLinear(torch.zeros(3, 3), dtype=torch.float16)
    with pytest.raises(ValueError, match="multiple of 16"):
        PackedLinear(torch.zeros(3, 3))(torch.zeros(5, 3))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [7, 64, 1536])
def test_glue_is_independent_of_place(width, threads):
    gen = torch.Generator().manual_seed(3)
    row = torch.randn(2 * width, generator=gen) * 4
    weight = torch.randn(2 * width, generator=gen)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for n in (16, 48, 160):
            for i in (0, 7, n - 1):
                x = torch.randn(n, 2 * width, generator=gen)
                x[i] = row
                assert torch.equal(
                    rms_norm(x, weight, 1e-6)[i], rms_norm(pad_rows(row[None]), weight, 1e-6)[0]
                )
                assert torch.equal(swiglu(x)[i], swiglu(pad_rows(row[None]))[0])
    finally:
        torch.set_num_threads(before)


def test_glue_matches_float64():
    x, w = torch.randn(16, 32), torch.randn(32)
    d = x.double()
    expected = d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    torch.testing.assert_close(rms_norm(x, w, 1e-5).double(), expected, atol=1e-6, rtol=1e-5)
    gate, up = d.chunk(2, -1)
    torch.testing.assert_close(swiglu(x).double(), torch.nn.functional.silu(gate) * up, atol=1e-6, rtol=1e-5)
    angle = torch.rand(16, 4) * 6
    heads = torch.randn(16, 3, 8)
    turned = apply_rope(heads, angle.cos(), angle.sin())
    pairs = torch.view_as_complex(torch.stack(heads.chunk(2, -1), -1)) * torch.polar(
        torch.ones(16, 1, 4), angle[:, None]
    )
    torch.testing.assert_close(turned, torch.cat([pairs.real, pairs.imag], -1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_weight_are_as_it_was_rounded(dtype):
    """Whatever layout the product reads, without its padding."""
    weight = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([0, 49, 17, 17])
    rows = PackedLinear(weight, torch.ones(50), dtype).rows(index)
    assert torch.equal(rows.float(), weight.to(dtype).float()[index])
