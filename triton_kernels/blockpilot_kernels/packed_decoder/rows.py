"""Rows taken out of a packed matrix again, for a matrix of its own; `formats` describes the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels.packed_decoder.formats import (
    BLOCK,
    BLOCK_BYTES,
    FORMATS,
    HEADS,
    PANEL,
    UNIT,
    Blocks,
    Matrix,
)
from blockpilot_kernels.packed_decoder.plan import Record

_AT_ONCE = 2048  # rows; what is needed beside the result is a few times their bytes


def packed_rows(blob: Tensor, record: Record, index: Tensor) -> Matrix:
    """Rows of a matrix that `Weights.linear` packed, in the order of `index`, without its bias.

    Args:
        blob: the bytes that the record points into, uint8. index: [R] int64.

    Returns:
        [R, K]: blocks with exactly the stored bytes, or floats in the dtype they are stored in.

    Raises:
        ValueError: an index that is not int64 [R], or rows that the matrix does not have.
    """
    _, code, rows, columns, offset, _ = record
    if index.dtype != torch.int64 or index.ndim != 1:
        raise ValueError(f"index: expected int64 [R], got {index.dtype} {list(index.shape)}")
    if outside := index[(index < 0) | (index >= rows)].tolist():
        raise ValueError(f"index: expected rows of 0 to {rows - 1}, got {outside[:5]}")
    kind, panels, blocks = FORMATS[code], -(-rows // UNIT) * (UNIT // PANEL), -(-columns // BLOCK)
    size = panels * blocks * BLOCK_BYTES[kind]
    data = blob[offset : offset + size].view(panels, blocks, BLOCK_BYTES[kind])
    parts = [_rows(kind, data, part) for part in index.split(_AT_ONCE)]
    taken = torch.cat(parts)
    return Blocks(kind, taken) if kind in HEADS else taken.flatten(1)[:, :columns].contiguous()


def _rows(kind: str, data: Tensor, index: Tensor) -> Tensor:
    """[R, blocks, bytes of a block] uint8, or [R, blocks, 32] floats."""
    panel, lane = index // PANEL, index % PANEL
    if kind not in HEADS:
        dtype = torch.float32 if kind == "F32" else torch.bfloat16
        values = data.view(dtype).unflatten(-1, (-1, PANEL, 4 // dtype.itemsize))
        return values[panel, :, :, lane].flatten(2)
    head = HEADS[kind] * PANEL
    before = _block_rows(data[..., :head], data[..., head:], panel, lane)
    if kind == "Q4_1":
        return before
    behind = _block_rows(data[..., -head:], data[..., :-head], panel, lane)
    even = (panel[:, None] * data.shape[1] + torch.arange(data.shape[1])) % 2 == 0
    return torch.where(even[..., None], behind, before)


def _block_rows(numbers: Tensor, codes: Tensor, panel: Tensor, lane: Tensor) -> Tensor:
    """[R, blocks, bytes] from [panels, blocks, …] numbers of 2 bytes and codes in groups of 4, 16 rows side by side."""
    parts = (numbers.unflatten(-1, (-1, PANEL, 2)), codes.unflatten(-1, (-1, PANEL, 4)))
    return torch.cat([part[panel, :, :, lane].flatten(2) for part in parts], -1)
