"""Norms and gated activation: right against float64, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from blockpilot_kernels.norm_rope import block_input, residual_norm, rms_norm, swiglu
from tests.kernels.backends import Backend
from tests.kernels.conftest import forced_backend


@pytest.fixture(params=["reference", "triton"])
def op(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that has the ops by themselves."""
    yield from forced_backend(request.param)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def put(op: Backend, *tensors: Tensor | None) -> list[Tensor | None]:
    return [op.put(t) for t in tensors]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.cpu().double(), expected, atol=4e-6, rtol=1e-5)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """float64."""
    x = x.double()
    if weight is None:
        return x
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (130, 64), (2, 3, 40), (5, 1536)])
def test_rms_norm_matches_float64(op, shape, poisoned):
    x, weight = drawn(*shape), drawn(shape[-1], seed=1)
    got = rms_norm(*put(op, x, weight), 1e-5)
    assert got.shape == x.shape
    close(got, normed(x, weight, 1e-5))


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (130, 64), (5, 1536)])
def test_residual_norm_is_the_sum_and_its_norm(op, shape, poisoned):
    x, y, weight = drawn(*shape), drawn(*shape, seed=2), drawn(shape[-1], seed=1)
    total, out = residual_norm(*put(op, x, y, weight), 1e-5)
    assert torch.equal(total.cpu(), x + y)
    assert torch.equal(out, rms_norm(total, *put(op, weight), 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (130, 64), (5, 1536)])
def test_block_input_is_the_tables_row_and_its_norm(op, rows, width, dtype, poisoned):
    table, weight = drawn(9, width).to(dtype), drawn(width, seed=1)
    tokens = torch.randint(0, 9, (rows,), generator=torch.Generator().manual_seed(0))
    x, out = block_input(*put(op, tokens, table), 1.7, *put(op, weight), 1e-5)
    assert torch.equal(x.cpu(), table[tokens].float() * 1.7)
    assert torch.equal(out, rms_norm(x, *put(op, weight), 1e-5))


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 14), (130, 64), (2, 4100)])
def test_swiglu_matches_float64(op, shape, poisoned):
    x = drawn(*shape)
    gate, up = x.double().chunk(2, -1)
    close(swiglu(*put(op, x)), F.silu(gate) * up)


def test_swiglu_of_far_gates(op):
    x = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 5.0]])
    close(swiglu(*put(op, x)), torch.tensor([[0.0, 200.0, 0.0]]).double())


@pytest.mark.parametrize("width", [6, 64, 576])
def test_row_is_independent_of_place_and_neighbours(op, width):
    row, weight = drawn(1, width), drawn(width, seed=1)

    def all_three(x: Tensor) -> list[Tensor]:
        total, normed = residual_norm(*put(op, x, x, weight), 1e-6)
        return [t.cpu() for t in (rms_norm(*put(op, x, weight), 1e-6), total, normed, swiglu(*put(op, x)))]

    alone = all_three(row)
    for n, i in ((16, 0), (48, 7), (160, 159), (160, 131)):
        x = drawn(n, width, seed=n)
        x[:i] = float("nan")
        x[i] = row[0]
        for got, expected in zip(all_three(x), alone, strict=True):
            assert torch.equal(got[i], expected[0])


def test_refusals_name_what_came(op):
    x = drawn(4, 8)
    with pytest.raises(ValueError, match=r"rms_norm: weight: expected float32 \[8\].*got float64 \[8\]"):
        rms_norm(x, drawn(8).double(), 1e-6)
    with pytest.raises(
        ValueError, match=r"residual_norm: y: expected float32 \[4, 8\].*got float32 \[3, 8\]"
    ):
        residual_norm(x, x[:3], x[0], 1e-6)
    with pytest.raises(ValueError, match=r"block_input: tokens: expected int64 \[2\].*got int32 \[2\]"):
        block_input(torch.zeros(2, dtype=torch.int32), x, 1.0, x[0], 1e-6)
    with pytest.raises(ValueError, match=r"swiglu: gate_up: expected float32 \[4, 6\].*got float32 \[4, 7\]"):
        swiglu(drawn(4, 7))
