"""The SpecBlock drafter beside plain PyTorch: the same logits, the same trees, two passes a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockpilot.drafters.specblock_checkpoint import load_specblock
from blockpilot.step import begin_block, draw_noise
from blockpilot.targets.stored import CheckpointError
from blockpilot_kernels import choose, gumbel_noise
from tests.drafters.rounds import Rounds
from tests.eagle3 import IDS
from tests.specblock import Reference
from tests.tiny import read_drafter, write_drafter

VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "without shift": {"architectures": ["LlamaForCausalLMSpecBlock"]},
    "whole vocabulary": {"ids": None},
    "three slots, three layers": {"diffspec_draft_token_num": 3, "num_hidden_layers": 3},
    "one slot": {"diffspec_draft_token_num": 1, "num_hidden_layers": 1},
}


class Watched(Rounds):
    """Rounds that keep what the passes of the one slot there is say, and the features of what is committed."""

    def __init__(self, *pair: Any, **options: Any) -> None:
        super().__init__(*pair, **options)
        self.features: list[Tensor] = []
        self.said: list[Tensor] = []

    def start(self, slot: int, prompt: Any, **request: Any) -> None:
        with torch.inference_mode():
            self.features = [self.target.prefill(slot, prompt)[1]]
        super().start(slot, prompt, **request)

    def step(self, slots: Any = None) -> None:
        self.said = []
        run, commit = self.drafter.run, self.drafter.commit

        def watched_run(*given: Any, **options: Any) -> Any:
            found = run(*given, **options)
            self.said.append(found[2].clone())
            return found

        def watched_commit(state: Any, plan: Any, features: Tensor) -> None:
            self.features.append(features[: int(state.count[0])].clone())
            commit(state, plan, features)

        with patch.multiple(self.drafter, run=watched_run, commit=watched_commit):
            super().step(slots)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_kind_of_config(load, specblock_for, reference_path, variant):
    """Both blocks of every step, over long and short prompts."""
    folders = specblock_for("llama", **VARIANTS[variant])
    reference, both = Reference.of(*folders), 0
    k = reference.slots
    for width, prompt in ((2 * k + 1, [5, *range(6, 20)]), (k + 1, [7]), (2, [9, 3]), (2 * k, [4] * 40)):
        rounds = Watched(*load(*folders))
        rounds.start(0, prompt, width=width, budget=20)
        while not rounds.state.done[0]:
            tokens, features = rounds.tokens(0), torch.cat(rounds.features)
            rounds.step()
            first = reference.draft(features, tokens)
            assert (rounds.said[0][:k] - reference.logits(first)).abs().max() < 3e-4
            block = rounds.blocks[0][-1]
            if len(block) > k + 1:
                second = reference.go_on(features, tokens, k - 1, block[k])
                assert (rounds.said[1][:k] - reference.logits(second)).abs().max() < 3e-4
                both += 1
    assert both > 2


def test_logits_behind_a_long_prompt(load, specblock_for, reference_path):
    folders = specblock_for("qwen3")
    reference = Reference.of(*folders)
    for length in (129, 130, 290):
        rounds = Watched(*load(*folders, capacity=400))
        prompt = [3 + i * i % 29 for i in range(length)]
        rounds.start(0, prompt, width=5, budget=12)
        for _ in range(2):
            tokens, features = rounds.tokens(0), torch.cat(rounds.features)
            rounds.step()
            expected = reference.logits(reference.draft(features, tokens))
            assert (rounds.said[0][:4] - expected).abs().max() < 3e-4


@pytest.mark.parametrize("tree", [0, 16])
def test_two_passes_a_step(load, specblock_for, tree):
    rounds = Rounds(*load(*specblock_for("llama"), slots=3), widest=16)
    for slot, width in enumerate((9, 5, 7)):
        rounds.start(slot, [5, 6, 7 + slot], width=width, budget=40, tree=tree if slot != 1 else 0)
    steps, before = 0, rounds.drafter.passes
    while not rounds.state.done.all():
        rounds.step()
        steps += 1
    assert steps > 3
    assert rounds.drafter.passes - before <= 2 * steps


def test_drafts_use_the_noise_of_the_position_they_guess(load, specblock_for, reference_path):
    rounds, ids = Watched(*load(*specblock_for("llama"), temperature=0.6)), torch.tensor(IDS)
    rounds.start(0, [9, 8, 7], width=9, budget=60, temperature=1.1, seed=11)
    for _ in range(4):
        before = int(rounds.state.length[0])
        rounds.step()
        logits = torch.cat([said[:4] for said in rounds.said])
        n, off = len(logits), torch.zeros(len(logits))
        g = gumbel_noise(torch.full((n,), 11), before + torch.arange(n), 32)[:, ids].contiguous()
        heat = torch.full((n,), 1.1 * 0.6)
        at, _ = choose(logits, g, heat, off.long(), off + 1, off, None, filtered=False)
        assert rounds.blocks[0][-1][1:] == ids[at].tolist()


Node = tuple[int, ...]  # tokens from the anchor down
Scores = Callable[[Tensor, int], Tensor]  # h [K, H], depth of its first guess → log q [K, V']


def grown(reference: Reference, h: Tensor, logq: Scores, begin: Node, score: float, first: bool) -> dict:
    """A block's chain and its siblings: node → (score, slot)."""
    found, chain, branching = {}, begin, True
    wide = reference.branches(h)
    for slot, row in enumerate(logq(h, len(begin) + 1)):
        count = 10 if first and slot == 0 else wide[slot]
        branching = branching and count > 0
        best = row.topk(10)
        pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        for at, value in pairs[: count if branching else 1]:
            found[(*chain, IDS[at])] = (score + value, slot)
        chain, score = (*chain, IDS[pairs[0][0]]), score + pairs[0][1]
    return found


def expected_tree(
    reference: Reference, features: Tensor, tokens: list[int], logq: Scores, deepest: int, budget: int
) -> list[Node]:
    h = reference.draft(features, tokens)
    found = {n: x for n, x in grown(reference, h, logq, (), 0.0, True).items() if len(n) <= deepest}
    chain = [n for n, (_, slot) in found.items() if slot == len(n) - 1]
    greedy = {n[:-1]: n for n in reversed(chain)}  # the likeliest child of a node comes first in its slot
    end = max((n for n in found if n in greedy.values()), key=len)
    starts = [n for n in found if n not in greedy.values() or (n == end and len(n) == reference.slots)]
    starts = sorted(starts, key=lambda n: -found[n][0])[:10]
    for node in starts:
        score, slot = found[node]
        second = reference.go_on(features, tokens, slot, node[-1])
        more = grown(reference, second, logq, node, score, False)
        found |= {n: x for n, x in more.items() if len(n) <= deepest}
    return sorted(found, key=lambda n: -found[n][0])[: budget - 1]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_tree_is_the_best_of_what_grows(load, specblock_for, temperature):
    folders = specblock_for("llama")
    reference, ids = Reference.of(*folders), torch.tensor(IDS)
    rounds = Watched(*load(*folders), widest=16)
    for width, budget in ((2, 9), (4, 16), (6, 12), (9, 16)):
        asked = {"width": width, "budget": 40, "tree": budget, "temperature": temperature, "seed": 7}
        rounds.start(0, [5, 6, 7, 20, 11], **asked)
        for _ in range(3):
            tokens, features = rounds.tokens(0), torch.cat(rounds.features)

            def logq(h: Tensor, depth: int, tokens: list[int] = tokens) -> Tensor:
                logits = reference.logits(h)
                if temperature:
                    position = len(tokens) - 1 + depth + torch.arange(len(h))
                    g = gumbel_noise(torch.full((len(h),), 7), position, 32)[:, ids]
                    logits = logits / temperature + g
                return logits.log_softmax(-1)

            assert tree_of(rounds) == expected_tree(reference, features, tokens, logq, width - 1, budget)
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


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"diffspec_draft_token_num": None}, "expected diffspec_draft_token_num to be an integer in 1"),
        ({"rank_classes": 5}, r"expected rank_classes to be an integer in 4\.\.4, got 5"),
        ({"architectures": ["LlamaForCausalLMSpecBlock"]}, "tensor shift_proj.0.weight: expected nothing"),
        ({"num_hidden_layers": 3}, r"tensor \S+: expected \[\d+(, \d+)?\], found nothing"),
        ({"diffspec_draft_token_num": 5}, r"position_queries.weight: expected \[5, 32\], found \[4, 32\]"),
    ],
)
def test_what_does_not_fit_is_refused(specblock_for, tmp_path, over, message):
    config, tensors = read_drafter(specblock_for("llama")[1])
    write_drafter(tmp_path / "d", {**config, **over}, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_specblock(tmp_path / "d")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_it_holds(load, implementation, specblock_for, dtype):
    _, drafter = load(*specblock_for("llama"), slots=3, capacity=128, dtype=dtype)
    held = drafter.cache.k.nbytes + drafter.cache.v.nbytes + drafter._pending.nbytes
    if implementation == "cpp":
        held += len(drafter._weights[0])
    else:
        linears = [drafter._condition, drafter._fuse, drafter._head, *drafter._shift]
        for layer in drafter.layers:
            linears += [layer.qkv, layer.out, layer.gate_up, layer.down]
        held += sum(x.bytes for x in linears) + drafter._embedding.nbytes
    assert held <= drafter.memory_bytes(drafter.config, 3, 128, dtype) <= 4 * held
