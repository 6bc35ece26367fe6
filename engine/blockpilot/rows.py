"""Ragged rows of one step, laid out on the host: which slot and block column each packed row belongs to."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockpilot_kernels.block_attention import KV_CHUNK, AttentionTiles
from blockpilot_kernels.kv_compact import kv_compact
from blockpilot_kernels.tiled_linear import TILE


class Rows:
    """Σ counts packed rows, padded to a multiple of `tile` with rows of the dump slot.

    Attributes:
        slots, counts: host tuples; slot `slots[i]` owns `counts[i]` consecutive rows.
        total: Σ counts; padded: the same rounded up to a multiple of `tile`.
        slot, column: [padded] int64; a padding row has the dump slot and column 0. every: 0 … padded − 1.
        starts: first packed row of each slot, host tuple.
        kept: what others lay out once for these rows. A captured step reads it, so it must live as long as they.
    """

    def __init__(
        self,
        slots: tuple[int, ...],
        counts: tuple[int, ...],
        dump: int,
        device: torch.device,
        tile: int = TILE,
    ) -> None:
        if not slots or len(slots) != len(counts) or min(counts) < 1:
            raise ValueError(f"rows: expected slots with counts >= 1, got slots {slots}, counts {counts}")
        self.slots, self.counts, self.device = slots, counts, device
        self.total = sum(counts)
        self.padded = -(-self.total // tile) * tile
        pad = self.padded - self.total
        slot = [s for s, c in zip(slots, counts, strict=True) for _ in range(c)]
        column = [j for c in counts for j in range(c)]
        self.slot = torch.tensor(slot + [dump] * pad, device=device)
        self.column = torch.tensor(column + [0] * pad, device=device)
        self.every = torch.arange(self.padded, device=device)
        self.starts = tuple(sum(counts[:i]) for i in range(len(counts)))
        self._tiles: dict[tuple[int, bool], AttentionTiles] = {}
        self._places: dict[int, Tensor] = {}
        self.kept: dict[Hashable, Any] = {}

    def places(self, width: int) -> Tensor:
        """[padded] flat index of each row in a [slots, width] table."""
        if width not in self._places:
            self._places[width] = self.slot * width + self.column
        return self._places[width]

    def tiles(self, groups: int, *, apart: bool = False) -> AttentionTiles:
        """Attention tiles for `groups` query heads per KV head; apart: for trees, of one row each."""
        if (groups, apart) not in self._tiles:
            built = AttentionTiles.build(self.slots, self.counts, self.padded, groups, apart=apart)
            self._tiles[groups, apart] = built.to(self.device)
        return self._tiles[groups, apart]


@lru_cache(maxsize=512)
def make_rows(
    slots: tuple[int, ...], counts: tuple[int, ...], dump: int, device: torch.device, tile: int = TILE
) -> Rows:
    """Cached `Rows`: the same membership and widths give the same tensors."""
    return Rows(slots, counts, dump, device, tile)


def kv_bound(longest: int) -> int:
    """Bucketed number of key positions a pass looks at: a multiple of 64, at least `longest`."""
    return -(-longest // KV_CHUNK) * KV_CHUNK


class KVCache:
    """Static keys and values for `slots` slots plus a dump slot, which absent rows have and may write to.

    Layout [layer, slot, kv head, position, head dim]; `bad` [layer, slot, position] marks non-finite entries.
    Allocated once: its pointers never change.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        capacity: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, slots + 1, heads, kv_bound(capacity), dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.bad = torch.zeros(layers, slots + 1, shape[3], dtype=torch.bool, device=device)
        self.dump = slots

    @staticmethod
    def bytes_needed(layers: int, slots: int, heads: int, capacity: int, dim: int, dtype: torch.dtype) -> int:
        """Bytes of such a cache."""
        return 2 * layers * (slots + 1) * heads * kv_bound(capacity) * dim * dtype.itemsize

    def destination(self, slot: Tensor, position: Tensor, exists: Tensor) -> Tensor:
        """[N] flat places (slot, position) for `qk_rope_append`; −1, nowhere, for rows that do not exist."""
        return torch.where(exists, slot * self.k.shape[3] + position, -1)

    def compact(self, begin: Tensor, source: Tensor, count: Tensor) -> None:
        """See `Target.compact`."""
        kv_compact(self.k, self.v, self.bad, begin, source, count)
