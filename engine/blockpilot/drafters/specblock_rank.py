"""SpecBlock's rank head: how far down its own list a slot expects the target's token (arXiv 2605.07243)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from blockpilot_kernels.draft_tree import largest

BRANCHES = (
    2,
    4,
    10,
    0,
)  # by class (rank 1, 2 to 4, 5 to 10, beyond): children of a slot; 0 ends the branching
MOST = 10
Product = Callable[[Tensor], Tensor]
_SEEN = 20  # logits that the features are made of


class RankHead:
    """Two products over a slot's normed hidden state and 15 features of its logits.

    Args:
        first, second: x → x·Wᵀ of `rank_head.0.weight` [256, H + 15] and `rank_head.2.weight` [4, 256].
    """

    def __init__(self, first: Product, second: Product, device: torch.device) -> None:
        self._first, self._second = first, second
        self._branches = torch.tensor(BRANCHES, device=device)

    def branches(self, normed: Tensor, logits: Tensor) -> Tensor:
        """normed [M, H], logits [M, V'], M as many as the products take → [M] int64 children of each slot."""
        hidden = F.silu(self._first(torch.cat([normed, rank_features(logits)], -1)))
        return self._branches[self._second(hidden).argmax(-1)]


def rank_features(logits: Tensor) -> Tensor:
    """[M, V'] → [M, 15]: log-probabilities of the 10 highest among the 20 highest, gaps of the logits 1–2, 1–3 and 1–5,
    the first one's probability, and the entropy of the 20."""
    top = logits.gather(1, largest(logits, min(_SEEN, logits.shape[1])))
    top = F.pad(top, (0, _SEEN - top.shape[1]), value=-torch.inf)
    logp = top - top.logsumexp(-1, keepdim=True)
    p = logp.exp()
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1, keepdim=True)
    # A head of fewer than 10 ids has no more; what is not there is as unlikely as float32 tells.
    known = torch.cat([logp[:, :10], top[:, :1] - top[:, [1, 2, 4]]], -1).clamp(-1e4, 1e4)
    return torch.cat([known, p[:, :1], entropy], -1)
