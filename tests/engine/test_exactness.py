"""Speculative output is plain output, bit for bit, whatever the drafter says, at every width, batch and slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot import SamplingParams
from tests.engine.pair import (
    EOS,
    INTERPRETED,
    VOCAB,
    WIDEST,
    ScriptedDrafter,
    cycling,
    plain,
    plain_llm,
    prompts,
    script_answers,
    sized,
    tiny_llm,
)

DTYPES = ["float32", "bfloat16"]
GREEDY = SamplingParams(max_new_tokens=sized(24, 11), ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=7)
FILTERED = replace(GREEDY, temperature=1.3, top_k=12, top_p=0.9, min_p=0.02, seed=-3)
MODES = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED}


def every_count(width: int) -> set[tuple[int, int]]:
    return {(width, accepted) for accepted in range(width)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_at_every_width_and_accepted_count(dtype, mode):
    """The identity counts only if every accepted count 0 … b−1 occurred at every width."""
    params = MODES[mode]
    drafter = ScriptedDrafter(cycling)
    asked = prompts(sized(3, 1))
    script_answers(drafter, [(p, params) for p in asked], dtype, 30)
    llm = tiny_llm(drafter, dtype=dtype, max_requests=1)
    expected = [plain(p, params, dtype).token_ids for p in asked]
    assert len({tuple(e) for e in expected}) == len(asked)
    for width in sized(range(1, WIDEST + 1), (4,)):
        drafter.seen.clear()
        outputs = llm.generate(asked, replace(params, width=width))
        assert [o.token_ids for o in outputs] == expected
        if width > 1:
            assert every_count(width) <= drafter.seen


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batches(dtype, slots):
    """Widths, modes, budgets, slots and finishing times mixed in one batch: each row equals its solo run."""
    drafter = ScriptedDrafter(lambda slot, call: slot + call)
    asked = prompts(sized(12, 4), seed=1)
    modes = list(MODES.values()) if not INTERPRETED else [GREEDY, SAMPLED, GREEDY]
    each = [
        replace(modes[i % 3], width=1 + i % WIDEST, max_new_tokens=3 + sized(5, 2) * (i % 5))
        for i in range(len(asked))
    ]
    script_answers(drafter, list(zip(asked, each, strict=True)), dtype, sized(30, 16))
    llm = tiny_llm(drafter, dtype=dtype, max_requests=slots)
    outputs = llm.generate(asked, each)
    for output, prompt, params in zip(outputs, asked, each, strict=True):
        alone = plain(prompt, replace(params, width=None), dtype)
        assert output.token_ids == alone.token_ids
        assert output.finish_reason == alone.finish_reason == "length"
        assert output.text == alone.text
        assert output.stats.width == params.width
    again = llm.generate(list(reversed(asked)), list(reversed(each)))
    assert [o.token_ids for o in reversed(again)] == [o.token_ids for o in outputs]


@given(
    data=st.data(),
    length=st.integers(1, 20),
    width=st.integers(1, WIDEST),
    budget=st.integers(1, 2 * WIDEST),
    mode=st.sampled_from(sorted(MODES)),
    dtype=st.sampled_from(DTYPES),
)
def test_any_prompt_width_script_and_budget(data, length, width, budget, mode, dtype):
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length))
    right = data.draw(st.lists(st.integers(0, WIDEST - 1), min_size=1, max_size=2 * WIDEST))
    params = replace(MODES[mode], max_new_tokens=budget)
    drafter = ScriptedDrafter(lambda slot, call: right[call % len(right)])
    script_answers(drafter, [(prompt, params)], dtype, 2 * WIDEST + WIDEST)
    output = shared_llm(dtype, drafter).generate([prompt], replace(params, width=width))[0]
    alone = plain(prompt, params, dtype)
    assert output.token_ids == alone.token_ids
    assert len(output.token_ids) == budget
    assert sum(output.stats.kept) <= output.stats.committed == budget - 1


_shared: dict[str, object] = {}


def shared_llm(dtype: str, drafter: ScriptedDrafter):
    """One engine per dtype, with the example's drafter in place: also checks that requests leave no trace."""
    if dtype not in _shared:
        _shared[dtype] = tiny_llm(drafter, dtype=dtype, max_requests=2)
    llm = _shared[dtype]
    llm.drafter = llm._scheduler.drafter = drafter
    return llm


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("width", sized(range(1, WIDEST + 1), [4]))
def test_stop_id_at_every_offset_of_a_block(width, mode):
    """Each emitted token in turn is declared a stop id, for every script phase."""
    params = replace(MODES[mode], max_new_tokens=2 * WIDEST)
    (prompt,) = prompts(1, seed=4)
    free = plain(prompt, params).token_ids
    drafter = ScriptedDrafter()
    script_answers(drafter, [(prompt, params)], "float32", 40)
    llm = shared_llm("float32", drafter)
    for phase in sized(range(width), [2]):
        drafter.script = lambda slot, call, phase=phase: phase
        for at in sized(range(len(free)), [0, 2]):
            output = llm.generate([prompt], replace(params, width=width, stop_token_ids=(free[at],)))[0]
            cut = free.index(free[at]) + 1
            assert output.token_ids == free[:cut]
            assert output.finish_reason == "stop"
            assert output.stats.committed == cut - 1


@pytest.mark.parametrize("width", sized([1, 2, 3, 5, WIDEST], [3]))
def test_eos_budget_and_stop_string_together(width):
    """The earliest event wins at every budget 1 … 2W, whatever else would come later in the block."""
    (prompt,) = prompts(1, seed=5)
    free = plain(prompt, replace(GREEDY, max_new_tokens=2 * WIDEST))
    drafter = ScriptedDrafter()
    script_answers(drafter, [(prompt, GREEDY)], "float32", 40)
    llm = shared_llm("float32", drafter)
    text = [llm.tokenizer.decode([t]) for t in free.token_ids]
    stop_id = free.token_ids[-1]
    for budget in sized(range(1, 2 * WIDEST + 1), [1, 5]):
        for at in sized(range(1, 2 * WIDEST - 1), [1, 3]):
            stop = "".join(text[at : at + 2])
            params = replace(
                GREEDY, max_new_tokens=budget, stop=(stop,), stop_token_ids=(stop_id,), width=width
            )
            output = llm.generate([prompt], params)[0]
            ids, shown = oracle_cut(free.token_ids, text, budget, stop, stop_id)
            assert (output.token_ids, output.text) == (ids, shown)
            ended = ids[-1] == stop_id or shown != "".join(text[: len(ids)])
            assert output.finish_reason == ("stop" if ended else "length")


def oracle_cut(
    ids: list[int], text: list[str], budget: int, stop: str, stop_id: int
) -> tuple[list[int], str]:
    """Pure Python: take tokens one by one until the stop string, the stop id or the budget."""
    for n in range(1, budget + 1):
        shown = "".join(text[:n])
        if stop and stop in shown:
            return ids[:n], shown[: shown.index(stop)]
        if ids[n - 1] == stop_id:
            return ids[:n], shown
    return ids[:budget], "".join(text[:budget])


def test_min_new_tokens_allows_a_stop_exactly_after_them():
    """A stop id that is the choice at token 4 is banned for min 4 … and free for min 3, at every width."""
    (prompt,) = prompts(1, seed=6)
    free = plain(prompt, GREEDY).token_ids
    at = next(i for i in range(3, 10) if free.index(free[i]) == i)
    stop = (free[at],)
    for least in sized((at, at + 1, at + 3), (at, at + 1)):
        params = replace(GREEDY, stop_token_ids=stop, min_new_tokens=least)
        expected = plain(prompt, params)
        drafter = ScriptedDrafter()
        drafter.answers[tuple(prompt)] = expected.token_ids + [0] * 40
        for width in sized(range(2, WIDEST + 1), [4]):
            output = shared_llm("float32", drafter).generate([prompt], replace(params, width=width))[0]
            assert output.token_ids == expected.token_ids
        if least == at:
            assert expected.token_ids == free[: at + 1]
        else:
            assert len(expected.token_ids) > least - 1 and stop[0] not in expected.token_ids[:least]


def test_model_eos_ends_unless_ignored():
    drafter = ScriptedDrafter()
    asked = prompts(12, seed=8)
    hot = replace(SAMPLED, max_new_tokens=60, ignore_eos=False, temperature=2.0)
    ended = 0
    script_answers(drafter, [(p, hot) for p in asked], "float32", 66)
    llm = tiny_llm(drafter, max_requests=8)
    for output, prompt in zip(llm.generate(asked, replace(hot, width=4)), asked, strict=True):
        free = drafter.answers[tuple(prompt)][:60]
        if EOS in free:
            ended += 1
            assert output.token_ids == free[: free.index(EOS) + 1]
            assert output.finish_reason == "stop"
        else:
            assert output.token_ids == free
    assert ended >= 3


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_context_limit(budget):
    """prompt + budget = the limit exactly, with widths beyond it; the last tokens still equal plain."""
    limit = 24
    small = tiny_llm(max_length=limit, max_requests=1)
    for room in sized(range(1, WIDEST + 3), [1, 4]):
        prompt = [3 + i % 40 for i in range(limit - room)]
        params = replace(GREEDY, max_new_tokens=room + budget - 1)
        expected = small.generate([prompt], params)[0]
        assert len(expected.token_ids) == room
        drafter = ScriptedDrafter()
        drafter.answers[tuple(prompt)] = expected.token_ids
        llm = tiny_llm(drafter, max_length=limit, max_requests=2)
        for width in sized(range(2, WIDEST + 1), [3, WIDEST]):
            output = llm.generate([prompt], replace(params, width=width))[0]
            assert output.token_ids == expected.token_ids
            assert output.finish_reason == "length"


def test_same_seed_same_text_other_seed_other_text():
    (prompt,) = prompts(1, seed=9)
    a, b = (plain(prompt, replace(SAMPLED, seed=s)).token_ids for s in (1, 2))
    assert a == plain(prompt, replace(SAMPLED, seed=1)).token_ids
    assert a != b
    fresh = plain_llm().generate([prompt] * 3, replace(SAMPLED, seed=None))
    assert len({o.seed for o in fresh}) == 3
    assert len({tuple(o.token_ids) for o in fresh}) == 3
    replay = plain(prompt, replace(SAMPLED, seed=fresh[0].seed))
    assert replay.token_ids == fresh[0].token_ids
