"""The kernels of a step at the shapes of Qwen3-8B, one request, a block of 16: what each moves, and how far its result
is from one in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot_kernels import accept_commit, choose, gumbel_noise
from blockpilot_kernels.block_attention import AttentionTiles, block_attention
from blockpilot_kernels.norm_rope import rms_norm, swiglu
from blockpilot_kernels.qk_rope_append import qk_rope_append
from blockpilot_kernels.tiled_linear import PackedLinear
from device_setup import Setup

Call = Callable[[], Tensor]
FLOAT = 4
ROWS = 16
EPS = 1e-6
OUT_OF_CACHE = 2.5e8  # bytes that copies of an operand take together, so that no cache holds them


@dataclass(frozen=True)
class Made:
    """Equal calls over copies of what they read; `exact` gives the first one's result in float64, if that is sums."""

    calls: Sequence[Call]
    exact: Call | None = None


@dataclass(frozen=True)
class Case:
    """A kernel on one shape; `moved`: bytes it must read and write."""

    name: str
    moved: float
    make: Callable[[], Made]


def cases(setup: Setup) -> list[Case]:
    """Largest first: the figures that matter most."""
    hidden, inner = setup.size((4096, 12288), (32, 48))
    heads, kv_heads, dim = setup.size((32, 8, 128), (4, 2, 16))
    vocab = setup.size(151936, 96)
    products = {
        "head": (vocab, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "out": (hidden, heads * dim),
    }
    contexts = setup.size((1024, 8192, 32768), (64,))
    shape = (heads, kv_heads, dim)
    return [
        *(_linear(setup, name, *size) for name, size in products.items()),
        *(_attention(setup, keys, *shape, causal=True) for keys in contexts),
        _attention(setup, contexts[0], *shape, causal=False),
        *(_choose(setup, vocab, kind) for kind in ("greedy", "sampled", "filtered")),
        _noise(setup, vocab),
        _norm(setup, hidden),
        _append(setup, heads, dim),
        _swiglu(setup, inner),
        *(_accept(setup, slots) for slots in (1, 64)),
    ]


def _random(setup: Setup, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=setup.device).normal_()


def _copies(setup: Setup, size: float) -> int:
    return setup.size(max(1, int(OUT_OF_CACHE / size)), 1)


def _linear(setup: Setup, name: str, rows: int, columns: int) -> Case:
    size = 2.0 * rows * columns

    def make() -> Made:
        weights = [
            _random(setup, rows, columns, dtype=torch.bfloat16) * columns**-0.5
            for _ in range(min(8, _copies(setup, size)))
        ]
        x = _random(setup, ROWS, columns)
        layers = [PackedLinear(w, None, torch.bfloat16) for w in weights]

        def exact() -> Tensor:
            return x.bfloat16().double() @ weights[0].double().T

        return Made([partial(layer, x) for layer in layers], exact)

    return Case(f"product {name} {rows}x{columns}", size + FLOAT * ROWS * (rows + columns), make)


def _attention(setup: Setup, keys: int, heads: int, kv_heads: int, dim: int, causal: bool) -> Case:
    size = 2.0 * 2 * keys * kv_heads * dim

    def make() -> Made:
        slots = min(64, _copies(setup, size))
        q = _random(setup, ROWS, heads, dim)
        k, v = (_random(setup, slots, kv_heads, keys, dim, dtype=torch.bfloat16) for _ in "kv")
        bad = torch.zeros(slots, keys, dtype=torch.bool, device=setup.device)
        position = torch.arange(ROWS, device=setup.device) + keys - ROWS
        extent = torch.full((slots,), keys, device=setup.device)
        tiles = [
            AttentionTiles.build((s,), (ROWS,), ROWS, heads // kv_heads).to(setup.device)
            for s in range(slots)
        ]
        given = (position, extent, keys)
        calls = [partial(block_attention, q, k, v, bad, t, *given, causal=causal) for t in tiles]
        return Made(calls, partial(_attend64, q, k[0], v[0], position, causal))

    kind = "causal" if causal else "whole block"
    return Case(f"attention {keys} keys, {kind}", size + 2 * FLOAT * ROWS * heads * dim, make)


def _attend64(q: Tensor, k: Tensor, v: Tensor, position: Tensor, causal: bool) -> Tensor:
    groups = q.shape[1] // k.shape[0]
    keys, values = (t.double().repeat_interleave(groups, 0) for t in (k, v))
    score = torch.einsum("nhd,hkd->hnk", q.double(), keys) * q.shape[2] ** -0.5
    if causal:
        seen = torch.arange(k.shape[1], device=q.device)[None] <= position[:, None]
        score = score.masked_fill(~seen, -torch.inf)
    return torch.einsum("hnk,hkd->nhd", score.softmax(-1), values).flatten(1)


def _choose(setup: Setup, vocab: int, kind: str) -> Case:
    filtered, sampled = kind == "filtered", kind != "greedy"
    passes = 1 + sampled

    def make() -> Made:
        logits, noise = _random(setup, ROWS, vocab) * 4, _random(setup, ROWS, vocab)

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((ROWS,), value, dtype=dtype, device=setup.device)

        how = (
            column(0.8 if sampled else 0.0, torch.float32),
            column(50 if filtered else 0, torch.int64),
            column(0.9 if filtered else 1.0, torch.float32),
            column(0.0, torch.float32),
        )
        return Made([lambda: choose(logits, noise if sampled else None, *how, None, filtered=filtered)[0]])

    return Case(f"choose {kind} {ROWS}x{vocab}", float(FLOAT * ROWS * vocab * passes), make)


def _noise(setup: Setup, vocab: int) -> Case:
    def make() -> Made:
        row = torch.arange(ROWS, device=setup.device)
        return Made([partial(gumbel_noise, row * 0x9E3779B9, row, vocab)])

    return Case(f"gumbel_noise {ROWS}x{vocab}", float(FLOAT * ROWS * vocab), make)


def _norm(setup: Setup, hidden: int) -> Case:
    def make() -> Made:
        x, weight = _random(setup, ROWS, hidden), _random(setup, hidden)

        def exact() -> Tensor:
            return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

        return Made([partial(rms_norm, x, weight, EPS)], exact)

    return Case(f"rms_norm {ROWS}x{hidden}", 2.0 * FLOAT * ROWS * hidden, make)


def _append(setup: Setup, heads: int, dim: int) -> Case:
    """Queries of a block, and its keys and values into one request's cache; the queries are compared."""
    kv_heads = max(1, heads // 4)

    def make() -> Made:
        x, weight = _random(setup, ROWS, heads + 2 * kv_heads, dim), _random(setup, dim)
        angle = _random(setup, ROWS, dim // 2)
        cos, sin = angle.cos(), angle.sin()
        k, v = (_random(setup, 1, kv_heads, 512, dim) for _ in range(2))
        bad = torch.zeros(1, 512, dtype=torch.bool, device=x.device)
        to = torch.arange(ROWS, device=x.device) + 100

        def exact() -> Tensor:
            y = F.rms_norm(x[:, :heads].double(), (dim,), weight.double(), EPS)
            a, b = y.split(dim // 2, -1)
            c, s = cos.double()[:, None], sin.double()[:, None]
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        return Made([partial(qk_rope_append, x, weight, weight, cos, sin, to, k, v, bad, EPS)], exact)

    moved = 2.0 * FLOAT * ROWS * (heads + 2 * kv_heads) * dim
    return Case(f"qk_rope_append {ROWS}x{heads}x{dim}", moved, make)


def _swiglu(setup: Setup, inner: int) -> Case:
    def make() -> Made:
        x = _random(setup, ROWS, 2 * inner)

        def exact() -> Tensor:
            gate, up = x.double().chunk(2, -1)
            return F.silu(gate) * up

        return Made([partial(swiglu, x)], exact)

    return Case(f"swiglu {ROWS}x{inner}", 3.0 * FLOAT * ROWS * inner, make)


def _accept(setup: Setup, slots: int) -> Case:
    def make() -> Made:
        def ints(*shape: int, below: int) -> Tensor:
            return torch.randint(below, shape, device=setup.device)

        def column(value: int) -> Tensor:
            return torch.full((slots,), value, device=setup.device)

        def flags(value: bool, *shape: int) -> Tensor:
            return torch.full(shape, value, device=setup.device)

        tokens, stops = ints(slots, 2048, below=9), column(-1)[:, None].repeat(1, 4)
        given = (ints(slots, ROWS, below=2), ints(slots, ROWS, below=2), flags(True, slots, ROWS))
        length = column(7)
        ends = (column(0), column(0), column(0))
        rest = (column(ROWS), stops, column(2048), tokens, length, flags(False, slots), *ends)

        def call() -> Tensor:
            accept_commit(*given, *rest)
            return length

        return Made([call])

    return Case(f"accept_commit {slots} slots, width {ROWS}", 8.0 * slots * (3 * ROWS + 12), make)
