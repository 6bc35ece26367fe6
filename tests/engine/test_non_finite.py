"""Logits that are not finite end the request they belong to, by name, and no other."""

from __future__ import annotations

from dataclasses import replace

from blockpilot import NonFiniteLogitsError, SamplingParams
from tests.engine.inside import poison_embedding
from tests.engine.pair import VOCAB, WIDEST, ScriptedDrafter, plain, prompts, script_answers, sized, tiny_llm

PARAMS = SamplingParams(max_new_tokens=sized(12, 6), ignore_eos=True)


def test_non_finite_logits_fail_one_request_by_name():
    """The token that breaks the target comes up for one prompt only; its neighbours go on unchanged."""
    asked = prompts(4, seed=12)
    expected = [plain(p, PARAMS).token_ids for p in asked]
    victim = expected[1]
    poison = next(
        t
        for t in victim[2:8]
        if all(t not in (*e, *p) for e, p in zip(expected, asked, strict=True) if e != victim)
    )
    drafter = ScriptedDrafter()
    script_answers(drafter, [(p, PARAMS) for p in asked], "float32", 30)
    llm = tiny_llm(drafter, max_requests=4)
    poison_embedding(llm, poison, float("nan"))
    for width in (1, 3, WIDEST):
        outputs = llm.generate(asked, replace(PARAMS, width=width))
        assert outputs[1].finish_reason == "error"
        assert isinstance(outputs[1].error, NonFiniteLogitsError)
        assert outputs[1].token_ids == victim[: victim.index(poison) + 1]
        for i in (0, 2, 3):
            assert outputs[i].token_ids == expected[i]
            assert outputs[i].error is None


def test_a_rejected_draft_that_breaks_the_target_leaves_no_trace():
    """The drafter proposes the poisonous token and is refused: plain never saw it, so nothing may change."""
    asked = prompts(2, seed=13)
    expected = [plain(p, PARAMS).token_ids for p in asked]
    poison = next(
        t for t in range(3, VOCAB) if all(t not in (*e, *p) for e, p in zip(expected, asked, strict=True))
    )
    drafter = ScriptedDrafter()
    drafter.answers = {tuple(p): [poison] * 80 for p in asked}
    drafter.script = lambda slot, call: WIDEST - 1
    llm = tiny_llm(drafter, max_requests=2)
    poison_embedding(llm, poison, float("nan"))
    outputs = llm.generate(asked, replace(PARAMS, width=WIDEST))
    assert [o.token_ids for o in outputs] == expected


def test_non_finite_prompt_fails_at_prefill():
    llm = tiny_llm(max_requests=2)
    poison_embedding(llm, 9, float("inf"))
    bad, good = llm.generate([[3, 9], [3, 4]], PARAMS)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert good.token_ids == plain([3, 4], PARAMS).token_ids
