"""Grouped-query block attention in plain PyTorch, in fixed tiles.

Queries run in tiles of 16 (query, head) rows of one slot, keys in chunks of 64 at fixed positions, and the chunks are
summed in order of position. A chunk that is masked for a row adds an exact zero, so neither the cache bound nor
the rows beside it change its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot_kernels.tiled_linear.reference import TILE

KV_CHUNK = 64
SPAN = 64  # queries of one program of the Triton kernel
ENTRIES = 8  # with places of their own, taken at once: their keys and values are copied for each


@dataclass(frozen=True)
class AttentionTiles:
    """Where each packed row's heads sit in tiles of 16 query rows of one slot.

    Attributes:
        slots: [n_slots] cache slots, one per slot with rows, or per row of a pass with trees.
        slot_index: [T] index into `slots` for each tile.
        gather: [T, 16] index into the N·G (row, head-in-group) queries; N·G marks padding.
        row: [T, 16] packed row of each query; N marks padding.
        scatter: [N·G] flat tile position of each query; T·16 where a packed row is padding.
        spans: [P, 3] int32, every query in pieces of at most 64, whole rows of one slot: slot, first query, number of
            queries. Padding rows are in pieces of slot −1.
    """

    slots: Tensor
    slot_index: Tensor
    gather: Tensor
    row: Tensor
    scatter: Tensor
    spans: Tensor

    def parts(self, entries: int) -> list[AttentionTiles]:
        """The same in parts of that many `slots`, which have equally many tiles.

        `scatter` and `spans` stay the whole's.
        """
        each = len(self.slot_index) // len(self.slots)
        found = []
        for at in range(0, len(self.slots), entries):
            tiles = slice(at * each, (at + entries) * each)
            index = self.slot_index[tiles] - at
            part = (self.slots[at : at + entries], index, self.gather[tiles], self.row[tiles])
            found.append(AttentionTiles(*part, self.scatter, self.spans))
        return found

    @classmethod
    def build(
        cls,
        slots: Sequence[int],
        counts: Sequence[int],
        padded: int,
        groups: int,
        *,
        apart: bool = False,
    ) -> AttentionTiles:
        """Tiles for `counts[i]` consecutive packed rows of `slots[i]`, `padded` packed rows in all.

        apart: each row is an entry of its own in `slots`, as rows of trees are.
        """
        entries = [
            (s, 1 if apart else c)
            for s, c in zip(slots, counts, strict=True)
            for _ in range(c if apart else 1)
        ]
        tile_slot, gather, at = [], [], 0
        for i, (_, count) in enumerate(entries):
            queries = list(range(at, at + count * groups))
            for t in range(0, len(queries), TILE):
                tile = queries[t : t + TILE]
                tile_slot.append(i)
                gather.append(tile + [padded * groups] * (TILE - len(tile)))
            at += count * groups
        index = torch.tensor(gather, dtype=torch.long).view(-1, TILE)
        scatter = torch.full((padded * groups + 1,), index.numel())
        scatter[index.flatten()] = torch.arange(index.numel())
        row, back = index // groups, scatter[:-1].clone()
        where, entry = (torch.tensor(t, dtype=torch.long) for t in ([s for s, _ in entries], tile_slot))
        return cls(where, entry, index, row, back, _spans(slots, counts, padded, groups))

    def to(self, device: torch.device) -> AttentionTiles:
        """The same tiles on `device`."""
        return AttentionTiles(*(getattr(self, f).to(device) for f in self.__dataclass_fields__))


def _spans(slots: Sequence[int], counts: Sequence[int], padded: int, groups: int) -> Tensor:
    spans, at, most = [], 0, SPAN // groups * groups or SPAN
    for slot, count in zip((*slots, -1), (*counts, padded - sum(counts)), strict=True):
        end = at + count * groups
        spans += [[slot, first, min(most, end - first)] for first in range(at, end, most)]
        at = end
    return torch.tensor(spans, dtype=torch.int32).view(-1, 3)


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bad: Tensor,
    tiles: AttentionTiles,
    position: Tensor,
    extent: Tensor,
    bound: int,
    *,
    causal: bool,
    window: int | None = None,
    path: Tensor | None = None,
) -> Tensor:
    """See `blockpilot_kernels.block_attention.block_attention`."""
    n, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    parts: Iterable[tuple[AttentionTiles, Tensor | None]] = [(tiles, None)]
    if path is not None:
        places = _along(path, position, len(tiles.slots), bound)
        parts = zip(tiles.parts(ENTRIES), places.split(ENTRIES), strict=True)
    done = []
    for part, found in parts:
        k, v, seen, broken = _load(k_cache, v_cache, bad, part, extent, bound, found)
        rows = torch.cat([position, position.new_zeros(1)])[part.row]  # [T, 16]
        seen = _visible(seen, rows, bound, causal, window)
        q_tiles = _gather_queries(q, part, kv_heads)  # [Hkv, T, 16, D]
        done.append(_attend(q_tiles, k, v, seen, seen & broken[:, None], bound // KV_CHUNK, dim**-0.5))
    out = torch.cat(done, 1)
    flat = torch.cat([out.flatten(1, 2), out.new_zeros(kv_heads, 1, dim)], 1)
    return flat[:, tiles.scatter].view(kv_heads, n, heads // kv_heads, dim).transpose(0, 1).reshape(n, -1)


def _along(path: Tensor, position: Tensor, count: int, bound: int) -> Tensor:
    """Places of the keys at every position for the first `count` rows, [count, bound]."""
    at = torch.arange(bound, device=path.device)
    depth = at - path[:count, :1]
    inside = (depth >= 0) & (at <= position[:count, None])
    return torch.where(inside, path[:count].gather(1, depth.clamp(0, path.shape[1] - 1)), at)


def _load(
    k_cache: Tensor,
    v_cache: Tensor,
    bad: Tensor,
    tiles: AttentionTiles,
    extent: Tensor,
    bound: int,
    places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [Hkv, T, bound, D] with unreadable ones zeroed, written and bad masks [T, bound]."""
    slots = tiles.slots
    if places is None:
        k, v = k_cache[slots, :, :bound].float(), v_cache[slots, :, :bound].float()  # [n, Hkv, bound, D]
        broken = bad[slots, :bound]
    else:
        at = (slots[:, None], slice(None), places)
        k, v = k_cache[at].transpose(1, 2).float(), v_cache[at].transpose(1, 2).float()
        broken = bad[slots[:, None], places]
    written = torch.arange(bound, device=k.device) < extent[slots, None]
    hidden = (~written | broken)[:, None, :, None]
    k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    if len(slots) == 1:  # every tile reads the same keys: share them
        count = len(tiles.slot_index)
        expand = lambda x: x.transpose(0, 1).expand(-1, count, -1, -1)  # noqa: E731
        return expand(k), expand(v), written.expand(count, -1), broken.expand(count, -1)
    i = tiles.slot_index
    return k[i].transpose(0, 1), v[i].transpose(0, 1), written[i], broken[i]


def _visible(written: Tensor, rows: Tensor, bound: int, causal: bool, window: int | None) -> Tensor:
    """[T, 16, bound] bool: which keys each query row may see."""
    key = torch.arange(bound, device=rows.device)
    seen = written[:, None, :]
    if causal:
        seen = seen & (key <= rows[..., None])
    if window is not None:
        seen = seen & (rows[..., None] - key < window) & (key - rows[..., None] < window)
    return seen.expand(-1, rows.shape[1], -1)


def _gather_queries(q: Tensor, tiles: AttentionTiles, kv_heads: int) -> Tensor:
    n, heads, dim = q.shape
    by_head = q.view(n, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    return torch.cat([by_head, by_head.new_zeros(kv_heads, 1, dim)], 1)[:, tiles.gather]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, broken: Tensor, chunks: int, scale: float
) -> Tensor:
    """q [Hkv, T, 16, D], k and v [Hkv, T, bound, D], seen [T, 16, bound] → [Hkv, T, 16, D]."""
    heads, tiles, rows, dim = q.shape
    split = (heads, tiles, chunks, KV_CHUNK, dim)
    qc = q[:, :, None].expand(-1, -1, chunks, -1, -1).reshape(-1, rows, dim)
    scores = torch.bmm(qc, k.reshape(split).flatten(0, 2).transpose(1, 2))  # [Hkv·T·chunks, 16, 64]
    scores = scores.view(heads, tiles, chunks, rows, KV_CHUNK) * scale
    by_chunk = lambda m: m.unflatten(-1, (chunks, KV_CHUNK)).transpose(1, 2)  # noqa: E731
    scores = scores.masked_fill(~by_chunk(seen), float("-inf")).masked_fill(by_chunk(broken), float("nan"))
    top = scores.amax((2, 4), keepdim=True)
    p = torch.exp(scores - top.masked_fill(top == float("-inf"), 0))
    weighted = torch.bmm(p.flatten(0, 2), v.reshape(split).flatten(0, 2)).view(
        heads, tiles, chunks, rows, dim
    )
    mass = p.sum(-1)
    total, out = mass[:, :, 0], weighted[:, :, 0]
    for c in range(1, chunks):
        total, out = total + mass[:, :, c], out + weighted[:, :, c]
    return out / total[..., None]
