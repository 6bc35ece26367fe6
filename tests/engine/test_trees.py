"""What `test_exactness` and `test_static` hold chains to, for trees: output is plain output, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockpilot import SamplingParams
from blockpilot.drafters import Proposal
from blockpilot_kernels.dispatch import forced
from tests.engine import test_static
from tests.engine.inside import caches, spoil_cache
from tests.engine.pair import VOCAB, WIDEST, cycling, plain, prompts, script_answers, sized, tiny_llm
from tests.engine.test_exactness import DTYPES, GREEDY, MODES, SAMPLED
from tests.engine.tree_pair import LARGEST, TreeDrafter


def shaped(width: int, tree: int) -> dict[str, int]:
    return {"width": min(width, tree), "tree": tree}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_at_every_budget_and_accepted_count(dtype, mode):
    params = MODES[mode]
    drafter = TreeDrafter(cycling)
    asked = prompts(2)
    script_answers(drafter, [(p, params) for p in asked], dtype, 30)
    llm = tiny_llm(drafter, dtype=dtype, max_requests=1)
    expected = [plain(p, params, dtype).token_ids for p in asked]
    for tree in range(1, LARGEST + 1):
        width = min(tree, 4 if tree % 2 else WIDEST)
        drafter.seen.clear()
        outputs = llm.generate(asked, replace(params, width=width, tree=tree))
        assert [o.token_ids for o in outputs] == expected, (tree, width)
        kept = {accepted for _, accepted in drafter.seen}
        assert width == 1 or kept == set(range(width))
    assert {tree for tree, _ in drafter.shaped} == set(range(2, LARGEST + 1))


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_with_chains_and_plain(dtype, slots):
    """Trees, chains, modes, budgets and log-probabilities in one batch: each row equals its solo run."""
    drafter = TreeDrafter(lambda slot, call: slot + call)
    asked = prompts(sized(12, 3), seed=1)
    modes, each = list(MODES.values()), []
    for i in range(len(asked)):
        width = 1 + i % WIDEST
        tree = None if i % 4 == 3 else min(LARGEST, width + i)
        settings = {
            "width": width,
            "tree": tree,
            "max_new_tokens": 3 + sized(5, 2) * (i % 5),
            "logprobs": i % 3 or None,
        }
        each.append(replace(modes[i % 3], **settings))
    script_answers(drafter, list(zip(asked, each, strict=True)), dtype, sized(30, 12))
    llm = tiny_llm(drafter, dtype=dtype, max_requests=slots)
    for output, prompt, params in zip(llm.generate(asked, each), asked, each, strict=True):
        alone = plain(prompt, replace(params, width=None, tree=None), dtype)
        assert output.token_ids == alone.token_ids
        assert output.logprobs == alone.logprobs
        assert output.finish_reason == alone.finish_reason == "length"
        assert output.text == alone.text
        assert output.stats.tree == (params.tree or 0 if params.width > 1 else 0)


_shared: dict[str, object] = {}


def shared_llm(dtype: str, drafter: TreeDrafter):
    """One engine per dtype, with the example's drafter in place."""
    if dtype not in _shared:
        _shared[dtype] = tiny_llm(drafter, dtype=dtype, max_requests=2)
    llm = _shared[dtype]
    llm.drafter = llm._scheduler.drafter = drafter
    return llm


@given(
    data=st.data(),
    length=st.integers(1, 20),
    width=st.integers(1, WIDEST),
    more=st.integers(0, LARGEST - WIDEST),
    budget=st.integers(1, 2 * WIDEST),
    mode=st.sampled_from(sorted(MODES)),
    dtype=st.sampled_from(DTYPES),
)
def test_any_prompt_tree_script_and_budget(data, length, width, more, budget, mode, dtype):
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length))
    right = data.draw(st.lists(st.integers(0, WIDEST - 1), min_size=1, max_size=2 * WIDEST))
    params = replace(MODES[mode], max_new_tokens=budget)
    drafter = TreeDrafter(lambda slot, call: right[call % len(right)], seed=len(right))
    script_answers(drafter, [(prompt, params)], dtype, 3 * WIDEST)
    llm = shared_llm(dtype, drafter)
    output = llm.generate([prompt], replace(params, width=width, tree=width + more))[0]
    assert output.token_ids == plain(prompt, params, dtype).token_ids
    assert sum(output.stats.kept) <= output.stats.committed == budget - 1


class Straight(TreeDrafter):
    """Hands out its chains as trees."""

    def propose(self, state, plan, noise) -> Proposal:
        chain = super(TreeDrafter, self).propose(state, plan, noise)
        return replace(chain, nodes=torch.where(state.done, 0, state.effective))


@pytest.mark.parametrize("logprobs", [None, 2], ids=["one call", "op by op"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [2, 4, WIDEST])
def test_a_chain_as_a_tree_is_the_chain(width, mode, logprobs):
    """Same tokens, steps and counters, with nodes to spare and without."""
    params = replace(MODES[mode], logprobs=logprobs)
    asked = prompts(3, seed=12)
    results = []
    for tree in (None, width, LARGEST):
        drafter = Straight(cycling)
        script_answers(drafter, [(p, params) for p in asked], "float32", 40)
        outputs = tiny_llm(drafter, max_requests=2).generate(asked, replace(params, width=width, tree=tree))
        kept = ("steps", "committed", "offered", "kept", "step_tokens")
        stats = [[getattr(o.stats, name) for name in kept] for o in outputs]
        results.append((stats, [(o.token_ids, o.logprobs) for o in outputs], drafter.seen))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("tree", [6, LARGEST])
def test_stop_id_at_every_depth(tree, mode):
    params = replace(MODES[mode], max_new_tokens=2 * WIDEST)
    (prompt,) = prompts(1, seed=4)
    free = plain(prompt, params).token_ids
    drafter = TreeDrafter()
    script_answers(drafter, [(prompt, params)], "float32", 40)
    llm = shared_llm("float32", drafter)
    for phase in range(4):
        drafter.script = lambda slot, call, phase=phase: phase
        for at in range(len(free)):
            asked = replace(params, width=4, tree=tree, stop_token_ids=(free[at],))
            output = llm.generate([prompt], asked)[0]
            cut = free.index(free[at]) + 1
            assert output.token_ids == free[:cut]
            assert output.finish_reason == "stop"
            assert output.stats.committed == cut - 1


def test_min_new_tokens_holds_inside_a_tree():
    (prompt,) = prompts(1, seed=6)
    free = plain(prompt, GREEDY).token_ids
    at = next(i for i in range(3, 10) if free.index(free[i]) == i)
    for least in (at, at + 1, at + 3):
        params = replace(GREEDY, stop_token_ids=(free[at],), min_new_tokens=least)
        expected = plain(prompt, params)
        drafter = TreeDrafter()
        drafter.answers[tuple(prompt)] = expected.token_ids + [0] * 40
        output = shared_llm("float32", drafter).generate([prompt], replace(params, width=5, tree=12))[0]
        assert output.token_ids == expected.token_ids


@pytest.mark.parametrize("budget", [1, 3])
def test_context_limit(budget):
    """Trees with more nodes than places are left: the last tokens still equal plain."""
    limit = 24
    small = tiny_llm(max_length=limit, max_requests=1)
    for room in range(1, WIDEST + 3):
        prompt = [3 + i % 40 for i in range(limit - room)]
        params = replace(GREEDY, max_new_tokens=room + budget - 1)
        expected = small.generate([prompt], params)[0]
        drafter = TreeDrafter()
        drafter.answers[tuple(prompt)] = expected.token_ids
        llm = tiny_llm(drafter, max_length=limit, max_requests=2)
        for tree in (2, 5, LARGEST):
            output = llm.generate([prompt], replace(params, **shaped(WIDEST, tree)))[0]
            assert output.token_ids == expected.token_ids
            assert output.finish_reason == "length"


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_everything_unwritten_changes_no_bit(dtype):
    drafter = TreeDrafter()
    asked = prompts(5, seed=3)
    script_answers(drafter, [(p, SAMPLED) for p in asked], dtype, 30)
    llm = tiny_llm(drafter, dtype=dtype, max_requests=2)
    spoil_cache(llm)
    state = llm._scheduler.state
    before = state.pointers(), [t.data_ptr() for t in caches(llm)]
    state.block.fill_(3)
    state.choice.fill_(-7)
    state.finite.fill_(False)
    state.tokens.fill_(2)
    drafter.poison = 4
    for tree in (4, LARGEST):
        outputs = llm.generate(asked, replace(SAMPLED, width=4, tree=tree))
        assert [o.token_ids for o in outputs] == [plain(p, SAMPLED, dtype).token_ids for p in asked]
    assert before == (state.pointers(), [t.data_ptr() for t in caches(llm)])


@pytest.mark.parametrize("logprobs", [None, 1], ids=["one call", "op by op"])
def test_noise_beyond_a_blocks_width_is_never_read(monkeypatch, logprobs):
    """What is not drawn holds NaN here, and trees of many nodes at few positions still say what plain decoding does."""
    empty = torch.Tensor.new_empty

    def poisoned(*given, **options):
        made = empty(*given, **options)
        return made.fill_(torch.nan) if made.dtype.is_floating_point else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    drafter, asked = TreeDrafter(), prompts(4, seed=13)
    params = [replace(SAMPLED, seed=i, logprobs=logprobs) for i in range(4)]
    script_answers(drafter, list(zip(asked, params, strict=True)), "float32", 30)
    llm = tiny_llm(drafter, max_requests=3)
    shapes = ((2, LARGEST), (3, 9), (WIDEST, None), (4, 4))
    each = [replace(p, width=w, tree=t) for p, (w, t) in zip(params, shapes, strict=True)]
    for output, prompt, alone in zip(llm.generate(asked, each), asked, params, strict=True):
        assert output.token_ids == plain(prompt, alone).token_ids


class Bush(test_static.ConstantDrafter):
    """Nodes 1 … 7 below the anchor, the others below node 1, on any device."""

    largest_tree = LARGEST

    def propose(self, state, plan, noise) -> Proposal:
        tokens = torch.arange(state.widest - 1, device=state.block.device).expand_as(state.block[:, 1:])
        parent = torch.where(tokens < 7, -1, 0)
        nodes = torch.where(state.done, 0, torch.where(plan.budgets > 0, plan.budgets, state.effective))
        return Proposal(tokens, parent, parent + 2, nodes)


@pytest.mark.parametrize("case", ["reference", "cpp", "triton", "meta"])
def test_step_reads_nothing_on_the_host(monkeypatch, case):
    """Under a mode that forbids reads, and without data at all; a tree beside plain and a chain of two."""
    monkeypatch.setattr(test_static, "ConstantDrafter", Bush)
    monkeypatch.setattr(test_static, "WIDEST", LARGEST)
    right = test_static.engine

    def engine(device: str, cpp: bool = False):
        target, state, plan = right(device, cpp)
        plan = replace(plan, widths=(4, 1, 2), trees=(LARGEST, 0, 0))
        plan.rows.tiles(2, apart=True)
        state.width[:3] = torch.tensor(plan.widths, device=device)
        return target, state, plan

    monkeypatch.setattr(test_static, "engine", engine)
    if case == "meta":
        assert test_static.step_once("meta").count.is_meta
        return
    with forced(case):
        state = test_static.step_once("cpu", case == "cpp")
    assert (state.count[:3] >= 1).all()


def test_what_is_refused():
    for tree in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="tree: expected None, for a chain, or an int >= 1"):
            SamplingParams(tree=tree)
    with pytest.raises(ValueError, match="int >= 4, the width, got 3"):
        SamplingParams(width=4, tree=3)
    llm = tiny_llm(TreeDrafter(), max_requests=1)
    with pytest.raises(ValueError, match=f"at most {LARGEST} nodes, what the drafter makes, got 17"):
        llm.submit([3], SamplingParams(tree=17))
    with pytest.raises(ValueError, match="at most 0 nodes"):
        tiny_llm(max_requests=1).submit([3], SamplingParams(tree=2))
