"""The Triton product of `PackedLinear`: right against float64, in splits too, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.tiled_linear import PackedLinear
from tests.kernels.backends import Backend
from tests.kernels.conftest import forced_backend

kernel = pytest.importorskip("blockpilot_kernels.tiled_linear.kernel")
# (columns, K): one program, odd ones, several tiles, and K in splits of which the last is short.
SHAPES = [(1, 1), (7, 3), (130, 70), (300, 64), (65, 1000), (40, 4200)]


@pytest.fixture
def op() -> Iterator[Backend]:
    yield from forced_backend("triton")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(op: Backend, weight: Tensor, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return PackedLinear(op.put(weight), op.put(bias), dtype)(op.put(x)).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 80])
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_matches_float64(op, columns, k, rows, dtype, poisoned):
    weight, x, bias = drawn(columns, k), drawn(rows, k, seed=1), drawn(columns, seed=2)
    got = product(op, weight, x, bias, dtype)
    expected = x.to(dtype).double() @ weight.to(dtype).double().T + bias
    torch.testing.assert_close(got.double(), expected, atol=2e-6 * k**0.5 + 1e-5, rtol=1e-5)


def test_shapes_are_split_and_others_are_not():
    splits = [kernel.Launch.of(torch.bfloat16, c, k, on_cuda=True).splits for c, k in SHAPES]
    assert splits == [1, 1, 1, 1, 4, 16]
    qwen3_8b = ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (151_936, 4096))
    assert [kernel.Launch.of(torch.bfloat16, *s, on_cuda=True).splits for s in qwen3_8b] == [5, 8, 1, 8, 1]
    predictor = kernel.Launch.of(torch.float32, 2048, 151_936, on_cuda=True)
    assert 2048 // predictor.columns * predictor.splits == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "k"), [(130, 70), (65, 1000)])
def test_row_is_independent_of_place_and_neighbours(op, columns, k, dtype, poisoned):
    linear = PackedLinear(op.put(drawn(columns, k)), None, dtype)
    row = drawn(1, k, seed=1)
    alone = linear(op.put(torch.cat([row, row.new_zeros(15, k)])))[0]
    for rows, i in ((16, 15), (64, 40), (144, 3), (144, 143)):
        x = drawn(rows, k, seed=rows)
        x[:i], x[i] = float("nan"), row[0]
        assert torch.equal(linear(op.put(x))[i], alone)


def test_counters_are_zero_again(op):
    for _ in range(2):
        product(op, drawn(65, 1000), drawn(80, 1000), None, torch.float32)
    assert not kernel.counters(op.device).any()


def test_a_row_that_is_not_finite_harms_itself_only(op, poisoned):
    weight, x = drawn(65, 1000), drawn(16, 1000, seed=1)
    clean = product(op, weight, x, None, torch.float32)
    x[3, 999] = float("inf")
    got = product(op, weight, x, None, torch.float32)
    assert not torch.isfinite(got[3]).any()
    assert torch.equal(torch.cat([got[:3], got[4:]]), torch.cat([clean[:3], clean[4:]]))


def test_no_rows(op):
    assert product(op, drawn(5, 3), drawn(0, 3), None, torch.float32).shape == (0, 5)


def test_rows_of_the_weight_and_calls(op):
    dispatch.calls.clear()
    linear = PackedLinear(op.put(drawn(50, 30)), None, torch.bfloat16)
    index = torch.tensor([3, 49], device=op.device)
    assert torch.equal(linear.rows(index).float().cpu(), drawn(50, 30)[[3, 49]].bfloat16().float())
    linear(op.put(drawn(16, 30)))
    assert dispatch.calls == {("tiled_linear", "triton"): 1}


def test_too_many_rows_are_refused(op, monkeypatch):
    monkeypatch.setattr(kernel, "COUNTERS", 2)
    with pytest.raises(ValueError, match="x: expected at most 128 rows, got 144"):
        product(op, drawn(64, 1000), drawn(144, 1000), None, torch.float32)
