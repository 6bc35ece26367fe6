"""Queries and keys in rotary embedding, and the cache: right against float64, and nothing else is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blockpilot_kernels.qk_rope_append import context_append, qk_rope_append
from tests.kernels.backends import Backend
from tests.kernels.conftest import forced_backend

SLOTS, LENGTH = 3, 10  # and the last slot is nobody's
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["reference", "triton"])
def op(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that has the ops by themselves."""
    yield from forced_backend(request.param)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def turned(x: Tensor, weight: Tensor | None, angle: Tensor) -> Tensor:
    """float64 x [N, heads, D] after norm and rotation by `angle` [N, D/2]."""
    x, angle = x.double(), angle.double()
    if weight is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1))
    pairs = pairs * torch.view_as_complex(torch.stack([angle.cos(), angle.sin()], -1))[:, None]
    return torch.cat([pairs.real, pairs.imag], -1)


def caches(layers: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """NaN everywhere."""
    k, v = (torch.full((layers, SLOTS + 1, heads, LENGTH, dim), float("nan")).to(dtype) for _ in range(2))
    return k, v, torch.ones(layers, SLOTS + 1, LENGTH, dtype=torch.bool)


def places(rows: int) -> Tensor:
    """Every third row is absent; the others go to places all over the slots, one after the other in none."""
    found = torch.randperm(SLOTS * LENGTH, generator=torch.Generator().manual_seed(rows))[:rows]
    found[2::3] = -1
    return found


def append(op: Backend, qkv: Tensor, norms: list[Tensor | None], angle: Tensor, to: Tensor, held):
    given = [op.put(t) for t in (qkv, *norms, angle.cos(), angle.sin(), to, *(t[0] for t in held))]
    return qk_rope_append(*given, 1e-6).cpu(), [t.cpu() for t in given[6:]]


def assert_written(got: list[Tensor], k: Tensor, v: Tensor, to: Tensor, dtype: torch.dtype) -> None:
    """k, v [N, Hkv, D] float64 are at `to`, and NaN still is everywhere else."""
    rounding = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    kept = to[to >= 0]
    for cache, x in zip(got[:2], (k, v), strict=True):
        flat = cache.transpose(1, 2).flatten(0, 1)  # [slot · place, Hkv, D]
        torch.testing.assert_close(flat[kept].double(), x[to >= 0], atol=rounding, rtol=rounding)
        rest = torch.ones(len(flat), dtype=torch.bool)
        rest[kept] = rest[SLOTS * LENGTH :] = False
        assert flat[rest].isnan().all()
    bad = got[2][:SLOTS].flatten()
    assert not bad[kept].any() and bad.sum() == SLOTS * LENGTH - len(kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim"), [(1, 1, 1, 2), (16, 9, 3, 6), (21, 8, 2, 64), (4, 5, 5, 80)]
)
@pytest.mark.parametrize("norm", [True, False])
def test_matches_float64(op, rows, heads, kv_heads, dim, norm, dtype, poisoned):
    qkv, angle, to = drawn(rows, heads + 2 * kv_heads, dim), drawn(rows, dim // 2, seed=2), places(rows)
    norms = [drawn(dim, seed=3), drawn(dim, seed=4)] if norm else [None, None]
    held = caches(1, kv_heads, dim, dtype)
    q, got = append(op, qkv, norms, angle, to, held)
    expected = turned(qkv[:, :heads], norms[0], angle)
    there = to >= 0
    torch.testing.assert_close(q.double()[there], expected[there], atol=2e-5, rtol=1e-5)
    k = turned(qkv[:, heads : heads + kv_heads], norms[1], angle)
    assert_written(got, k, qkv[:, heads + kv_heads :].double(), to, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "layers", "heads", "dim"), [(1, 1, 1, 4), (16, 3, 3, 6), (20, 2, 2, 64)])
def test_context_of_every_layer(op, rows, layers, heads, dim, dtype):
    kv, angle, to = drawn(rows, layers, 2, heads, dim), drawn(rows, dim // 2, seed=2), places(rows)
    norms, held = drawn(layers, dim, seed=3), caches(layers, heads, dim, dtype)
    given = [t.to(op.device) for t in (kv, norms, angle.cos(), angle.sin(), to, *held)]
    context_append(*given, 1e-6)
    for i in range(layers):
        k = turned(kv[:, i, 0], norms[i], angle)
        assert_written([t[i].cpu() for t in given[5:]], k, kv[:, i, 1].double(), to, dtype)


def test_row_is_independent_of_place_and_neighbours(op):
    row, angle = drawn(1, 8, 64), drawn(1, 32, seed=2)
    norms = [drawn(64, seed=3), drawn(64, seed=4)]
    q, alone = append(op, row, norms, angle, torch.tensor([4]), caches(1, 2, 64, torch.bfloat16))
    for n, i in ((16, 3), (29, 28)):
        rows = drawn(n, 8, 64, seed=n)
        rows[:i], rows[i] = float("nan"), row[0]
        angles, to = angle.expand(n, -1).contiguous(), torch.full((n,), -1)
        to[i] = 14
        many, got = append(op, rows, norms, angles, to, caches(1, 2, 64, torch.bfloat16))
        assert torch.equal(many[i], q[0])
        for a, b in zip(got[:2], alone[:2], strict=True):
            assert torch.equal(a[1, :, 4], b[0, :, 4])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7e4])
def test_what_is_kept_is_marked_where_it_is_not_finite(op, value):
    """A number that float16 cannot hold is infinite once it is there."""
    for place in (5, 7):  # a key's, a value's
        qkv = drawn(3, 8, 8)
        qkv[1, place, 3] = value
        angle, to = torch.zeros(3, 4), torch.tensor([0, 11, 20])
        _, got = append(op, qkv, [None, None], angle, to, caches(1, 2, 8, torch.float16))
        assert got[2].flatten()[to].tolist() == [False, True, False]


def test_no_rows(op):
    held = caches(1, 2, 8, torch.float32)
    q, got = append(op, drawn(0, 6, 8), [None, None], drawn(0, 4), places(0), held)
    assert q.shape == (0, 2, 8)
    assert got[0].isnan().all()


def test_refusals_name_what_came(op):
    held = [t.to(op.device) for t in caches(1, 2, 8, torch.float32)]
    first = [t[0] for t in held]
    x, table, to = drawn(4, 6, 8).to(op.device), drawn(4, 4).to(op.device), places(4).to(op.device)
    weight = table[0].repeat(2)
    with pytest.raises(ValueError, match=r"qkv: expected float32 \[4, 5, 8\].*got float32 \[4, 4, 8\]"):
        qk_rope_append(x[:, :4], None, None, table, table, to, *first, 1e-6)
    with pytest.raises(ValueError, match="q_norm, k_norm: expected both or neither"):
        qk_rope_append(x, weight, None, table, table, to, *first, 1e-6)
    with pytest.raises(ValueError, match=r"sin: expected float32 \[4, 4\].*got float32 \[3, 4\]"):
        qk_rope_append(x, None, None, table, table[:3], to, *first, 1e-6)
    with pytest.raises(ValueError, match="v_cache: expected float32"):
        qk_rope_append(x, None, None, table, table, to, first[0], first[1].half(), first[2], 1e-6)
    with pytest.raises(ValueError, match=r"kv: expected float32 \[4, 1, 2, 2, 8\]"):
        context_append(x, weight[None], table, table, to, *held, 1e-6)
    with pytest.raises(ValueError, match="k_cache: expected contiguous memory"):
        turned = held[0].transpose(2, 3).contiguous().transpose(2, 3)
        context_append(
            x[:, :4].reshape(4, 1, 2, 2, 8), weight[None], table, table, to, turned, *held[1:], 1e-6
        )
