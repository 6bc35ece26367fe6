"""A DFlash drafter and its target on the Triton kernels, which run its blocks in both directions and in windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from tests.drafters.rounds import SLIDING, Rounds, load_pair
from tests.kernels.conftest import missing

PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13], [3, 4], [20])
WIDTHS = (4, 6, 2)


@pytest.fixture(autouse=True)
def available() -> None:
    if reason := missing("triton"):
        pytest.skip(f"triton: {reason}")


def drafted(folders: tuple[Path, Path], backend: str, slots: tuple[int, ...], dtype: torch.dtype) -> Rounds:
    """Two rounds of the requests of `slots` together."""
    with dispatch.forced(backend):
        rounds = Rounds(*load_pair(*folders, slots=3, dtype=dtype))
        for slot in slots:
            rounds.start(slot, PROMPTS[slot], width=WIDTHS[slot], budget=30)
        for _ in range(2):
            rounds.step(slots)
    return rounds


def logits(rounds: Rounds, slot: int) -> Tensor:
    return torch.cat(rounds.logits[slot])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_drafts_are_the_references(drafter_for, family):
    folders = drafter_for(family, **SLIDING)
    ours = drafted(folders, "triton", (0, 1, 2), torch.float32)
    expected = drafted(folders, "reference", (0, 1, 2), torch.float32)
    for slot in range(3):
        assert ours.blocks[slot] == expected.blocks[slot]
        torch.testing.assert_close(logits(ours, slot), logits(expected, slot), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_logits_do_not_depend_on_the_batch(drafter_for, dtype):
    folders = drafter_for("qwen3", **SLIDING)
    together = drafted(folders, "triton", (0, 1, 2), dtype)
    for slot in range(3):
        alone = drafted(folders, "triton", (slot,), dtype)
        assert alone.blocks[slot] == together.blocks[slot]
        assert torch.equal(logits(alone, slot), logits(together, slot))
