"""Packed matrices: the layout the C++ decoder reads (csrc/cpu/model_kernels.h), made from floats or GGUF blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Of all that is packed, here and by the engine: higher whenever the same weights give other bytes or other offsets, so
# that bytes kept by an older version are not read.
LAYOUT = 2
PANEL, BLOCK, UNIT = 16, 32, 32
_PIECE, _QUANTISED_ROWS = 64 * UNIT, 128  # rows packed and quantised at a time
FORMATS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1")
HEADS = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}  # bytes of scale and offset before a block's codes
_CODES = {"Q8_0": 32, "Q4_0": 16, "Q4_1": 16}
# Of 16 rows and 32 columns.
BLOCK_BYTES = {"F32": 2048, "BF16": 1024, **{kind: PANEL * (HEADS[kind] + _CODES[kind]) for kind in HEADS}}


@dataclass(frozen=True)
class Blocks:
    """A matrix in GGUF blocks of 32 columns.

    Attributes:
        kind: "Q8_0", "Q4_0" or "Q4_1". data: [N, K / 32, bytes of a block] uint8.
    """

    kind: str
    data: Tensor

    def __post_init__(self) -> None:
        if self.kind not in HEADS:
            raise ValueError(f"Blocks.kind: expected one of {sorted(HEADS)}, got {self.kind!r}")
        width = HEADS[self.kind] + _CODES[self.kind]
        if self.data.ndim != 3 or self.data.shape[2] != width or self.data.dtype != torch.uint8:
            raise ValueError(
                f"Blocks.data: expected uint8 [N, K / 32, {width}] for {self.kind}, "
                f"got {self.data.dtype} {tuple(self.data.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] * BLOCK

    def rows(self, index: Tensor) -> Blocks:
        """The same matrix with its rows in this order; −1 is a row of zeros."""
        return Blocks(self.kind, _take(self.data, index))

    def dequantise(self) -> Tensor:
        """[N, K] float32."""
        scale = self.data[..., :2].contiguous().view(torch.float16).float()
        codes = self.data[..., HEADS[self.kind] :].contiguous()
        if self.kind == "Q8_0":
            return (codes.view(torch.int8).float() * scale).flatten(1)
        nibbles = torch.cat([codes & 15, codes >> 4], -1).float()
        if self.kind == "Q4_0":
            return ((nibbles - 8) * scale).flatten(1)
        return (nibbles * scale + self.data[..., 2:4].contiguous().view(torch.float16).float()).flatten(1)


Matrix = Tensor | Blocks


def quantise_q8_0(weight: Tensor) -> Blocks:
    """[N, K] floats, 32 divides K → the nearest Q8_0 blocks; scale = largest / 127, as llama.cpp has it."""
    # A few rows at a time: a whole matrix takes several copies of itself in floats.
    return Blocks("Q8_0", torch.cat([_q8_0(part) for part in weight.split(_QUANTISED_ROWS)]))


def _q8_0(weight: Tensor) -> Tensor:
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    codes = (blocks * inverse).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], -1)


def stack(parts: Sequence[Matrix]) -> Matrix:
    """Matrices under one another. Blocks of one kind stay as they are; anything else becomes floats."""
    kinds = {p.kind if isinstance(p, Blocks) else None for p in parts}
    if len(kinds) == 1 and None not in kinds:
        blocks = [p for p in parts if isinstance(p, Blocks)]
        return Blocks(blocks[0].kind, torch.cat([b.data for b in blocks]))
    return torch.cat([p.dequantise() if isinstance(p, Blocks) else p.float() for p in parts])


def interleave(gate_up: Matrix, intermediate: int) -> Matrix:
    """[2·I, K] gate rows, then up rows → panels of 16 gate rows and their 16 up rows, I padded to 16 with zeros."""
    index = interleaved_rows(intermediate)
    return gate_up.rows(index) if isinstance(gate_up, Blocks) else _take(gate_up, index)


def interleaved_rows(intermediate: int) -> Tensor:
    """Source row of each row of `interleave`; −1 for padding."""
    row = torch.arange(-(-intermediate // PANEL) * PANEL, device="cpu")
    gate = torch.where(row < intermediate, row, -1).view(-1, PANEL)
    up = torch.where(gate < 0, -1, gate + intermediate)
    return torch.stack([gate, up], 1).flatten()


def pack(matrix: Matrix, dtype: torch.dtype) -> tuple[str, int, Iterator[Tensor]]:
    """A matrix in the decoder's layout; floats are stored as `dtype`.

    Returns:
        the format's name, the size in bytes, and the bytes [n] uint8 piece by piece, so that packing needs little
        memory beside the result.
    """
    if not isinstance(matrix, Blocks) and dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16, got {dtype}")
    rows, columns = (-(-n // UNIT) * UNIT for n in matrix.shape)
    if isinstance(matrix, Blocks):
        width = matrix.data.shape[2]
        pieces = (_pack_blocks(Blocks(matrix.kind, part)) for part in matrix.data.split(_PIECE))
        return matrix.kind, rows * columns // BLOCK * width, pieces
    name = "F32" if dtype == torch.float32 else "BF16"
    return name, rows * columns * dtype.itemsize, (_pack_floats(p, dtype) for p in matrix.split(_PIECE))


def _pack_floats(part: Tensor, dtype: torch.dtype) -> Tensor:
    n, k = part.shape
    padded = F.pad(part.to(dtype), (0, -k % BLOCK, 0, -n % UNIT))
    together = 4 // dtype.itemsize  # columns side by side, as AMX multiplies them
    panels = padded.view(-1, PANEL, padded.shape[1] // BLOCK, BLOCK // together, together)
    return panels.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8).flatten()


def _pack_blocks(blocks: Blocks) -> Tensor:
    data = F.pad(blocks.data, (0, 0, 0, 0, 0, -blocks.data.shape[0] % UNIT))
    panels = data.view(-1, PANEL, *data.shape[1:]).transpose(1, 2)  # [panels, blocks, 16 rows, bytes]
    head = HEADS[blocks.kind]
    numbers = [panels[..., i : i + 2].flatten(2) for i in range(0, head, 2)]
    codes = panels[..., head:].unflatten(-1, (-1, 4)).transpose(2, 3).flatten(2)  # [groups, 16 rows, 4]
    packed = torch.cat([*numbers, codes], -1)
    if blocks.kind == "Q4_1":
        return packed.flatten()
    # Codes start at whole cache lines: in every other block the scales follow them.
    even, odd = packed.view(-1, 2, packed.shape[-1]).unbind(1)
    return torch.cat([even.roll(-2 * PANEL, -1), odd], -1).flatten()


def _take(data: Tensor, index: Tensor) -> Tensor:
    taken = data[index.clamp_min(0)]
    taken[index < 0] = 0
    return taken
