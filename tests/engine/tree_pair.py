"""A drafter of random trees, in which the target's own next tokens go as deep as a script says."""

from __future__ import annotations

import torch

from blockpilot.drafters import Proposal
from tests.engine.pair import VOCAB, Script, ScriptedDrafter, cycling

LARGEST = 16


class TreeDrafter(ScriptedDrafter):
    """Trees of as many nodes as asked, right for `script(slot, call) mod width` tokens; chains where none is asked.

    `shaped` collects (budget, depth of the deepest node) of every tree.
    """

    largest_tree = LARGEST

    def __init__(self, script: Script = cycling, seed: int = 0) -> None:
        super().__init__(script)
        self.random = torch.Generator().manual_seed(seed)
        self.shaped: set[tuple[int, int]] = set()

    def propose(self, state, plan, noise) -> Proposal:
        chain = super().propose(state, plan, noise)
        if plan.trees is None:
            return chain
        tokens, parent, depth = (x.clone() for x in (chain.tokens, chain.parent, chain.depth))
        nodes = torch.where(state.done, 0, state.effective)
        for slot, width, tree in zip(plan.slots, plan.widths, plan.trees, strict=True):
            if tree and state.effective[slot]:
                made = self._grow(chain.tokens[slot, : width - 1].tolist(), int(state.effective[slot]), tree)
                for whole, part in zip((tokens, parent, depth), made, strict=True):
                    whole[slot] = self.poison
                    whole[slot, : len(part)] = torch.tensor(part, dtype=torch.long)
                nodes[slot] = len(made[0]) + 1
                self.shaped.add((tree, max(made[2], default=0)))
        return Proposal(tokens, parent, depth, nodes)

    def _grow(self, chain: list[int], width: int, budget: int) -> tuple[list[int], list[int], list[int]]:
        """The scripted chain with other branches between its nodes, none of which is right where the chain is."""
        tokens: list[int] = []
        parent: list[int] = []
        depth: list[int] = []
        spine, chain = [-1], chain[: width - 1]
        while len(tokens) < budget - 1 and width > 1:
            wanted, left = len(chain) - len(spine) + 1, budget - 1 - len(tokens)
            grow = wanted > 0 and (left <= wanted or self._below(2) == 0)
            above = spine[-1] if grow else [-1, *range(len(tokens))][self._below(len(tokens) + 1)]
            at = 0 if above < 0 else depth[above]
            if at >= width - 1:
                continue
            taken = {t for t, p in zip(tokens, parent, strict=True) if p == above}
            if above in spine and spine.index(above) < len(chain):
                taken.add(chain[spine.index(above)])
            tokens.append(chain[len(spine) - 1] if grow else self._other(taken))
            parent.append(above)
            depth.append(at + 1)
            if grow:
                spine.append(len(tokens) - 1)
        return tokens, parent, depth

    def _other(self, taken: set[int]) -> int:
        return next(t for t in torch.randperm(VOCAB, generator=self.random).tolist() if t not in taken)

    def _below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.random))
