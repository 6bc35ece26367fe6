"""The ops of a step really run on the backend that was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockpilot import SamplingParams
from blockpilot_kernels import dispatch
from tests.engine.pair import ScriptedDrafter, plain, prompts, script_answers, tiny_llm

LAYER = ("tiled_linear", "block_attention", "norm_rope", "qk_rope_append")
OPS = ("gumbel_noise", "choose", "accept_commit")


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_every_op_runs_on_the_forced_backend(backend):
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.8, top_k=9, seed=3)
    (prompt,) = prompts(1)
    with dispatch.forced(backend):
        drafter = ScriptedDrafter()
        # Not `plain`: its kept answers are the session's backend's, and floats are promised within one backend.
        answer = tiny_llm(max_requests=1).generate([prompt], replace(params, max_new_tokens=14))[0].token_ids
        drafter.answers[tuple(prompt)] = answer
        llm = tiny_llm(drafter, max_requests=1)
        dispatch.calls.clear()
        output = llm.generate([prompt], replace(params, width=3))[0]
        ran = dict(dispatch.calls)
    assert output.token_ids == answer[:6]
    # The C++ extension has whole passes of prompts and steps, the others what a layer is made of.
    passes = ("decoder_forward", "verify_commit") if backend == "cpp" else LAYER
    assert {op for op, used in ran if used == backend} == {*OPS, *passes}
    assert not [key for key in ran if key[1] != backend]


def test_greedy_answers_agree_between_backends():
    """Greedy choices are comparisons of the same logits, so here even the backends agree."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    (prompt,) = prompts(1, seed=2)
    expected = plain(prompt, params).token_ids
    for backend in ("reference", "cpp", "triton"):
        with dispatch.forced(backend):
            drafter = ScriptedDrafter()
            script_answers(drafter, [(prompt, params)], "float32", 16)
            llm = tiny_llm(drafter, max_requests=1)
            assert llm.generate([prompt], replace(params, width=4))[0].token_ids == expected
