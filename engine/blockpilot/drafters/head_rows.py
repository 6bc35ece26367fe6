"""The draft rows that guess a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.rows import Rows


@dataclass(frozen=True)
class HeadRows:
    """The draft rows that guess a token (columns ≥ 1), padded to whole tiles with the first of them.

    Attributes:
        row: [M] index into the draft rows. slot, column: [M] where the guess goes; padding has the dump slot.
    """

    row: Tensor
    slot: Tensor
    column: Tensor

    @classmethod
    def of(cls, rows: Rows, dump: int, tile: int) -> HeadRows:
        """Head rows of `rows`, every slot of which is at least 2 wide, padded to a multiple of `tile`."""
        index = [s + j for s, c in zip(rows.starts, rows.counts, strict=True) for j in range(1, c)]
        slot = [s for s, c in zip(rows.slots, rows.counts, strict=True) for _ in range(1, c)]
        column = [j for c in rows.counts for j in range(1, c)]
        pad = -len(index) % tile
        padded = (index + index[:1] * pad, slot + [dump] * pad, column + [1] * pad)
        return cls(*(torch.tensor(x, device=rows.device) for x in padded))


def head_rows(rows: Rows, dump: int, tile: int) -> HeadRows:
    """`HeadRows.of` these, kept with them."""
    key = ("head", dump, tile)
    if key not in rows.kept:
        rows.kept[key] = HeadRows.of(rows, dump, tile)
    found: HeadRows = rows.kept[key]
    return found
