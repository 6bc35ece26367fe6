"""Rollback of trees: what was taken moves together, and nothing else changes a bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blockpilot_kernels.kv_compact import kv_compact
from tests.kernels.backends import Backend
from tests.kernels.conftest import forced_backend

LAYERS, SLOTS, LENGTH = 2, 4, 12


@pytest.fixture(params=["reference", "triton"])
def op(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that has the op by itself."""
    yield from forced_backend(request.param)


def cache(heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(LAYERS, SLOTS, heads, LENGTH, dim, generator=gen).to(dtype) for _ in range(2))
    return k, v, torch.rand(LAYERS, SLOTS, LENGTH, generator=gen) < 0.4


def compact(op: Backend, held, begin: list[int], source: list[list[int]], count: list[int]) -> list[Tensor]:
    given = [t.clone().to(op.device) for t in held]
    kv_compact(*given, *(torch.tensor(x, device=op.device).long() for x in (begin, source, count)))
    return [t.cpu() for t in given]


def expected(held, begin: list[int], source: list[list[int]], count: list[int]) -> list[Tensor]:
    moved = [t.clone() for t in held]
    for slot, (first, columns, n) in enumerate(zip(begin, source, count, strict=True)):
        for t, old in zip(moved, held, strict=True):
            places, found = (x[:, slot].movedim(-1 if x.dim() == 3 else -2, 0) for x in (t, old))
            places[first : first + n] = found[torch.tensor(columns[:n], dtype=torch.long) + first]
    return moved


BEGIN = [3, 0, 7, 11]
# A path down the columns; one at the end of the cache; one that nothing is taken of; one whose rest is anything.
SOURCE = [[0, 2, 3, 5, 8], [0, 1, 2, 3, 4], [0, 4, 0, 0, 0], [0, -9, 99, 4, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 20)])
def test_the_path_moves_and_nothing_else(op, heads, dim, dtype):
    held = cache(heads, dim, dtype)
    held[0][0, 0, 0, 5], held[1][1, 2] = float("nan"), float("nan")
    for count in ([5, 3, 2, 1], [0, 0, 0, 0], [2, 5, 1, 0]):
        got = compact(op, held, BEGIN, SOURCE, count)
        for a, b in zip(got, expected(held, BEGIN, SOURCE, count), strict=True):
            assert torch.equal(torch.nan_to_num(a, 77), torch.nan_to_num(b, 77))


def test_every_source_is_read_before_anything_is_written(op):
    held = cache(2, 8, torch.float32)
    turn = [[4, 3, 2, 1, 0]] * 4
    given = [0, 1, 2, 3], turn, [5, 5, 5, 5]
    for a, b in zip(compact(op, held, *given), expected(held, *given), strict=True):
        assert torch.equal(a, b)


def test_fewer_rows_than_slots_and_none(op):
    held = cache(2, 8, torch.float32)
    got = compact(op, held, [1], [[0, 3]], [2])
    assert torch.equal(got[0][:, 0, :, 2], held[0][:, 0, :, 4])
    assert torch.equal(got[0][:, 1:], held[0][:, 1:])
    k, v, bad = (t.to(op.device) for t in held)
    none = torch.zeros(0, dtype=torch.long, device=op.device)
    kv_compact(k, v, bad, none, none[:, None].expand(0, 3), none)
    assert torch.equal(k.cpu(), held[0])


def test_refusals_name_what_came(op):
    k, v, bad = (t.to(op.device) for t in cache(2, 8, torch.float32))
    begin, source = torch.zeros(4, dtype=torch.long, device=op.device), torch.zeros(4, 3, dtype=torch.long)
    source = source.to(op.device)
    with pytest.raises(ValueError, match="v: expected float32"):
        kv_compact(k, v.half(), bad, begin, source, begin)
    with pytest.raises(ValueError, match=r"source: expected int64 \[4, 3\].*got int64 \[5, 3\]"):
        kv_compact(k, v, bad, begin, source.new_zeros(5, 3), begin)
    with pytest.raises(ValueError, match=r"count: expected int64 \[4\]"):
        kv_compact(k, v, bad, begin, source, begin[:3])
    with pytest.raises(ValueError, match="k: expected contiguous memory"):
        kv_compact(k.transpose(2, 3).contiguous().transpose(2, 3), v, bad, begin, source, begin)
