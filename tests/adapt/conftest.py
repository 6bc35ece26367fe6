"""A tiny pair that learns fast: updates after few tokens, as strong as they get, whether they gain or not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.adapt import adapter, feedback, learner
from blockpilot.adapt.bandit import Choice
from blockpilot.adapt.learner import Learner, Outcome
from blockpilot_kernels.dispatch import forced
from tests.drafters.conftest import eagle3_for, implementation, load, pair_for, specblock_for, targets
from tests.eagle3 import save_eagle3_drafter
from tests.engine.pair import write_tokenizer
from tests.implementations import require
from tests.specblock import save_specblock_drafter
from tests.tiny import save_target

__all__ = ["eagle3_for", "implementation", "load", "pair_for", "specblock_for", "targets"]
VOCAB = 48
IDS = [0, 1, 3, *range(4, 48, 2), 9, 11]


@pytest.fixture(params=["reference", "cpp"])
def backend(request):
    if request.param == "cpp":
        require("cpp")
    with forced(request.param):
        yield request.param


class Learning:
    """Small numbers in place of those that serving has, and the pair that they are for."""

    def __init__(self, pairs: dict[str, tuple[Path, Path]], patch: pytest.MonkeyPatch) -> None:
        self._pairs, self._patch = pairs, patch
        self.pair = pairs["eagle3"]
        for module, name, value in (
            (feedback, "SPAN", 12),
            (feedback, "SHORTEST", 4),
            (adapter, "SPAN", 12),
            (adapter, "ROWS", 60),
            (adapter, "ROUNDS", 8),
            (adapter, "GUESS", 2),
        ):
            patch.setattr(module, name, value)
        patch.setattr(learner, "RATES", {"head": 0.05, "full": 0.05})
        patch.setattr(learner, "STEPS", 8)

    def use(self, kind: str) -> None:
        """The pair with a drafter of that kind."""
        self.pair = self._pairs[kind]

    def force(self, llm: Any, *arms: str, keep: bool = True) -> None:
        """These arms in turn at every decision; `keep`: as if each gained."""
        turn = cycle(arms)
        llm.adapter.bandit.decide = lambda *_: Choice(next(turn), explores=False)
        if not keep:
            return
        honest = Learner.update

        def gained(*given: Any) -> Any:
            outcome = yield from honest(*given)
            return Outcome(max(outcome.gain, 0.01), outcome.error)

        self._patch.setattr(Learner, "update", gained)

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
        return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="session")
def learning_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("learning")
    target = save_target(folder / "target", vocab=VOCAB, eos_token_id=1)
    write_tokenizer(target)
    eagle3 = save_eagle3_drafter(folder / "eagle3", target, sorted(IDS), block_size=6, seed=4)
    specblock = save_specblock_drafter(folder / "specblock", target, sorted(IDS))
    return {"eagle3": (target, eagle3), "specblock": (target, specblock)}


@pytest.fixture
def learning(
    learning_pairs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Learning]:
    yield Learning(learning_pairs, monkeypatch)
