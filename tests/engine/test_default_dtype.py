"""A default dtype of float64, which a program around the engine may have set, changes no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockpilot import LLM, Output, SamplingParams
from blockpilot_kernels.dispatch import forced
from tests.eagle3 import save_eagle3_drafter
from tests.engine.pair import prompts, write_tokenizer
from tests.implementations import default_dtype, require
from tests.specblock import save_specblock_drafter
from tests.tiny import save_drafter, save_target

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.2, top_k=20, top_p=0.95, min_p=0.01, seed=3, logprobs=3)
DRAFTERS = {
    "plain": None,
    "dflash": save_drafter,
    "eagle3": save_eagle3_drafter,
    "specblock": save_specblock_drafter,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    root = tmp_path_factory.mktemp("folders")
    target = save_target(root / "target", vocab=48, eos_token_id=1)
    write_tokenizer(target)
    made = {name: save and save(root / name, target) for name, save in DRAFTERS.items()}
    return {"target": target, **made}


def answers(folders: dict[str, Path | None], kind: str) -> list[Output]:
    """Of chains, trees and plain requests, greedy and sampled."""
    width = 1 if folders[kind] is None else 4
    asked = [replace(p, width=w) for p in (GREEDY, SAMPLED) for w in (width, 1)]
    if width > 1:
        asked += [replace(p, width=width, tree=7) for p in (GREEDY, SAMPLED)]
    llm = LLM(folders["target"], drafter=folders[kind], max_requests=3, max_length=64, dtype="float32")
    return llm.generate(prompts(len(asked), seed=4), asked)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_answers_are_the_same(folders, kind, backend):
    if backend == "cpp":
        require("cpp")
    with forced(backend):
        expected = answers(folders, kind)
        with default_dtype(torch.float64):
            found = answers(folders, kind)
    for one, other in zip(found, expected, strict=True):
        assert one.error is None
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        assert one.stats.step_tokens == other.stats.step_tokens
