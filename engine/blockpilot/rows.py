"""Ragged rows of one step, laid out on the host: which slot and block column each packed row belongs to."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockpilot_kernels.block_attention import KV_CHUNK, AttentionTiles
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
        self._tiles: dict[int, AttentionTiles] = {}
        self._single: dict[int, AttentionTiles] = {}
        self._places: dict[int, Tensor] = {}
        self.kept: dict[Hashable, Any] = {}

    def places(self, width: int) -> Tensor:
        """[padded] flat index of each row in a [slots, width] table."""
        if width not in self._places:
            self._places[width] = self.slot * width + self.column
        return self._places[width]

    def tiles(self, groups: int) -> AttentionTiles:
        """Attention tiles for `groups` query heads per KV head."""
        if groups not in self._tiles:
            built = AttentionTiles.build(self.slots, self.counts, self.padded, groups)
            self._tiles[groups] = built.to(self.device)
        return self._tiles[groups]

    def single_tiles(self, groups: int) -> AttentionTiles:
        """The same with tiles of one row each, which is an entry of its own in `slots`."""
        if groups not in self._single:
            slots = [s for s, c in zip(self.slots, self.counts, strict=True) for _ in range(c)]
            built = AttentionTiles.build(slots, [1] * self.total, self.padded, groups)
            self._single[groups] = built.to(self.device)
        return self._single[groups]


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
    """Static keys and values for `slots` slots plus a dump slot that absent rows write to.

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

    def destination(self, slot: Tensor, position: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Flat indices for `write`: [N·Hkv] into (slot, head, position), [N] into (slot, position).

        Rows that do not exist go to position 0 of the dump slot.
        """
        _, _, heads, length, _ = self.k.shape
        slot = torch.where(exists, slot, self.dump)
        position = torch.where(exists, position, 0)
        head = torch.arange(heads, device=slot.device)
        return (
            (slot[:, None] * heads + head) * length + position[:, None]
        ).flatten(), slot * length + position

    def write(self, layer: int, to: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Store k, v [N, Hkv, D] float32 at `to` (from `destination`)."""
        dim = k.shape[-1]
        k, v = k.to(self.k.dtype), v.to(self.v.dtype)
        self.k[layer].view(-1, dim).index_copy_(0, to[0], k.reshape(-1, dim))
        self.v[layer].view(-1, dim).index_copy_(0, to[0], v.reshape(-1, dim))
        finite = torch.isfinite(k).all(-1).all(-1) & torch.isfinite(v).all(-1).all(-1)
        self.bad[layer].view(-1).index_copy_(0, to[1], ~finite)

    def move(self, slot: Tensor, before: Tensor, after: Tensor) -> None:
        """Copy what place `before` [N] of `slot` [N] holds to place `after`; every source is read first."""
        for held in (self.k.transpose(2, 3), self.v.transpose(2, 3), self.bad):
            held[:, slot, after] = held[:, slot, before]
