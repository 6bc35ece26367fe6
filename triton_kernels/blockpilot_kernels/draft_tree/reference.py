"""`draft_tree` and `largest` in plain PyTorch: the meaning of the ops. No value is read on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_tree(
    score: Tensor, deepest: Tensor, budget: Tensor, nodes: int, cost: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `blockpilot_kernels.draft_tree.draft_tree`."""
    slots, depths, width = score.shape
    known = torch.where(score.isnan(), -torch.inf, score)
    wall = torch.nn.functional.pad(known, (0, 1, 0, 1), value=-torch.inf).flatten(1)
    total = torch.full((slots, nodes), -torch.inf, dtype=score.dtype, device=score.device)
    total[:, 0] = torch.where(budget > 0, 0.0, -torch.inf)
    depth, tried = (torch.zeros(slots, nodes, dtype=torch.long, device=score.device) for _ in range(2))
    candidate, parent = torch.zeros_like(depth), torch.full_like(depth, -1)
    limit = torch.minimum(deepest, torch.full_like(deepest, depths))[:, None]
    count = (budget > 0).long()
    for n in range(1, nodes):
        row = torch.where(depth < limit, depth, depths)  # the last row and column are a wall
        offer = total + wall.gather(1, row * (width + 1) + tried)
        best, at = offer.max(1, keepdim=True)  # of equals the first
        found = (best > -torch.inf) & (n < budget[:, None])
        total[:, n : n + 1] = torch.where(found, best, -torch.inf)
        candidate[:, n : n + 1] = torch.where(found, tried.gather(1, at), 0)
        depth[:, n : n + 1] = torch.where(found, depth.gather(1, at) + 1, 0)
        parent[:, n : n + 1] = torch.where(found, at - 1, -1)
        tried.scatter_add_(1, at, found.long())
        count = count + found[:, 0]
    if cost is not None:
        count = worthwhile(total[:, 1:], count, cost)
    kept = torch.arange(1, nodes, device=score.device) < count[:, None]
    made = ((candidate, 0), (parent, -1), (depth, 0))
    drafted = [torch.where(kept, x[:, 1:], empty) for x, empty in made]
    return drafted[0], drafted[1], drafted[2], count


def worthwhile(total: Tensor, count: Tensor, cost: Tensor) -> Tensor:
    """See `blockpilot_kernels.draft_tree.worthwhile`."""
    pace = torch.nn.functional.pad(total.exp(), (1, 0), value=1.0).cumsum(1) / cost
    column = torch.arange(len(cost), device=cost.device)
    best = torch.where(column < count[:, None], pace, -torch.inf).argmax(1) + 1  # of equals the first
    return torch.minimum(best, count)


def largest(scores: Tensor, count: int) -> Tensor:
    """See `blockpilot_kernels.draft_tree.largest`."""
    whole = (scores.contiguous() + 0.0).view(torch.int32).long()  # + 0.0 makes −0 and 0 one value
    order = whole ^ ((whole >> 63) & 0x7FFFFFFF)  # rises with the score; 64 bits make every key another
    last = scores.shape[1] - 1
    column = torch.arange(last, -1, -1, device=scores.device)
    return last - ((order * 2**32 + column).topk(count).values & 0xFFFFFFFF)
