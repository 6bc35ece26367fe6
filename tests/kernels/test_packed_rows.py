"""Rows taken out of a packed matrix: the stored bytes again, and the products of a matrix made of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.packed_decoder import (
    FORMATS,
    ROUNDINGS,
    Blocks,
    Weights,
    borrowed,
    decoder_forward,
    packed_linear,
    packed_rows,
)
from blockpilot_kernels.packed_decoder import rows as module
from tests.kernels.packed import BLOCKS, arguments, empty_cache, random_blocks, same, small_decoder

ROWS = {
    "all": lambda n: range(n),
    "backwards": lambda n: range(n - 1, -1, -1),
    "ends": lambda n: (0, n - 1),
    "last alone": lambda n: (n - 1,),
    "odd ones": lambda n: range(1, n, 2),
    "across panels": lambda n: [i for i in (15, 16, 17, 31, 32, 33, 47, 48) if i < n],
    "again and again": lambda n: (3, 3, 0, 3),
}


def stored(kind: str, n: int, k: int) -> tuple[Tensor, tuple[int, ...], Tensor]:
    """Blob, record and the dense matrix that was packed, which is not where the bytes begin."""
    weights = Weights(torch.bfloat16 if kind == "BF16" else torch.float32)
    weights.vector(torch.ones(5))
    if kind in BLOCKS:
        matrix = random_blocks(kind, n, k, n)
        record, dense = weights.linear(matrix), matrix.dequantise()
    else:
        dense = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(weights.dtype)
        record = weights.linear(dense, torch.ones(n))
    return weights.blob(), record, dense


@pytest.mark.parametrize("asked", ROWS)
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_the_ones_that_were_packed(kind, asked):
    """An odd number of blocks in a row, so that both places of the scales occur; and a padded last unit."""
    for n, k in ((49, 96), (64, 64), (17, 32), *([(33, 37)] if kind not in BLOCKS else [])):
        blob, record, dense = stored(kind, n, k)
        index = torch.tensor(list(ROWS[asked](n)))
        taken = packed_rows(blob, record, index)
        if kind in BLOCKS:
            assert isinstance(taken, Blocks) and taken.kind == kind
            assert torch.equal(taken.data, random_blocks(kind, n, k, n).data[index])
            assert torch.equal(taken.dequantise(), dense[index])
        else:
            assert isinstance(taken, Tensor) and taken.dtype == dense.dtype
            assert torch.equal(taken, dense[index])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_few_at_a_time_are_the_same(kind, monkeypatch):
    blob, record, _ = stored(kind, 49, 96)
    index = torch.arange(0, 49, 3)
    whole = packed_rows(blob, record, index)
    monkeypatch.setattr(module, "_AT_ONCE", 5)
    parts = packed_rows(blob, record, index)
    pair = [m.data if isinstance(m, Blocks) else m for m in (whole, parts)]
    assert torch.equal(*pair)


@pytest.mark.skipif(dispatch.extension_error() is not None, reason=str(dispatch.extension_error()))
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", FORMATS)
def test_packed_again_they_give_the_same_products(kind, rounding):
    weights = Weights(torch.bfloat16 if kind == "BF16" else torch.float32)
    weights.vector(torch.ones(5))
    gen = torch.Generator().manual_seed(1)
    record = weights.linear(
        random_blocks(kind, 81, 96) if kind in BLOCKS else torch.randn(81, 96, generator=gen)
    )
    x, index = torch.randn(7, 96, generator=gen), torch.tensor([0, 1, 14, 15, 16, 40, 63, 64, 79, 80])
    again = Weights(weights.dtype)
    few = again.linear(packed_rows(weights.blob(), record, index))
    assert few[1:4] == (record[1], len(index), 96)
    found = packed_linear(x, again.blob(), few, rounding)
    expected = packed_linear(x, weights.blob(), record, rounding)[:, index]
    assert torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([0, 49]), r"index: expected rows of 0 to 48, got \[49\]"),
        (torch.tensor([-1]), r"index: expected rows of 0 to 48, got \[-1\]"),
        (torch.tensor([1.0]), r"index: expected int64 \[R\], got torch.float32 \[1\]"),
        (torch.tensor([[1]]), r"index: expected int64 \[R\], got torch.int64 \[1, 1\]"),
    ],
)
def test_rows_that_are_not_there_are_refused(index, message):
    blob, record, _ = stored("Q4_0", 49, 96)
    with pytest.raises(ValueError, match=message):
        packed_rows(blob, record, index)


@pytest.mark.skipif(dispatch.extension_error() is not None, reason=str(dispatch.extension_error()))
@pytest.mark.parametrize("kind", FORMATS)
def test_a_decoder_takes_them_as_its_head(kind):
    """Logits of those rows alone, bit for bit; ids are still all that the embedding has."""
    given = arguments(**small_decoder(kind))
    blob, plan, index = given["weights"][0], given["plan"].clone(), torch.tensor([0, 7, 30, 48])
    assert torch.equal(plan[8:14], plan[14:20])  # the embedding's record, which is the head's as well
    few = Weights(torch.bfloat16 if kind == "BF16" else torch.float32)
    record = few.linear(packed_rows(blob, tuple(plan[14:20].tolist()), index))
    plan[14:20] = torch.tensor(borrowed(record, 1))
    expected, _ = decoder_forward(**given)
    keys, values = empty_cache()
    changed = {**given, "weights": [blob, few.blob()], "plan": plan, "keys": keys, "values": values}
    found, _ = decoder_forward(**changed)
    assert int(given["tokens"].max()) >= len(index) and same(found, expected[:, index])
