"""Attention of the packed decoder: queries that share a slot and a KV head share loads, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels import packed_decoder as packed
from blockpilot_kernels.packed_decoder import Geometry, LayerPlan, Weights, decoder_forward
from tests.kernels.packed import instruction_sets, threads

if dispatch.extension_error() is not None:
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)

SLOTS, LENGTH, CAPACITY, VOCAB, LAYERS, EPS = 3, 40, 48, 33, 2, 1e-5
# (heads, KV heads, head dim): groups of 1, 3, 9 and 10, one KV head and several, whole and broken vectors.
SHAPES = [(1, 1, 128), (3, 1, 64), (9, 3, 64), (9, 1, 80), (2, 2, 96), (4, 4, 128), (10, 1, 8), (6, 2, 20)]
WINDOWS = [(0, 0), (7, 0), (18, 1)]
# Rows of one pass as (slot, position): any order, single rows and runs, slots that alternate.
MIXES = [
    [(1, p) for p in (39, 3, 38, 4, 5, 20, 0)],
    [(p % 2, p) for p in range(9, 30)],
    [(s, p) for s, run in ((0, (30, 31, 32)), (1, (0, 15, 16, 17)), (0, (2,)), (1, (39,))) for p in run],
    [(0, 33), *[(1, p) for p in range(LENGTH)], (0, 32)],
]


@dataclass(frozen=True)
class Model:
    """LAYERS layers that add their attention to the stream: the output matrix is 1, and the MLP 0."""

    shape: tuple[int, int, int]
    windows: tuple[int, int]
    causal: bool
    qkv: Tensor
    decoder: dict[str, Any]

    def empty(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A cache of NaN."""
        _, kv, dim = self.shape
        keys = torch.full((LAYERS, SLOTS, kv, CAPACITY // 16, dim, 16), float("nan"), dtype=dtype)
        padded = -(-dim // 16) * 16
        return keys, torch.full((LAYERS, SLOTS, kv, CAPACITY, padded), float("nan"), dtype=dtype)

    def rope(self) -> tuple[Tensor, Tensor]:
        half = self.shape[2] // 2
        angle = torch.arange(CAPACITY)[:, None] * 0.3 ** (torch.arange(half) / half * 4)
        return angle.cos(), angle.sin()

    def states(self, cache: tuple[Tensor, Tensor], where: list[tuple[int, int]], end: int = LENGTH) -> Tensor:
        """[rows, (LAYERS + 1) · hidden] of rows (slot, position), of which every slot has `end` keys."""
        slot, position = torch.tensor(where).unbind(1)
        rows = (slot.contiguous(), position.contiguous(), torch.ones(len(where), dtype=torch.bool))
        every = (torch.arange(LENGTH) * 5 % VOCAB)[position]
        layers, asked = range(LAYERS + 1), torch.arange(0)
        extent = torch.full((SLOTS,), end)
        given = {"keys": cache[0], "values": cache[1], "rope": self.rope(), "tokens": every, "rows": rows}
        return decoder_forward(
            **self.decoder, **given, extent=extent, feature_layers=tuple(layers), head_rows=asked
        )[1]


def make_model(shape: tuple[int, int, int], windows: tuple[int, int] = (0, 0), causal: bool = True) -> Model:
    heads, kv, dim = shape
    hidden = heads * dim
    gen = torch.Generator().manual_seed(hidden)
    weights = Weights(torch.float32)
    table = weights.linear(torch.randn(VOCAB, hidden, generator=gen))
    qkv = torch.randn((heads + 2 * kv) * dim, hidden, generator=gen) / hidden**0.5
    one, zero = torch.eye(hidden), torch.zeros(32, hidden)
    norm = weights.vector(torch.ones(hidden))
    layers = [
        LayerPlan(
            weights.linear(qkv),
            weights.linear(one),
            weights.linear(zero),
            weights.linear(torch.zeros(hidden, 16)),
            norm,
            norm,
            -1,
            -1,
            window,
            causal,
        )
        for window in windows
    ]
    plan = packed.decoder_plan(
        Geometry(hidden, heads, kv, dim, 16, LAYERS, "none"), table, table, norm, layers
    )
    decoder = {"weights": [weights.blob()], "plan": plan, "scalars": [EPS, 1.0, 1.0]}
    return Model(shape, windows, causal, qkv, decoder)


def expected_attention(model: Model, x: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, hidden] float64: the first layer's attention over rows x [n, hidden] at positions 0 … n − 1."""
    (heads, kv, dim), n = model.shape, len(x)
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() @ model.qkv.double().T
    cos, sin = (t[:n, None].double() for t in model.rope())
    q, k, v = x.view(n, -1, dim).split([heads, kv, kv], 1)
    (qa, qb), (ka, kb) = q.chunk(2, -1), k.chunk(2, -1)
    q = torch.cat([qa * cos - qb * sin, qb * cos + qa * sin], -1)
    k = torch.cat([ka * cos - kb * sin, kb * cos + ka * sin], -1).to(dtype).double()
    k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v.to(dtype).double()))
    away = torch.arange(n)[:, None] - torch.arange(n)
    seen = (away >= 0) | torch.tensor(not model.causal)
    if window := model.windows[0]:
        seen &= away.abs() < window
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", p, v).flatten(1)


@pytest.fixture(params=instruction_sets()[0])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLOCKPILOT_ISA", request.param)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 7])
def test_what_it_computes(isa, shape, causal, window):
    model, hidden = make_model(shape, (window, 0), causal), shape[0] * shape[2]
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 0.03)):
        found = model.states(model.empty(dtype), [(1, p) for p in range(LENGTH)])
        x, after = found[:, :hidden], found[:, hidden : 2 * hidden]
        assert (after - x - expected_attention(model, x, dtype)).abs().max() < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("windows", WINDOWS)
def test_a_row_is_the_same_beside_any_others(isa, shape, windows, dtype):
    """One by one; then again over the full cache, in every mix, at any number of threads."""
    model, cache = make_model(shape, windows), model_cache(shape, dtype)
    alone = torch.cat([model.states(cache, [(0, p)], p + 1) for p in range(LENGTH)])
    again = torch.cat([model.states(cache, [(1, p)], p + 1) for p in range(LENGTH)])
    assert torch.isfinite(alone).all() and torch.equal(alone, again)
    for mix in MIXES:
        for count in (1, 3):
            with threads(count):
                assert torch.equal(model.states(cache, mix), alone[[p for _, p in mix]]), (mix, count)


def model_cache(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return make_model(shape).empty(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("windows", [(0, 0), (7, 7)])
def test_broken_keys_reach_those_who_see_them(isa, shape, windows):
    """Position 20 is NaN: rows before it are as ever, rows that see it are lost, in whatever company."""
    model = make_model(shape, windows)
    cache = model.empty(torch.float32)
    expected = model.states(cache, [(1, p) for p in range(LENGTH)])
    cache[0][0, 1, :, 20 // 16, :, 20 % 16] = float("nan")
    cache[1][0, 1, :, 20] = float("nan")
    hidden = shape[0] * shape[2]
    for where in ([22, 19, 26, 18, 27], [19, 39, 2], [25, 17, 18, 19, 30]):
        found = model.states(cache, [(1, p) for p in where])[:, : 2 * hidden]
        for i, p in enumerate(where):
            if p > 20 and (windows[0] == 0 or p < 20 + windows[0]):
                assert torch.isnan(found[i, hidden:]).all(), p
            else:
                assert torch.equal(found[i], expected[p, : 2 * hidden]), p


def test_without_a_mask_every_row_sees_every_key(isa):
    """What a drafter's block does: all rows of a slot over all its keys, in tiles of any size."""
    model = make_model((3, 1, 64), causal=False)
    cache = model.empty(torch.float32)
    first = [(1, p) for p in range(20)]
    whole = model.states(cache, first, 20)
    hidden = 3 * 64
    for chunk in (1, 3, 5):
        parts = [model.states(cache, first[i : i + chunk], 20) for i in range(0, 20, chunk)]
        assert torch.equal(torch.cat(parts)[:, : 2 * hidden], whole[:, : 2 * hidden])
