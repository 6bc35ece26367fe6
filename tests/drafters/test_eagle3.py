"""The EAGLE-3 drafter beside plain PyTorch: the same logits at every depth, and the same trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.step import begin_block, draw_noise
from blockpilot_kernels import choose, gumbel_noise
from tests.drafters.pair_rounds import Watched
from tests.drafters.rounds import Rounds
from tests.eagle3 import IDS, reference_of

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "whole vocabulary": {"ids": None},
    "normed residual": {"norm_before_residual": True},
    "biases": {"attention_bias": True},
    "one layer read": {LAYER_IDS: [3]},
    "layers out of order": {"eagle_config": {LAYER_IDS: [2, 0, 1, 0]}},
    "other sizes": {
        "hidden_size": 48,
        "target_hidden_size": 32,
        "intermediate_size": 40,
        "num_key_value_heads": 1,
    },
}


def check_every_depth(folders: tuple[Path, Path], rounds: Watched, limit: float) -> set[int]:
    """Compare what was said in each step with the reference; returns the counts that occurred."""
    reference, drafted = reference_of(*folders), 0
    features, tokens, prompt = torch.cat(rounds.features), rounds.tokens(0), len(rounds.features[0])
    at = prompt
    for block, count, said in zip(rounds.blocks[0], rounds.counts[0], rounds.said, strict=True):
        assert block[0] == tokens[at]
        for depth, logits in enumerate(said[: len(block) - 1]):
            expected = reference.logits_of(features[:at], tokens[: at + 1], block[1 : 1 + depth])
            assert (logits - expected).abs().max() <= limit, (at, depth)
            drafted += 1
        at += count
    assert drafted > 5
    return set(rounds.counts[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_kind_of_config(load, eagle3_for, reference_path, variant):
    folders = eagle3_for("llama", **VARIANTS[variant])
    counts: set[int] = set()
    for width, prompt in ((6, [5, *range(6, 20)]), (4, [7]), (3, [9, 3]), (9, [4] * 40)):
        rounds = Watched(*load(*folders))
        rounds.start(0, prompt, width=width, budget=24)
        rounds.finish()
        counts |= check_every_depth(folders, rounds, 2e-4)
    assert len(counts) >= 3


def test_logits_behind_a_long_prompt(load, eagle3_for, reference_path):
    """Longer than what `begin` takes at once."""
    folders = eagle3_for("qwen3")
    for length in (129, 130, 300):
        rounds = Watched(*load(*folders, capacity=400))
        rounds.start(0, [3 + i * i % 29 for i in range(length)], width=4, budget=12)
        rounds.finish()
        check_every_depth(folders, rounds, 2e-4)


def test_drafts_use_the_noise_of_the_position_they_guess(load, eagle3_for, reference_path):
    """Depth d's token is argmax(z + g) with g of position cached + d, by its target id."""
    rounds, ids = Watched(*load(*eagle3_for("llama"), temperature=0.6)), torch.tensor(IDS)
    rounds.start(0, [9, 8, 7], width=6, budget=30, temperature=1.1, seed=11)
    for _ in range(5):
        before = int(rounds.state.length[0])
        rounds.step()
        logits = rounds.said[-1]
        n, off = len(logits), torch.zeros(len(logits))
        g = gumbel_noise(torch.full((n,), 11), before + torch.arange(n), 32)[:, ids].contiguous()
        heat = torch.full((n,), 1.1 * 0.6)
        at, _ = choose(logits, g, heat, off.long(), off + 1, off, None, filtered=False)
        assert rounds.blocks[0][-1][1:] == ids[at].tolist()


Node = tuple[int, ...]  # tokens from the anchor down


def expected_tree(logq: Callable[[Node], Tensor], deepest: int, budget: int, beam: int) -> dict[Node, float]:
    """EAGLE's tree by its definition: expand the best `beam` of a depth, keep the best `budget` nodes of all."""
    front: dict[Node, float] = {(): 0.0}
    found: dict[Node, float] = {}
    for _ in range(deepest):
        children = {}
        for node, score in front.items():
            best = logq(node).topk(beam)
            for at, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                children[(*node, IDS[at])] = score + value
        found |= children
        front = dict(sorted(children.items(), key=lambda c: -c[1])[:beam])
    return dict(sorted(found.items(), key=lambda c: -c[1])[: budget - 1])


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_tree_is_the_best_of_what_grows(load, eagle3_for, temperature):
    folders = eagle3_for("llama")
    reference = reference_of(*folders)
    rounds = Watched(*load(*folders), widest=16)
    prompt, ids = [5, 6, 7, 20, 11], torch.tensor(IDS)
    for width, budget in ((2, 9), (4, 16), (6, 12)):
        asked = {"width": width, "budget": 30, "tree": budget, "temperature": temperature, "seed": 7}
        rounds.start(0, prompt, **asked)
        for _ in range(3):
            tokens, features = rounds.tokens(0), torch.cat(rounds.features)

            def logq(node: Node, tokens: list[int] = tokens, features: Tensor = features) -> Tensor:
                logits = reference.logits_of(features, tokens, node)
                if temperature:
                    position = torch.tensor([len(tokens) + len(node)])
                    logits = logits / temperature + gumbel_noise(torch.tensor([7]), position, 32)[0, ids]
                return logits.log_softmax(-1)

            expected = expected_tree(logq, width - 1, budget, rounds.drafter.beam)
            nodes = tree_of(rounds)
            assert nodes == list(expected)
            rounds.step()


def tree_of(rounds: Rounds) -> list[Node]:
    """The paths of slot 0's next proposal, in its order."""
    with torch.inference_mode():
        plan = rounds.plan([0])
        begin_block(rounds.state)
        proposal = rounds.drafter.propose(rounds.state, plan, draw_noise(rounds.state, plan, 32))
    paths: list[Node] = []
    for i in range(int(proposal.nodes[0]) - 1):
        above, depth = int(proposal.parent[0, i]), int(proposal.depth[0, i])
        assert above < i
        path = (*(paths[above] if above >= 0 else ()), int(proposal.tokens[0, i]))
        assert len(path) == depth
        paths.append(path)
    return paths
