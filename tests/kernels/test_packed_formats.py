"""Packed matrices byte by byte: blocks against the gguf package, the layout against its description."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockpilot_kernels.packed_decoder import (
    FORMATS,
    Blocks,
    Weights,
    interleave,
    interleaved_rows,
    quantise_q8_0,
    stack,
)
from blockpilot_kernels.packed_decoder.formats import pack
from tests.kernels.packed import BLOCKS, random_blocks


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_mean_what_the_gguf_package_says(kind: str) -> None:
    blocks = random_blocks(kind, 49, 96)
    expected = gguf.dequantize(blocks.data.flatten(1).numpy(), Type[kind])
    assert torch.equal(blocks.dequantise(), torch.from_numpy(expected))
    assert blocks.shape == (49, 96)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("Q5_0", torch.zeros(2, 1, 22, dtype=torch.uint8), r"kind: expected one of .*Q4_0.*, got 'Q5_0'"),
        ("Q8_0", torch.zeros(2, 1, 18, dtype=torch.uint8), r"\[N, K / 32, 34\] for Q8_0, got .*\(2, 1, 18\)"),
        ("Q4_0", torch.zeros(2, 18, dtype=torch.uint8), r"\[N, K / 32, 18\] for Q4_0, got .*\(2, 18\)"),
        ("Q4_1", torch.zeros(2, 1, 20, dtype=torch.int8), r"expected uint8 .*got torch.int8"),
    ],
)
def test_other_blocks_are_refused(kind: str, data: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blocks(kind, data)


def test_quantised_values_are_the_nearest_there_are() -> None:
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 96, generator=gen) * torch.logspace(-4, 4, 40)[:, None]
    weight[5], weight[6, :32], weight[7, 3] = 0, 1e-12, -70.0
    blocks = quantise_q8_0(weight)
    scale = blocks.data[..., :2].contiguous().view(torch.float16).double()
    off = (blocks.dequantise().double() - weight.double()).unflatten(1, (-1, 32)).abs()
    # Half a step, and what float16 cannot say of a scale below its normal range.
    assert (off <= 0.5001 * scale + torch.where(scale < 2.0**-14, 127 * 2.0**-25, 0)).all()
    theirs = gguf.dequantize(gguf.quantize(weight.numpy(), Type.Q8_0), Type.Q8_0)
    assert off.sum() <= np.abs(theirs.astype(np.float64) - weight.double().numpy()).sum() * 1.01
    assert not blocks.dequantise()[5].any()
    assert not blocks.dequantise()[6, :32].any()


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 300])
def test_quantising_makes_no_floats_of_a_whole_matrix(rows: int) -> None:
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            found = made if isinstance(made, (list, tuple)) else [made]
            sizes.extend(t.numel() for t in found if t.is_floating_point())
            return made

    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with Watch():
        blocks = quantise_q8_0(weight)
    assert max(sizes) <= 128 * 64
    each = [quantise_q8_0(row[None]).data for row in weight]
    assert torch.equal(blocks.data, torch.cat([torch.empty(0, 2, 34, dtype=torch.uint8), *each]))


def unpacked(kind: str, data: Tensor, n: int, k: int) -> Tensor:
    """[n, k] float32 read one by one at the places that csrc/cpu/model_kernels.h gives; padding must be zero."""
    raw = data.numpy().tobytes()
    wide, blocks = -(-n // 32) * 32, -(-k // 32)
    head = {"Q8_0": 32, "Q4_0": 32, "Q4_1": 64}.get(kind, 0)
    width = {"F32": 2048, "BF16": 1024, "Q8_0": 544, "Q4_0": 288, "Q4_1": 320}[kind]
    assert len(raw) == wide * blocks // 16 * width

    def number(at: int, dtype: Any) -> float:
        return float(np.frombuffer(raw, dtype, 1, at)[0])

    out = np.zeros((wide, blocks * 32), np.float32)
    for row, column in np.ndindex(*out.shape):
        block, lane, c = (row // 16 * blocks + column // 32) * width, row % 16, column % 32
        # Scales follow the codes in the blocks of Q8_0 and Q4_0 that begin at a multiple of 64.
        behind = kind in ("Q8_0", "Q4_0") and block % 64 == 0
        first, scales = (block, block + width - head) if behind else (block + head, block)
        if kind == "F32":
            out[row, column] = number(block + 4 * (c * 16 + lane), np.float32)
        elif kind == "BF16":
            at = block + 64 * (c // 2) + 4 * lane + 2 * (c % 2)
            code = np.frombuffer(raw, np.uint16, 1, at).astype(np.uint32) << 16
            out[row, column] = code.view(np.float32)[0]
        elif kind == "Q8_0":
            code = number(first + 64 * (c // 4) + 4 * lane + c % 4, np.int8)
            out[row, column] = np.float32(code) * np.float32(number(scales + 2 * lane, np.float16))
        else:
            byte = int(number(first + 64 * (c % 16 // 4) + 4 * lane + c % 4, np.uint8))
            code = (byte >> 4 if c >= 16 else byte & 15) - (8 if kind == "Q4_0" else 0)
            out[row, column] = np.float32(code) * np.float32(number(scales + 2 * lane, np.float16))
            if kind == "Q4_1":
                out[row, column] += np.float32(number(scales + 32 + 2 * lane, np.float16))
    assert not out[n:].any() and not out[:, k:].any()
    return torch.from_numpy(out[:n, :k])


@pytest.mark.parametrize("kind", FORMATS)
def test_the_layout_is_the_one_described(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "BF16" else torch.float32
    for n, k in ((49, 64), (16, 32), *([(33, 37)] if kind not in BLOCKS else [])):
        dense = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype).float()
        matrix = random_blocks(kind, n, k) if kind in BLOCKS else dense
        name, size, pieces = pack(matrix, dtype)
        data = torch.cat(list(pieces))
        assert (name, size) == (kind, len(data))
        expected = matrix.dequantise() if isinstance(matrix, Blocks) else dense
        assert torch.equal(unpacked(kind, data, n, k), expected)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected torch.float32 or torch.bfloat16, got torch.float16"):
        pack(torch.zeros(2, 2), torch.float16)


@pytest.mark.parametrize("size", [16, 20, 1, 33])
def test_gates_lie_beside_their_ups(size: int) -> None:
    padded = -(-size // 16) * 16
    dense = torch.randn(2 * size, 32, generator=torch.Generator().manual_seed(size))
    blocks = random_blocks("Q4_0", 2 * size, 32, size)
    for matrix, source in ((dense, dense), (blocks, blocks.dequantise())):
        before = source.clone()
        made = interleave(matrix, size)
        made = made.dequantise() if isinstance(made, Blocks) else made
        panels = made.view(-1, 2, 16, 32)
        for half, rows in ((0, before[:size]), (1, before[size:])):
            side = panels[:, half].reshape(padded, 32)
            assert torch.equal(side[:size], rows)
            assert not side[size:].any()
    index = interleaved_rows(size)
    assert (len(index), int((index >= 0).sum())) == (2 * padded, 2 * size)


def test_parts_of_one_kind_stay_blocks() -> None:
    same = [random_blocks("Q4_1", n, 64, n) for n in (8, 3)]
    mixed = [same[0], random_blocks("Q8_0", 4, 64), torch.ones(2, 64, dtype=torch.bfloat16)]
    kept, floats = stack(same), stack(mixed)
    assert isinstance(kept, Blocks) and kept.kind == "Q4_1"
    assert torch.equal(kept.dequantise(), torch.cat([b.dequantise() for b in same]))
    expected = [m.dequantise() if isinstance(m, Blocks) else m.float() for m in mixed]
    assert isinstance(floats, Tensor) and torch.equal(floats, torch.cat(expected))
    one_float = stack([same[0], torch.zeros(1, 64)])
    assert isinstance(one_float, Tensor) and one_float.dtype == torch.float32


def test_records_say_where_things_are() -> None:
    weights = Weights(torch.bfloat16)
    matrix, bias = torch.randn(49, 33), torch.arange(49.0)
    blocks = random_blocks("Q8_0", 3, 32)
    first, second = weights.linear(matrix, bias), weights.linear(blocks)
    lonely = weights.vector(torch.tensor([7.0], dtype=torch.bfloat16))
    assert weights.vector(None) == -1
    blob = weights.blob()
    assert first[:4] == (0, FORMATS.index("BF16"), 49, 33)
    assert second[:4] + second[5:] == (0, FORMATS.index("Q8_0"), 3, 32, -1)
    for (_, _, n, k, at, _), kind, stored in ((first, "BF16", matrix), (second, "Q8_0", blocks)):
        data = torch.cat(list(pack(stored, torch.bfloat16)[2]))
        assert at % 64 == 0 and torch.equal(blob[at : at + len(data)], data)
        assert weights.formats[kind] == len(data) >= n * k
    assert torch.equal(blob[first[5] : first[5] + 4 * 49].view(torch.float32), bias)
    assert blob[lonely : lonely + 4].view(torch.float32).item() == 7.0
