"""Prompt lookup alone and over another drafter: what it copies, and that no output shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockpilot import LLM
from blockpilot.drafters import Proposal, load_drafter
from blockpilot.drafters.lookup import LONGEST, SURE, PromptLookup, WithLookup
from blockpilot.plan import StepPlan
from blockpilot.state import State
from tests.engine.pair import (
    WIDEST,
    ScriptedDrafter,
    cycling,
    plain,
    prompts,
    script_answers,
    sized,
    tiny_folder,
    tiny_llm,
    write_tokenizer,
)
from tests.engine.test_exactness import MODES
from tests.tiny import save_drafter, save_target

LOOP = [7, 8, 9, 7, 8, 9, 7, 8, 9]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("over", [False, True])
def test_outputs_are_those_of_plain_decoding(mode, over):
    """Alone and over a drafter that is right now and then; prompts with and without repetition in one batch."""
    params = replace(MODES[mode], max_new_tokens=sized(40, 8))
    asked = [*prompts(sized(5, 1), seed=2), LOOP]
    drafter = PromptLookup()
    if over:
        scripted = ScriptedDrafter(cycling)
        script_answers(scripted, [(p, params) for p in asked], "float32", sized(50, 16))
        drafter = WithLookup(scripted)
    expected = [plain(p, params).token_ids for p in asked]
    llm = tiny_llm(drafter, max_requests=3)
    for width in sized((2, 3, WIDEST), (4,)):
        outputs = llm.generate(asked, replace(params, width=width))
        assert [o.token_ids for o in outputs] == expected
    kept = sum(sum(o.stats.kept) for o in outputs)
    assert kept > (sum(o.stats.steps for o in outputs) if over else 0)


def proposals(drafter, tokens: list[list[int]], trees: tuple[int, ...] | None = None) -> torch.Tensor:
    """[slots, 5] what is proposed after `tokens` of each slot, at width 6."""
    slots = len(tokens)
    state = State.allocate(slots, 64, 6, 1, "cpu")
    for slot, ids in enumerate(tokens):
        state.tokens[slot, : len(ids)] = torch.tensor(ids)
        state.length[slot] = len(ids)
        state.done[slot] = False
    plan = StepPlan(tuple(range(slots)), (6,) * slots, slots, 64, torch.device("cpu"), trees=trees)
    return drafter.propose(state, plan, None).tokens[:slots]


class Nines(ScriptedDrafter):
    """Drafts 9 everywhere, and every tree a chain."""

    largest_tree = 6

    def propose(self, state, plan, noise) -> Proposal:
        tokens = torch.full((state.block.shape[0], 5), 9)
        order = torch.arange(5).expand_as(tokens)
        return Proposal(tokens, order - 1, order + 1, torch.full((len(tokens),), 6))


def test_copies_only_what_is_sure():
    long, short = [1, 2, 3, 4, 5, 6, 1, 2, 3], [1, 2, 3, 4, 5, 6, 0, 2, 3]
    assert (SURE, LONGEST) == (3, 8)
    drafts = proposals(WithLookup(Nines()), [long, short, long], (0, 0, 6))
    assert drafts.tolist() == [[4, 5, 6, 1, 2], [9] * 5, [9] * 5]  # a tree is left as it is
    assert proposals(PromptLookup(), [long, short])[:, :3].tolist() == [[4, 5, 6], [4, 5, 6]]


def test_names(tmp_path):
    target = save_target(tmp_path / "target", vocab=48, eos_token_id=1)
    write_tokenizer(target)
    folder = save_drafter(tmp_path / "drafter", target, block_size=4, seed=1)
    llm = tiny_llm()
    assert isinstance(load_drafter("lookup", llm.target, 1), PromptLookup)
    with LLM(target, drafter=folder, max_requests=1, max_length=64) as one:
        plain_one = one.drafter
        both = load_drafter(f"{folder}+lookup", one.target, 1)
    assert isinstance(both, WithLookup)
    assert both.kind == "dflash+lookup"
    assert both.fingerprint == f"{plain_one.fingerprint}+lookup-3-8"
    assert (both.window, both.block_size) == (plain_one.window, plain_one.block_size)
    assert (both.largest_tree, both.feature_layers) == (plain_one.largest_tree, plain_one.feature_layers)
    with pytest.raises(ValueError, match="no drafter"):
        LLM(tiny_folder(), drafter="nowhere+lookup")
