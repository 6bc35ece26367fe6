"""The C++ step in one call says what its ops say one by one: same ids, same drafts, same acceptance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_checkpoint import write_draft_vocabulary
from blockpilot.drafters.dflash_cpp import CppDFlashDrafter
from blockpilot.targets.cpp_target import CppTarget
from blockpilot_kernels import dispatch
from tests.engine.inside import poison_embedding
from tests.engine.pair import VOCAB, prompts, write_tokenizer
from tests.tiny import save_drafter, save_target

if dispatch.extension_error() is not None:
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)
if dispatch.backend_of("cpu") != "cpp":
    pytest.skip(f"backend {dispatch.backend_of('cpu')} does not run the C++ step", allow_module_level=True)

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.5, seed=3)
MIXED = [
    GREEDY,
    SAMPLED,
    replace(SAMPLED, top_k=9, top_p=0.9, seed=5),
    replace(SAMPLED, min_p=0.02, seed=6),
    replace(GREEDY, stop_token_ids=(4, 9, 12), min_new_tokens=7, ignore_eos=False),
    replace(SAMPLED, stop_token_ids=(4, 9, 12), min_new_tokens=7, ignore_eos=False, seed=8),
]
WIDTHS = (1, 2, 3, 4, 6, 8)


@pytest.fixture(scope="module", params=[None, [0, 3, *range(5, VOCAB, 2)]], ids=["all ids", "some ids"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target", vocab=VOCAB, eos_token_id=1)
    write_tokenizer(target)
    drafter = save_drafter(folder / "drafter", target, block_size=4)
    if request.param is not None:
        write_draft_vocabulary(drafter, request.param)
    return target, drafter


def guess_by_ops(drafter, state, plan, head, noise):
    """`DFlashDrafter._guess` where the C++ decoder has made the logits."""
    logits = drafter.draft_logits(state, plan)
    columns, finite = drafter._draws(state, plan, head, noise).choose(logits)
    return drafter._vocabulary.ids(columns), finite


def answers(
    pair,
    monkeypatch,
    *,
    fused: bool,
    dtype: str,
    asked: list[SamplingParams],
    poison: bool = False,
    trees=(None,) * 6,
):
    """(ids, steps, accepted, reason) of six requests of six widths in four slots, and every bit of the caches."""
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(CppTarget, "verify_commit", None)
            patch.setattr(CppDFlashDrafter, "propose", DFlashDrafter.propose)
            patch.setattr(CppDFlashDrafter, "_guess", guess_by_ops)
        llm = LLM(pair[0], drafter=pair[1], max_requests=4, max_length=96, dtype=dtype)
        if poison:
            poison_embedding(llm, 7, float("nan"))
        dispatch.calls.clear()
        params = [replace(p, width=w, tree=t) for p, w, t in zip(asked, WIDTHS, trees, strict=True)]
        outputs = llm.generate(prompts(6, seed=4), params)
        calls = {op for op, _ in dispatch.calls}
        assert ("verify_commit" in calls) == fused and not (fused and "move_places" in calls)
        assert ("draft_block" in calls) == fused or any(trees)
        broken = int(llm.drafter.non_finite)
    found = [
        (o.token_ids, o.stats.step_tokens, o.stats.kept, o.stats.offered, o.finish_reason) for o in outputs
    ]
    caches = (llm.target.cache, llm.drafter.cache)
    bits = [t.view(torch.uint8).clone() for cache in caches for t in (cache.k, cache.v)]
    return found, broken, bits


def same(one, other) -> bool:
    """Whether two `answers` are alike."""
    return one[:2] == other[:2] and all(map(torch.equal, one[2], other[2]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed"])
def test_one_call_says_what_the_ops_say(pair, monkeypatch, kind, dtype):
    asked = {"greedy": [GREEDY] * 6, "sampled": [SAMPLED] * 6, "mixed": MIXED}[kind]
    one = answers(pair, monkeypatch, fused=True, dtype=dtype, asked=asked)
    assert same(one, answers(pair, monkeypatch, fused=False, dtype=dtype, asked=asked))
    assert any(len(steps) < len(ids) for ids, steps, *_ in one[0])


@pytest.mark.parametrize("kind", ["greedy", "mixed"])
def test_rows_that_are_not_finite_end_alike(pair, monkeypatch, kind):
    asked = {"greedy": [GREEDY] * 6, "mixed": MIXED}[kind]
    one = answers(pair, monkeypatch, fused=True, dtype="float32", asked=asked, poison=True)
    other = answers(pair, monkeypatch, fused=False, dtype="float32", asked=asked, poison=True)
    assert one[:2] == other[:2]
    assert any(reason == "error" for *_, reason in one[0])


@pytest.mark.parametrize("trees", [(None, 5, 3, 16, None, 12), (None, 2, 9, 4, 6, 16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed"])
def test_one_call_says_what_the_ops_say_of_trees(pair, monkeypatch, kind, dtype, trees):
    """Trees, a chain and plain side by side; keys and values that moved are the same too."""
    asked = {"greedy": [GREEDY] * 6, "sampled": [SAMPLED] * 6, "mixed": MIXED}[kind]
    one = answers(pair, monkeypatch, fused=True, dtype=dtype, asked=asked, trees=trees)
    assert same(one, answers(pair, monkeypatch, fused=False, dtype=dtype, asked=asked, trees=trees))
    plain = [replace(p, width=1) for p in asked]
    llm = LLM(pair[0], max_requests=1, max_length=96, dtype=dtype)
    assert [found[0] for found in one[0]] == [o.token_ids for o in llm.generate(prompts(6, seed=4), plain)]
    assert any(max(steps) > 2 for _, steps, *_ in one[0])


@pytest.mark.parametrize("kind", ["greedy", "mixed"])
def test_nodes_that_are_not_finite_end_alike(pair, monkeypatch, kind):
    asked, trees = {"greedy": [GREEDY] * 6, "mixed": MIXED}[kind], (None, 5, 3, 16, None, 12)
    given = {"dtype": "float32", "asked": asked, "poison": True, "trees": trees}
    one, other = (answers(pair, monkeypatch, fused=fused, **given) for fused in (True, False))
    assert one[:2] == other[:2]
    assert any(reason == "error" for *_, reason in one[0])


def test_what_is_no_tree_is_refused(pair):
    llm = LLM(pair[0], drafter=pair[1], max_requests=1, max_length=96)
    handle = llm.submit([3, 5], replace(GREEDY, width=3, tree=6))
    llm.step()
    state, plan = llm._scheduler.state, llm._scheduler._plan({0: handle}, (3,))
    with torch.inference_mode():
        right = llm.drafter.propose(state, plan, None)
        for name, value, message in (
            ("parent", right.parent + 4, "parents before node"),
            ("parent", right.parent - 1, "parents before node"),
            ("depth", right.depth + 1, "one below its parent"),
            ("nodes", right.nodes + 1, "1 … 6 nodes, got 7"),
            ("nodes", right.nodes * 0, "1 … 6 nodes, got 0"),
            ("nodes", right.nodes[:1], "tree"),
            ("parent", right.parent[:, 1:], "tree"),
            ("depth", right.depth.int(), "tree"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.target.verify_commit(state, plan, None, replace(right, **{name: value}))


def test_a_state_of_other_shapes_is_refused(pair):
    llm = LLM(pair[0], max_requests=1, max_length=96)
    llm.generate(prompts(1), replace(GREEDY, max_new_tokens=2))
    state, plan = llm._scheduler.state, llm._scheduler._plan({0: llm.submit([3], GREEDY)}, (1,))
    state.tensors = (*state.tensors[:-1], torch.zeros(5))
    with pytest.raises(ValueError, match="expected"):
        llm.target.verify_commit(state, plan, None)
    state.tensors = state.tensors[:-1]
    with pytest.raises(ValueError, match="state: expected 19 tensors, got 18"):
        llm.target.verify_commit(state, plan, None)


@pytest.mark.parametrize(
    "spoil", [lambda i: i.flip(0), lambda i: i + VOCAB, lambda i: i[:-1], lambda i: i - 99]
)
def test_ids_that_are_no_columns_are_refused(pair, spoil):
    llm = LLM(pair[0], drafter=pair[1], max_requests=1, max_length=96)
    mask, ids, factor = llm.drafter._rules
    ids = torch.arange(VOCAB) if ids is None else ids
    llm.drafter._rules = (mask, spoil(ids).contiguous(), factor)
    (output,) = llm.generate(prompts(1), replace(GREEDY, width=1))
    assert output.error is None
    with pytest.raises(ValueError, match="draft_ids"):
        llm.generate(prompts(1), replace(GREEDY, width=4))


def test_a_slot_twice_and_no_columns_are_refused(pair):
    llm = LLM(pair[0], max_requests=1, max_length=96)
    llm.generate(prompts(1), replace(GREEDY, max_new_tokens=2))
    state, plan = llm._scheduler.state, llm._scheduler._plan({0: llm.submit([3], GREEDY)}, (1,))
    with pytest.raises(ValueError, match="every slot once"):
        llm.target.verify_commit(state, replace(plan, slots=(0, 0), widths=(1, 1)), None)
    none = [
        t[:, :0] if t is state.block or t is state.choice or t is state.finite else t for t in state.tensors
    ]
    state.tensors = tuple(none)
    with pytest.raises(ValueError, match="at least 1 column"):
        llm.target.verify_commit(state, plan, None)


@pytest.mark.parametrize("sampled", [False, True])
def test_slots_that_are_copied_take_no_part(pair, monkeypatch, sampled):
    """The others' drafts are what they are with all, whoever is left out; those of the left out stay as they were."""
    llm = LLM(pair[0], drafter=f"{pair[1]}+lookup", max_requests=4, max_length=96)
    some, shares = llm.drafter._some, set()
    real = some.propose_some

    def checked(state, plan, noise, copied):
        whole = real(state, plan, noise, None).tokens.clone()
        some._tokens.fill_(-7)
        proposal = real(state, plan, noise, copied)
        column = torch.arange(1, state.widest)
        exists = column < state.effective[:, None]
        expected = torch.where(exists & ~copied[:, None], whole, -7)
        assert proposal.tokens.tolist() == expected.tolist()
        shares.add(float(copied[list(plan.drafting[0])].float().mean()))
        return proposal

    monkeypatch.setattr(some, "propose_some", checked)
    repeating = [[5, 6, 7] * n for n in (3, 4)]
    params = replace(SAMPLED if sampled else GREEDY, width=4)
    llm.generate([*prompts(4, seed=4), *repeating], params)
    assert 0.0 in shares and len(shares) > 1 and (1.0 in shares or not sampled)
    with pytest.raises(ValueError, match="copied"):
        monkeypatch.undo()
        state, plan = llm._scheduler.state, llm._scheduler._plan({0: llm.submit([3], GREEDY)}, (4,))
        some.propose_some(state, plan, None, torch.zeros(3, dtype=torch.bool))
