"""Triton kernel and launcher of `draft_tree`: a program grows one slot's tree, node by node, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
LOWEST = tl.constexpr(-float("inf"))


@triton.jit
def draft_tree_kernel(
    SCORE, DEEPEST, BUDGET, COST, CANDIDATE, PARENT, DEPTH, COUNT, nodes, depths, width,
    NODES: tl.constexpr, STOP: tl.constexpr,
):  # fmt: skip
    """`tried` counts the candidates below a node that are in the tree; the next one of each is on offer."""
    r = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, NODES)
    budget, limit = tl.load(BUDGET + r), tl.minimum(tl.load(DEEPEST + r), depths)
    total = tl.where((j == 0) & (budget > 0), 0.0, LOWEST)
    depth, tried, candidate = (
        tl.zeros([NODES], tl.int32),
        tl.zeros([NODES], tl.int32),
        tl.zeros([NODES], tl.int32),
    )
    parent = tl.full([NODES], -1, tl.int32)
    count = tl.where(budget > 0, 1, 0)
    kept, expected = count, 1.0
    pace = 1.0 / tl.load(COST) if STOP else 0.0
    for n in range(1, nodes):
        m = (j < n) & (depth < limit) & (tried < width)
        step = tl.load(SCORE + (r * depths + depth) * width + tried, mask=m, other=LOWEST)
        offer = total + tl.where(step == step, step, LOWEST)
        best = tl.max(offer, 0)
        at = tl.min(tl.where(offer == best, j, NODES), 0)
        found = (best > LOWEST) & (n < budget)
        above, here = j == at, (j == n) & found
        candidate = tl.where(here, tl.sum(tl.where(above, tried, 0), 0), candidate)
        depth = tl.where(here, tl.sum(tl.where(above, depth, 0), 0) + 1, depth)
        parent = tl.where(here, at - 1, parent)
        total = tl.where(here, best, total)
        tried = tl.where(above & found, tried + 1, tried)
        count += tl.where(found, 1, 0)
        if STOP:
            expected += tl.exp(best)
            here_pace = expected / tl.load(COST + n)
            better = found & (here_pace > pace)
            kept, pace = tl.where(better, count, kept), tl.where(better, here_pace, pace)
    if STOP:
        count = kept
        candidate, depth = tl.where(j < kept, candidate, 0), tl.where(j < kept, depth, 0)
        parent = tl.where(j < kept, parent, -1)
    o, m = r * (nodes - 1) + j - 1, (j > 0) & (j < nodes)
    tl.store(CANDIDATE + o, candidate.to(tl.int64), mask=m)
    tl.store(PARENT + o, parent.to(tl.int64), mask=m)
    tl.store(DEPTH + o, depth.to(tl.int64), mask=m)
    tl.store(COUNT + r, count.to(tl.int64))


def draft_tree(
    score: Tensor, deepest: Tensor, budget: Tensor, nodes: int, cost: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `blockpilot_kernels.draft_tree.draft_tree`."""
    slots, depths, width = score.shape
    candidate, parent, depth = torch.empty((3, slots, nodes - 1), dtype=torch.int64, device=score.device)
    count = torch.empty_like(deepest, memory_format=torch.contiguous_format)
    if slots > 0:
        given = [t.contiguous() for t in (score, deepest, budget, score if cost is None else cost)]
        draft_tree_kernel[(slots,)](
            *given, candidate, parent, depth, count, nodes, depths, width,
            NODES=triton.next_power_of_2(nodes), STOP=cost is not None, **OPTIONS,
        )  # fmt: skip
    return candidate, parent, depth, count
