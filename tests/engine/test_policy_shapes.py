"""Policies that choose chains, trees and plain decoding request by request: answers stay plain decoding's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.policies import Fixed
from tests.engine.pair import WIDEST, plain, prompts, script_answers, sized, tiny_llm
from tests.engine.test_exactness import GREEDY, MODES
from tests.engine.tree_pair import LARGEST, TreeDrafter

TREES = {4: 9, WIDEST: LARGEST}


class Mixed:
    """Widths by what the prompt ends with; the even ones from 4 on stand for trees."""

    window = tuple(range(1, WIDEST + 1))
    trees = TREES

    def bind(self, embedding) -> None:
        pass

    def choose(self, last_logits):
        return 1 + last_logits.argmax(-1) % WIDEST


class Watching(TreeDrafter):
    """Keeps what the plans say."""

    def __init__(self) -> None:
        super().__init__(lambda slot, call: slot + call)
        self.plans: list[tuple] = []

    def propose(self, state, plan, noise):
        self.plans.append((plan.trees, plan.cost))
        return super().propose(state, plan, noise)


@pytest.mark.parametrize("slots", [1, 4])
def test_each_request_has_the_shape_that_was_chosen(slots):
    """Chains, trees and plain side by side, in every mode; what a request asks for itself goes first."""
    drafter, asked = Watching(), prompts(sized(24, 6), seed=5)
    each = [replace(list(MODES.values())[i % 3], max_new_tokens=8 + i % 5) for i in range(len(asked))]
    each[1], each[2] = replace(each[1], width=3), replace(each[2], width=3, tree=5)
    each[3] = replace(each[3], tree=WIDEST)
    script_answers(drafter, list(zip(asked, each, strict=True)), "float32", 30)
    llm = tiny_llm(drafter, policy=Mixed(), max_requests=slots)
    shapes = set()
    for i, (output, prompt, params) in enumerate(zip(llm.generate(asked, each), asked, each, strict=True)):
        assert output.token_ids == plain(prompt, replace(params, width=None, tree=None)).token_ids
        width, tree = output.stats.width, output.stats.tree
        if i > 3:
            assert tree == TREES.get(width, 0)
            shapes.add((width, tree))
        else:
            wanted = [tree, 0, 5, WIDEST if width > 1 else 0]
            assert tree == wanted[i] and (i in (0, 3) or width == 3)
    assert len(shapes) > sized(4, 1)
    assert any(trees and 0 in trees and max(trees) for trees, _ in drafter.plans) == (slots > 1)
    assert {cost for _, cost in drafter.plans} == {None}


@pytest.mark.parametrize("tree", [None, 7])
def test_costs_of_the_policy_reach_every_tree(tree):
    cost = tuple(float(n) for n in range(1, LARGEST + 1))
    drafter, (prompt,) = Watching(), prompts(1, seed=8)
    script_answers(drafter, [(prompt, GREEDY)], "float32", 30)
    llm = tiny_llm(drafter, policy=Fixed(4, LARGEST, cost), max_requests=1)
    output = llm.generate([prompt], replace(GREEDY, tree=tree))[0]
    assert output.token_ids == plain(prompt, GREEDY).token_ids
    assert set(drafter.plans) == {((tree or LARGEST,), cost)}
    llm.generate([prompt], replace(GREEDY, width=3))
    assert drafter.plans[-1] == (None, None)


def test_a_policy_of_chains_alone_is_asked_as_before():
    class Old:
        window = (1, 2)

        def bind(self, embedding) -> None:
            pass

        def choose(self, last_logits):
            return torch.full((len(last_logits),), 2)

    drafter, (prompt,) = Watching(), prompts(1, seed=9)
    script_answers(drafter, [(prompt, GREEDY)], "float32", 30)
    output = tiny_llm(drafter, policy=Old(), max_requests=1).generate([prompt], GREEDY)[0]
    assert (output.stats.width, output.stats.tree) == (2, 0)
    assert output.token_ids == plain(prompt, GREEDY).token_ids


def test_trees_that_the_drafter_does_not_make_are_refused():
    with pytest.raises(ValueError, match=rf"trees of at most {LARGEST} nodes, .* got 17; use fewer nodes"):
        tiny_llm(TreeDrafter(), policy=Fixed(4, LARGEST + 1))
    with pytest.raises(ValueError, match="at most 0"):
        tiny_llm(policy="2/2")
    policy = Fixed(4, 9)
    policy.node_cost = [1.0, 2.0]
    with pytest.raises(ValueError, match="node_cost: expected a tuple"):
        tiny_llm(TreeDrafter(), policy=policy)
    assert tiny_llm(TreeDrafter(), policy="4/9").generate([[5]], SamplingParams(max_new_tokens=1))
