"""Engines that adapt, and their drafters' weights."""

from __future__ import annotations

import torch

from blockpilot import LLM, SamplingParams
from tests.adapt.test_weights import everything

GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)


def opened(learning, adapt=True, **options) -> LLM:
    options = {"max_length": 96, "max_requests": 3, **options}
    return LLM(learning.pair[0], drafter=learning.pair[1], adapt=adapt, **options)


def weights(llm: LLM) -> list[torch.Tensor]:
    return [t.clone() for t in everything(llm.drafter)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
