"""EAGLE-3 requests driven through `run_step`, and what the drafter says in each pass."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.drafters.rounds import Rounds

DTYPES = [torch.float32, torch.bfloat16]


class Watched(Rounds):
    """Rounds that keep, of the one slot there is, what every pass says: `said[step]` is [depths, V'] logits."""

    def __init__(self, *pair: Any, **options: Any) -> None:
        super().__init__(*pair, **options)
        self.said: list[Tensor] = []
        self.features: list[Tensor] = []

    def start(self, slot: int, prompt: Any, **request: Any) -> None:
        with torch.inference_mode():
            self.features = [self.target.prefill(slot, prompt)[1]]
        self.said = []
        super().start(slot, prompt, **request)

    def step(self, slots: Any = None) -> None:
        kept: list[Tensor] = []
        run, commit = self.drafter._run, self.drafter.commit

        def watched_run(*given: Any, **options: Any) -> Any:
            hidden, logits = run(*given, **options)
            kept.append(logits[:1].clone())
            return hidden, logits

        def watched_commit(state: Any, plan: Any, features: Tensor) -> None:
            self.features.append(features[: int(state.count[0])].clone())
            commit(state, plan, features)

        with patch.multiple(self.drafter, _run=watched_run, commit=watched_commit):
            super().step(slots)
        self.said.append(torch.cat(kept) if kept else torch.zeros(0))


REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([5, *range(6, 20)], {"width": 4, "tree": 0, "temperature": 0.0}),
    ([8, 9], {"width": 6, "tree": 0, "temperature": 1.0, "seed": 5}),
    ([7], {"width": 5, "tree": 0, "temperature": 0.7, "seed": 2}),
    ([6, 7, 9], {"width": 3, "tree": 0, "temperature": 0.9, "seed": 3, "stops": (3,), "free_from": 12}),
    ([4] * 9, {"width": 1, "tree": 0, "temperature": 0.0}),
]
TREES = [{"tree": 4}, {"tree": 16}, {"tree": 0}, {"tree": 9}, {"tree": 0}]


CUT = tuple(3.0 + n for n in range(16))  # costs by which a node must be of some use


def run(pair: Any, requests: Any, budget: int, cost: tuple[float, ...] | None = None) -> Rounds:
    """All requests in one batch."""
    rounds = Rounds(*pair, widest=16)
    rounds.cost = cost
    for slot, (prompt, asked) in enumerate(requests):
        rounds.start(slot, prompt, budget=budget, **asked)
    while not rounds.state.done.all():
        rounds.step()
    return rounds
