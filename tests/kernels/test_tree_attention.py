"""Attention of trees: a node has the bits that it has where its path lies side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from blockpilot_kernels.block_attention import KV_CHUNK, AttentionTiles, block_attention
from tests.kernels.attention import SLOTS, Cache, Sizes, attend
from tests.kernels.backends import Backend
from tests.kernels.conftest import forced_backend

CHUNK = 512  # keys of one program of the Triton kernel
TREES = ((-1, 0, 0, 1, 3, 0, 4, 2), (-1,), (-1, 0, 1, 1))  # parent of every node, the anchor first


@pytest.fixture(params=["reference", "triton"])
def op(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that has the op by itself."""
    yield from forced_backend(request.param)


def lineage(parent: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*lineage(parent, parent[node]), node]


def spoilt(sizes: Sizes, dtype: torch.dtype, ends: dict[int, int]) -> Cache:
    """A cache with NaN wherever nothing is written."""
    k, v, bad = sizes.cache(dtype)
    for slot in range(SLOTS + 1):
        k[slot, :, ends.get(slot, 0) :] = v[slot, :, ends.get(slot, 0) :] = float("nan")
        bad[slot, ends.get(slot, 0) :] = True
    return k, v, bad


def attend_trees(
    op: Backend, q: Tensor, cache: Cache, slots: Sequence[int], anchors: Sequence[int], bound: int, **options
) -> Tensor:
    """Trees of `TREES` behind the anchors, in as few columns of a path as they need. On the CPU."""
    counts = [len(t) for t in TREES]
    paths = [lineage(t, n) for t in TREES for n in range(len(t))]
    starts = [a for a, count in zip(anchors, counts, strict=True) for _ in range(count)]
    total, padded = sum(counts), 16
    x = torch.full((padded, *q.shape[1:]), float("nan"))
    x[:total] = q
    path = torch.zeros(padded, max(map(len, paths)), dtype=torch.long)
    position, extent = torch.zeros(padded, dtype=torch.long), torch.zeros(SLOTS + 1, dtype=torch.long)
    for row, (nodes, anchor) in enumerate(zip(paths, starts, strict=True)):
        path[row] = anchor
        path[row, : len(nodes)] += torch.tensor(nodes)
        position[row] = anchor + len(nodes) - 1
    for slot, anchor, count in zip(slots, anchors, counts, strict=True):
        extent[slot] = anchor + count
    groups = q.shape[1] // cache[0].shape[1]
    tiles = AttentionTiles.build(slots, counts, padded, groups, apart=True).to(op.device)
    given = [t.to(op.device) for t in (x, *cache)]
    where = [t.to(op.device) for t in (position, extent)]
    return block_attention(
        *given, tiles, *where, bound, causal=True, path=path.to(op.device), **options
    ).cpu()


def side_by_side(cache: Cache, slot: int, anchor: int, nodes: Sequence[int]) -> Cache:
    """The cache with the path's keys at their positions."""
    moved = tuple(t.clone() for t in cache)
    for t, old in zip(moved, cache, strict=True):
        places = t[slot].movedim(-1 if t.dim() == 2 else -2, 0)
        found = old[slot].movedim(-1 if t.dim() == 2 else -2, 0)
        places[anchor : anchor + len(nodes)] = found[torch.tensor(nodes) + anchor]
    return moved


def check(
    op: Backend, sizes: Sizes, dtype: torch.dtype, anchors: Sequence[int], bound: int, **options
) -> None:
    slots = (2, 0, 3)
    ends = {s: a + len(t) for s, a, t in zip(slots, anchors, TREES, strict=True)}
    cache = spoilt(sizes, dtype, ends)
    q = sizes.queries(sum(map(len, TREES)))
    out = attend_trees(op, q, cache, slots, anchors, bound, **options)
    row = 0
    for slot, anchor, tree in zip(slots, anchors, TREES, strict=True):
        for node in range(len(tree)):
            nodes = lineage(tree, node)
            alone = side_by_side(cache, slot, anchor, nodes)
            at = anchor + len(nodes) - 1
            least = -(-(at + 1) // KV_CHUNK) * KV_CHUNK
            expected = attend(
                op, q[row : row + 1], alone, (slot,), (1,), (at,), bound=least, causal=True, **options
            )
            assert torch.equal(out[row], expected[0]), (slot, node)
            row += 1
    assert torch.isfinite(out[:row]).all()
    assert torch.equal(out[row:], torch.zeros_like(out[row:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_every_node_is_its_path_alone(op, window, dtype, poisoned):
    check(op, Sizes(), dtype, (61, 0, 126), 4 * KV_CHUNK, window=window)


@pytest.mark.parametrize("sizes", [Sizes(4, 4, 8), Sizes(5, 1, 24)])
def test_shapes(op, sizes, poisoned):
    check(op, sizes, torch.float32, (70, 1, 64), 2 * KV_CHUNK)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("anchors", [(CHUNK - 2, 5, CHUNK - 1), (CHUNK, 2 * CHUNK - 3, CHUNK + 100)])
def test_anchors_around_the_ends_of_chunks(anchors, window, poisoned):
    sizes = Sizes(heads=4, kv_heads=1, dim=16, length=3 * CHUNK)
    for op in forced_backend("triton"):
        check(op, sizes, torch.bfloat16, anchors, sizes.length, window=window)


def test_more_queries_than_a_program_takes(monkeypatch, poisoned):
    """Rows stay whole in the spans, which are done one after the other where scratch has room for one."""
    kernel = pytest.importorskip("blockpilot_kernels.block_attention.kernel")
    assert AttentionTiles.build((1,), (14,), 16, 5).spans.tolist() == [[1, 0, 60], [1, 60, 10], [-1, 70, 10]]
    monkeypatch.setattr(kernel, "SCRATCH", 1)
    sizes = Sizes(heads=11, kv_heads=1, dim=16, length=2 * CHUNK)
    for op in forced_backend("triton"):
        check(op, sizes, torch.float32, (CHUNK - 3, 9, CHUNK), sizes.length)


def test_a_node_that_is_not_finite_reaches_its_descendants_alone(op, poisoned):
    sizes, slots, anchors = Sizes(), (2, 0, 3), (70, 9, 30)
    ends = {s: a + len(t) for s, a, t in zip(slots, anchors, TREES, strict=True)}
    cache = spoilt(sizes, torch.float32, ends)
    q = sizes.queries(sum(map(len, TREES)))
    clean = attend_trees(op, q, cache, slots, anchors, 4 * KV_CHUNK)
    cache[1][2, 1, 71, 0] = float("inf")
    cache[2][2, 71] = True
    out = attend_trees(op, q, cache, slots, anchors, 4 * KV_CHUNK)
    harmed = torch.tensor([1 in lineage(TREES[0], n) for n in range(len(TREES[0]))] + [False] * 5)
    assert torch.isnan(out[:13][harmed]).all()
    assert torch.equal(out[:13][~harmed], clean[:13][~harmed])


def test_what_is_refused(op):
    sizes = Sizes()
    k, _, bad = (t.to(op.device) for t in sizes.cache())
    q, position = sizes.queries(16).to(op.device), torch.zeros(16, dtype=torch.long, device=op.device)
    extent = torch.ones(SLOTS + 1, dtype=torch.long, device=op.device)

    def call(q: Tensor, k: Tensor, path: Tensor, causal: bool = True) -> None:
        tiles = AttentionTiles.build((1,), (16,), 16, q.shape[1] // k.shape[1], apart=True).to(op.device)
        block_attention(q, k, k, bad, tiles, position, extent, 64, causal=causal, path=path)

    with pytest.raises(ValueError, match=r"path: expected int64 \[16, 3\].*got int64 \[9, 3\]"):
        call(q, k, position[:9, None].expand(-1, 3))
    with pytest.raises(ValueError, match="causal: expected True with a path, got False"):
        call(q, k, position[:, None], causal=False)
    with pytest.raises(ValueError, match="at most 64 heads a KV head with a path, got 65"):
        call(q[:, :1].expand(-1, 65, -1), k[:, :1].contiguous(), position[:, None])
