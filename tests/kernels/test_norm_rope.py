"""Norms, rotary embedding and gated activation: right against float64, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from blockpilot_kernels.norm_rope import norm_rope, rms_norm, swiglu
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


@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(0, 2, 8), (1, 1, 2), (16, 3, 6), (33, 5, 80), (130, 9, 64)]
)
@pytest.mark.parametrize("norm", [True, False])
def test_norm_rope_matches_float64(op, rows, heads, dim, norm, poisoned):
    """Of heads that lie between others, as queries do beside keys and values."""
    x = drawn(rows, heads + 3, dim)[:, 1 : heads + 1]
    weight = drawn(dim, seed=1) if norm else None
    angle = drawn(rows, dim // 2, seed=2)
    got = norm_rope(*put(op, x, weight, angle.cos(), angle.sin()), 1e-6)
    assert got.is_contiguous()
    pairs = torch.view_as_complex(torch.stack(normed(x, weight, 1e-6).chunk(2, -1), -1))
    turned = pairs * torch.view_as_complex(torch.stack([angle.cos(), angle.sin()], -1).double())[:, None]
    close(got, torch.cat([turned.real, turned.imag], -1))


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
    angle = drawn(1, width // 2, seed=2)
    table = [angle.cos(), angle.sin()]

    def all_three(x: Tensor, tables: list[Tensor]) -> list[Tensor]:
        heads = norm_rope(*put(op, x[:, None].expand(-1, 2, -1), weight, *tables), 1e-6)
        return [t.cpu() for t in (rms_norm(*put(op, x, weight), 1e-6), heads, swiglu(*put(op, x)))]

    alone = all_three(row, table)
    for n, i in ((16, 0), (48, 7), (160, 159), (160, 131)):
        x = drawn(n, width, seed=n)
        x[:i] = float("nan")
        x[i] = row[0]
        tables = [t.expand(n, -1).contiguous() for t in table]
        for got, expected in zip(all_three(x, tables), alone, strict=True):
            assert torch.equal(got[i], expected[0])


def test_refusals_name_what_came(op):
    x, table = drawn(4, 2, 8), drawn(4, 4)
    with pytest.raises(ValueError, match=r"norm_rope: cos: expected float32 \[4, 4\].*got float32 \[4, 8\]"):
        norm_rope(x, None, drawn(4, 8), table, 1e-6)
    with pytest.raises(
        ValueError, match=r"norm_rope: x: expected float32 \[4, 2, 6\].*got float32 \[4, 2, 7\]"
    ):
        norm_rope(drawn(4, 2, 7), None, table, table, 1e-6)
    with pytest.raises(ValueError, match=r"rms_norm: weight: expected float32 \[8\].*got float64 \[8\]"):
        rms_norm(x, drawn(8).double(), 1e-6)
    with pytest.raises(ValueError, match=r"swiglu: gate_up: expected float32 \[4, 6\].*got float32 \[4, 7\]"):
        swiglu(drawn(4, 7))
