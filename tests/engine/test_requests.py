"""Requests at the edges: cancellation, deadlines, streams and counters."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from blockpilot import LLM, Fixed, QueueFullError, SamplingParams
from blockpilot.errors import EngineClosedError
from tests.engine.pair import (
    VOCAB,
    WIDEST,
    ScriptedDrafter,
    plain,
    prompts,
    script_answers,
    tiny_llm,
)

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(ScriptedDrafter(), max_requests=3)


def scripted(llm: LLM, asked: list[list[int]], params: SamplingParams = PARAMS) -> ScriptedDrafter:
    drafter = ScriptedDrafter()
    script_answers(drafter, [(p, params) for p in asked], "float32", 30)
    llm.drafter = llm._scheduler.drafter = drafter
    return drafter


def test_zero_budget_is_an_empty_answer(llm):
    output = llm.generate([[3, 4]], replace(PARAMS, max_new_tokens=0))[0]
    assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
    assert output.stats.tau is None


def test_unlimited_budget_runs_to_the_context_limit():
    llm = tiny_llm(max_length=40, max_requests=1)
    output = llm.generate([[3, 4, 5]], replace(PARAMS, max_new_tokens=None))[0]
    assert len(output.token_ids) == 37
    assert output.finish_reason == "length"


@pytest.mark.parametrize("width", [1, 2, WIDEST])
def test_tau_counts_steps_and_not_the_prefill_token(llm, width):
    asked = prompts(1)
    scripted(llm, asked).script = lambda slot, call: width - 1
    output = llm.generate(asked, replace(PARAMS, width=width))[0]
    stats = output.stats
    assert stats.committed == len(output.token_ids) - 1 == 15
    assert stats.steps == -(-15 // width)
    assert stats.tau == stats.committed / stats.steps
    assert stats.acceptance_by_offset == [1.0] * (width - 1)


def test_rates_divide_by_what_was_offered(llm):
    asked = prompts(1)
    scripted(llm, asked).script = lambda slot, call: 0
    output = llm.generate(asked, replace(PARAMS, width=3))[0]
    assert output.stats.kept == [0, 0]
    assert output.stats.offered == [
        15,
        14,
    ]  # the last step may still offer one draft, as the published loop does
    assert output.stats.tau == 1.0


def test_width_one_never_touches_the_drafter(llm):
    asked = prompts(4)
    drafter = scripted(llm, asked)
    outputs = llm.generate(asked, [replace(PARAMS, width=w) for w in (1, 1, 3, 1)])
    assert len(drafter.begun) == 1
    assert [o.token_ids for o in outputs] == [plain(p, PARAMS).token_ids for p in asked]


class CountingPolicy:
    window = (2, 4)

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []

    def bind(self, embedding) -> None:
        self.embedding = embedding

    def choose(self, last_logits):
        self.calls.append(last_logits.clone())
        return torch.tensor([self.window[len(self.calls) % 2]])


def test_policy_is_asked_once_per_request_with_raw_logits():
    asked = prompts(5)
    params = replace(PARAMS, temperature=0.7, top_k=3, seed=1)
    drafter = ScriptedDrafter()
    script_answers(drafter, [(p, params) for p in asked], "float32", 30)
    policy = CountingPolicy()
    llm = tiny_llm(drafter, policy=policy, max_requests=2)
    outputs = llm.generate(asked, params)
    assert len(policy.calls) == llm.policy_calls == 5
    assert sorted(o.stats.width for o in outputs) == [2, 2, 4, 4, 4]
    with torch.inference_mode():
        raw, _ = llm.target.prefill(0, asked[0])
    assert torch.equal(policy.calls[0], raw[None])
    assert policy.embedding.shape[0] == VOCAB
    assert [o.token_ids for o in outputs] == [plain(p, params).token_ids for p in asked]


def test_requests_of_the_other_kind_than_a_policy_is_for_decode_plain():
    greedy = SamplingParams(max_new_tokens=8, ignore_eos=True)
    sampling = replace(greedy, temperature=0.8)
    for sampled, widths in ((None, [3, 3, 2]), (False, [3, 1, 2]), (True, [1, 3, 2])):
        policy = Fixed(3)
        policy.sampled = sampled
        llm = tiny_llm(ScriptedDrafter(), policy=policy, max_requests=1)
        asked = [greedy, sampling, replace(sampling, width=2)]
        script_answers(llm.drafter, [([3, 4, 5], sampling)], "float32", 20)
        assert [o.stats.width for o in llm.generate([[3, 4, 5]] * 3, asked)] == widths


def test_policy_is_not_asked_when_nothing_is_left_to_decide(llm):
    scripted(llm, [[3, 4]])
    before = llm.policy_calls
    llm.generate([[3, 4]], replace(PARAMS, max_new_tokens=1))
    llm.generate([[3, 4]], replace(PARAMS, width=2))
    assert llm.policy_calls == before


def test_cancel_frees_the_slot_within_a_step_and_spares_the_rest():
    asked = prompts(3)
    llm = tiny_llm(max_requests=1)
    first, second, third = (llm.submit(p, PARAMS) for p in asked)
    llm.step()
    llm.cancel(first)
    llm.cancel(third)
    assert first.output.finish_reason == third.output.finish_reason == "cancelled"
    assert first.output.token_ids == plain(asked[0], PARAMS).token_ids[:2]
    while llm.step():
        pass
    assert second.output.token_ids == plain(asked[1], PARAMS).token_ids
    llm.cancel(second)
    assert second.output.finish_reason == "length"


def test_deadline_ends_a_request_as_it_stands():
    llm = tiny_llm(max_requests=1)
    running = llm.submit([3, 4], replace(PARAMS, max_new_tokens=100), deadline=30)
    waiting = llm.submit([5, 6], PARAMS, deadline=1e-4)
    llm.step()
    time.sleep(0.001)
    llm.step()
    assert waiting.output.finish_reason == "deadline"
    assert not running.finished
    running.expires = 0.0
    llm.step()
    assert running.output.finish_reason == "deadline"
    with pytest.raises(ValueError, match="deadline"):
        llm.submit([3], PARAMS, deadline=0)


def test_queue_is_bounded_and_generate_feeds_it():
    llm = tiny_llm(max_requests=1, max_queue=2)
    handles = [llm.submit([3 + i], PARAMS) for i in range(2)]
    with pytest.raises(QueueFullError, match="2 requests"):
        llm.submit([9], PARAMS)
    while llm.step():
        pass
    assert all(h.finished for h in handles)
    assert len(llm.generate([[3 + i] for i in range(7)], PARAMS)) == 7


def test_stream_equals_text_and_early_close_leaves_the_engine_usable(llm):
    asked = prompts(1)
    scripted(llm, asked)
    params = replace(PARAMS, width=4)
    stream = llm.stream(asked[0], params)
    pieces = list(stream)
    assert "".join(pieces) == stream.output.text == plain(asked[0], PARAMS).text
    early = llm.stream(asked[0], params)
    next(early)
    early.close()
    assert early.output.finish_reason == "cancelled"
    assert not llm._scheduler.active
    assert llm.generate(asked, params)[0].token_ids == plain(asked[0], PARAMS).token_ids


def test_closed_engine_refuses_work():
    with tiny_llm(max_requests=1) as llm:
        handle = llm.submit([3], PARAMS)
    assert handle.output.finish_reason == "cancelled"
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.submit([3], PARAMS)
    with pytest.raises(EngineClosedError):
        llm.step()


def test_warmup_leaves_no_trace(llm):
    asked = prompts(2)
    scripted(llm, [*asked, [0]])
    llm.warmup()
    assert not llm._scheduler.busy
    outputs = llm.generate(asked, replace(PARAMS, width=3))
    assert [o.token_ids for o in outputs] == [plain(p, PARAMS).token_ids for p in asked]


@pytest.mark.parametrize("mode", [PARAMS, replace(PARAMS, temperature=0.9, top_k=7, seed=3)])
def test_logprobs_equal_plain_and_the_raw_distribution(llm, mode):
    asked = prompts(3)
    drafter = scripted(llm, asked, mode)
    params = replace(mode, logprobs=3)
    for width in (1, 2, WIDEST):
        outputs = llm.generate(asked, [replace(params, width=width), mode, replace(params, width=width)])
        assert outputs[1].logprobs is None
        for output, prompt in ((outputs[0], asked[0]), (outputs[2], asked[2])):
            expected = plain(prompt, params)
            assert output.logprobs == expected.logprobs
            assert [e.token_id for e in output.logprobs] == output.token_ids
    ids = asked[0] + outputs[0].token_ids
    with torch.inference_mode():
        raw, _ = llm.target.prefill(0, ids[:-1])
    last = outputs[0].logprobs[-1]
    exact = raw.double().log_softmax(-1)
    assert last.logprob == pytest.approx(exact[ids[-1]].item(), abs=1e-5)
    assert [i for i, _ in last.top] == exact.topk(3).indices.tolist()
    assert drafter.begun


def test_callers_objects_are_left_alone(llm):
    scripted(llm, [[3, 4, 5]])
    prompt = [3, 4, 5]
    llm.generate([prompt], PARAMS)
    assert prompt == [3, 4, 5]
    assert llm.policy.window == Fixed(WIDEST).window
