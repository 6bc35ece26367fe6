"""What the tests of the packed decoder share: matrices of every format, products to compare with, small decoders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import packed_decoder as packed
from blockpilot_kernels.packed_decoder import Blocks, Geometry, LayerPlan, Record, Weights

FLOATS = ("F32", "BF16")
BLOCKS = ("Q8_0", "Q4_0", "Q4_1")
# Rounding to bytes leaves float formats alone, so these are all there are.
PRODUCTS = [(kind, r) for kind in packed.FORMATS for r in packed.ROUNDINGS]


def instruction_sets() -> tuple[list[str], list[str]]:
    """Those this machine can run, worst first, and those it lacks."""
    found: tuple[list[str], list[str]] = ([], [])
    with pytest.MonkeyPatch.context() as patch:
        for isa in ("default", "avx2", "avx512", "vnni", "amx"):
            patch.setenv("BLOCKPILOT_ISA", isa)
            try:
                found[0].append(torch.ops.blockpilot.isa())
            except (RuntimeError, ValueError):
                found[1].append(isa)
    return found


@contextmanager
def threads(count: int) -> Iterator[None]:
    """`count` threads inside, as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_blocks(kind: str, n: int, k: int, seed: int = 0) -> Blocks:
    """Every code and both signs of the scale, scales below float16's normal range included."""
    gen = torch.Generator().manual_seed(seed)
    blocks, codes = k // 32, 32 if kind == "Q8_0" else 16
    data = [torch.randint(0, 256, (n, blocks, codes), generator=gen).to(torch.uint8)]
    for spread in (0.02, 0.3)[: 2 if kind == "Q4_1" else 1][::-1]:
        numbers = torch.randn(n, blocks, 1, generator=gen) * spread
        numbers[::7] *= 2.0**-16
        data.insert(0, numbers.to(torch.float16).view(torch.uint8))
    return Blocks(kind, torch.cat(data, -1))


@dataclass(frozen=True)
class Product:
    """A packed matrix and what it stands for: dense [N, K], bias [N] or None."""

    kind: str
    blob: Tensor
    record: Record
    dense: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, rounding: str = "none") -> Tensor:
        return packed.packed_linear(x, self.blob, self.record, rounding)

    def expected(self, x: Tensor, rounding: str) -> Tensor:
        """[M, N] float64."""
        seen = rounded(x, rounding, self.kind in BLOCKS)
        y = seen.double() @ self.dense.double().T
        return y if self.bias is None else y + self.bias.double()

    def close(self, y: Tensor, x: Tensor, rounding: str) -> None:
        """Within the rounding errors of float32 sums; a block's offset is added apart from its codes."""
        size = self.dense.abs().unflatten(1, (-1, 32 if self.kind in BLOCKS else 1))
        size = size.amax(-1, keepdim=True).expand_as(size).flatten(1).double()
        terms = x.abs().double() @ size.T + (0 if self.bias is None else self.bias.abs().double())
        assert ((y.double() - self.expected(x, rounding)).abs() <= 2e-6 * terms).all()


def make_product(kind: str, n: int, k: int, *, bias: bool = False, seed: int = 0) -> Product:
    """A seeded [n, k] matrix of a format; 32 divides k for blocks."""
    gen = torch.Generator().manual_seed(seed + 100)
    weights = Weights(torch.bfloat16 if kind == "BF16" else torch.float32)
    offset = torch.randn(n, generator=gen) if bias else None
    weights.vector(torch.randn(5, generator=gen))  # so that the matrix is not where the bytes begin
    if kind in BLOCKS:
        blocks = random_blocks(kind, n, k, seed)
        record, dense = weights.linear(blocks, offset), blocks.dequantise()
    else:
        dense = torch.randn(n, k, generator=gen)
        record = weights.linear(dense, offset)
        dense = dense.to(weights.dtype).float()
    assert packed.FORMATS[record[1]] == kind
    return Product(kind, weights.blob(), record, dense, offset)


def rounded(x: Tensor, rounding: str, blocks: bool) -> Tensor:
    """x as a product with blocks, or with floats, sees it."""
    if rounding == "bfloat16":
        return x.bfloat16().float()
    if rounding == "none" or not blocks:
        return x
    parts = x.unflatten(1, (-1, 32))
    top = parts.abs().amax(-1, keepdim=True)
    most = torch.tensor({"int8": 127.0, "int16": 16256.0}[rounding])  # a number over a tensor is no division
    codes = (parts * torch.where(top > 0, most / top, 0)).round()
    return (codes.double() * (top / most).double()).flatten(1)


HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, LAYERS, VOCAB = 32, 4, 2, 8, 48, 2, 49
SLOTS, CAPACITY = 3, 32
FEATURES, ROWS = 2 * HIDDEN, 6


def geometry(rounding: str = "none") -> Geometry:
    return Geometry(HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, LAYERS, rounding)


def empty_cache(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """NaN everywhere: nothing may be read that was not written."""
    keys = torch.full((LAYERS, SLOTS, KV_HEADS, CAPACITY // 16, DIM, 16), float("nan"), dtype=dtype)
    return keys, torch.full((LAYERS, SLOTS, KV_HEADS, CAPACITY, 16), float("nan"), dtype=dtype)


def rope() -> tuple[Tensor, Tensor]:
    """cos, sin [CAPACITY, DIM / 2]."""
    angle = torch.arange(CAPACITY)[:, None] * 0.3 ** torch.arange(DIM // 2)
    return angle.cos(), angle.sin()


def small_decoder(kind: str = "F32", rounding: str = "none") -> dict[str, Any]:
    """The parts of a random decoder that `decoder_forward` takes: weights, plan, scalars."""
    gen = torch.Generator().manual_seed(4)
    weights = Weights(torch.bfloat16 if kind == "BF16" else torch.float32)

    def matrix(n: int, k: int, bias: bool = False) -> Record:
        dense = torch.randn(n, k, generator=gen) * 0.3
        offset = torch.randn(n, generator=gen) if bias else None
        return weights.linear(random_blocks(kind, n, k, n) if kind in BLOCKS else dense, offset)

    def norm(n: int) -> int:
        return weights.vector(torch.randn(n, generator=gen) * 0.2 + 1)

    table, final = matrix(VOCAB, HIDDEN), norm(HIDDEN)
    down = torch.randn(HIDDEN, INTERMEDIATE, generator=gen) * 0.3
    layers = [
        LayerPlan(
            matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, bias=True),
            matrix(HIDDEN, HEADS * DIM),
            matrix(2 * INTERMEDIATE, HIDDEN),
            weights.linear(down),
            norm(HIDDEN),
            norm(HIDDEN),
            norm(DIM),
            norm(DIM),
            window,
            True,
        )
        for window in (0, 5)
    ]
    plan = packed.decoder_plan(geometry(rounding), table, table, final, layers)
    return {"weights": [weights.blob()], "plan": plan, "scalars": [1e-5, 1.0, 1.0]}


def small_context() -> dict[str, Any]:
    """The parts of a random drafter that `context_append` takes: weights, plan, eps."""
    gen = torch.Generator().manual_seed(6)
    weights = Weights(torch.float32)
    fc = weights.linear(torch.randn(HIDDEN, FEATURES, generator=gen) * 0.3)
    project = weights.linear(torch.randn(2 * LAYERS * KV_HEADS * DIM, HIDDEN, generator=gen) * 0.3)
    norms = [weights.vector(torch.rand(n, generator=gen) + 0.5) for n in (HIDDEN, *[DIM] * LAYERS)]
    plan = packed.context_plan(geometry(), fc, project, norms[0], norms[1:])
    return {"weights": [weights.blob()], "plan": plan, "eps": 1e-5}


def arguments(**over: Any) -> dict[str, Any]:
    """A first pass over ROWS positions of slot 1."""
    keys, values = empty_cache()
    return {
        **small_decoder(),
        "keys": keys,
        "values": values,
        "rope": rope(),
        "tokens": torch.arange(ROWS) * 7 + 3,
        "rows": (torch.ones(ROWS, dtype=torch.long), torch.arange(ROWS), torch.ones(ROWS, dtype=torch.bool)),
        "extent": torch.full((SLOTS,), ROWS),
        "feature_layers": (0, 1, LAYERS),
        "head_rows": torch.arange(ROWS),
        **over,
    }


def context_arguments(**over: Any) -> dict[str, Any]:
    keys, values = empty_cache()
    features = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
    rows = (torch.ones(ROWS, dtype=torch.long), torch.arange(ROWS) + 3, torch.ones(ROWS, dtype=torch.bool))
    return {
        **small_context(),
        "keys": keys,
        "values": values,
        "rope": rope(),
        "features": features,
        "rows": rows,
        **over,
    }


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN included."""
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
