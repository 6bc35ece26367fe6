"""What is refused: prompts, parameters and engines that make no sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

import blockpilot.memory
from blockpilot import LLM, SamplingParams
from blockpilot.errors import MemoryLimitError
from tests.engine.pair import VOCAB, WIDEST, ScriptedDrafter, tiny_folder, tiny_llm

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(ScriptedDrafter(), max_requests=3)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token"),
        ([0, VOCAB], f"0..{VOCAB - 1}"),
        ([-1], f"0..{VOCAB - 1}"),
        ([3] * 192, "at most 191 tokens"),
        ([1.5], "list of token ids"),
        ([True], "list of token ids"),
        ([[1], [2]], "list of token ids"),
    ],
)
def test_prompts_that_cannot_be_served(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.submit(prompt, PARAMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-6}, "1e-05"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(17))}, "at most 16"),
        ({"logprobs": 21}, "logprobs"),
        ({"width": 0}, "width"),
    ],
)
def test_parameters_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PARAMS, **change)


def test_unknown_parameters_are_refused_by_name():
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "repetition_penalty", "n"):
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: 1})


def test_request_widths_and_stop_ids_are_checked(llm):
    with pytest.raises(ValueError, match="width"):
        llm.submit([3], replace(PARAMS, width=WIDEST + 1))
    with pytest.raises(ValueError, match="token ids"):
        llm.submit([3], replace(PARAMS, stop_token_ids=(VOCAB,)))
    with pytest.raises(ValueError, match=r"are drafted here, only \[1\], got \[4\]"):
        tiny_llm(None, policy=4)
    with pytest.raises(ValueError, match=f"are drafted here, 1 to {WIDEST}, got"):
        tiny_llm(ScriptedDrafter(), policy=WIDEST + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "bfloat16"),
        ({"max_requests": 0}, "max_requests"),
        ({"max_length": 1}, "max_length"),
        ({"max_length": 257}, "2..256"),
        ({"threads": 0}, "threads"),
        ({"max_queue": 0}, "max_queue"),
    ],
)
def test_engine_sizes_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(**options)


def test_memory_that_does_not_fit_is_refused_before_loading(monkeypatch):
    monkeypatch.setattr(blockpilot.memory, "available_bytes", lambda device: 1000)
    with pytest.raises(MemoryLimitError, match=r"needs \d+ MiB \(.*lower max_requests"):
        LLM(tiny_folder(), max_length=64)


def test_params_lists_must_match(llm):
    with pytest.raises(ValueError, match="expected one or 2"):
        llm.generate([[3], [4]], [PARAMS])
    with pytest.raises(ValueError, match="list of prompts"):
        llm.generate("hello", PARAMS)
