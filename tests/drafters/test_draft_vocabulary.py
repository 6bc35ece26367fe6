"""A draft head over part of the vocabulary: what it says, and that it says nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_checkpoint import load_dflash, write_draft_vocabulary
from blockpilot.drafters.dflash_cpp import CppDFlashDrafter
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot_kernels import choose, gumbel_noise
from tests.drafters.rounds import SLIDING, Rounds, in_blocks, load_pair
from tests.implementations import build, require
from tests.tiny import EOS

IDS = [0, 1, 3, 5, 6, 7, 9, 11, 12, 15, 17, 18, 21, 24, 26, 29, 31]  # not 4, a favourite, and not EOS
VOCAB = 32
Listed = Callable[..., tuple[Path, Path]]


@pytest.fixture
def listed(drafter_for, tmp_path) -> Listed:
    """`listed(ids, family, **config)` → folders of a target and of a drafter that drafts only those ids."""

    def make(ids: Sequence[int] = IDS, family: str = "llama", **config: object) -> tuple[Path, Path]:
        target, drafter = drafter_for(family, **config)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(drafter, folder)
        write_draft_vocabulary(folder, ids)
        return target, folder

    return make


def finished(rounds: Rounds, **request: object) -> Rounds:
    rounds.start(0, [5, *range(6, 20)], **{"width": 6, "budget": 40, **request})
    rounds.finish()
    return rounds


def drafted(rounds: Rounds, slot: int = 0) -> set[int]:
    return {i for block in rounds.blocks[slot] for i in block[1:]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_same_ids(load, implementation, drafter_for, listed, dtype):
    knobs = {"output_multiplier": 0.7, "final_logit_softcapping": 9.0}
    whole = finished(Rounds(*load(*drafter_for("llama", **knobs), dtype=dtype)))
    few = finished(Rounds(*load(*listed(**knobs), dtype=dtype)))
    found, expected = few.logits[0][0], whole.logits[0][0][:, IDS]
    if implementation == "cpp":
        assert torch.equal(found, expected)
    else:  # a product's kernel may depend on the number of its columns
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("kind", ["stored", "stored-int8", "stored-int16"])
def test_beside_blocks_too(drafter_for, listed, kind):
    """The head's blocks as the file has them: the same bits."""
    require("cpp")
    target, folder = listed()
    checkpoint, firsts = in_blocks(load_checkpoint(target)), []
    for place in (drafter_for("llama")[1], folder):
        loaded = build("cpp", checkpoint, 1, 128, weights=kind)
        drafter = CppDFlashDrafter(load_dflash(place), loaded, 1)
        loaded.use_features(drafter.feature_layers)
        firsts.append(finished(Rounds(loaded, drafter)).logits[0][0])
    assert torch.equal(firsts[1], firsts[0][:, IDS])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_answers_are_plain_and_drafts_stay_inside(load, listed, temperature):
    counts: set[int] = set()
    rounds = Rounds(*load(*listed(family="qwen3")))
    for seed in range(3):
        request = {"temperature": temperature, "seed": seed}
        plain = finished(rounds, width=1, **request).tokens(0)
        assert finished(rounds, **request).tokens(0) == plain
        assert drafted(rounds) <= set(IDS)
        counts |= set(rounds.counts[0])
    assert len(counts) > 1


def test_every_id_in_the_list_is_no_list(load, drafter_for, listed):
    whole = finished(Rounds(*load(*drafter_for("llama"))))
    every = finished(Rounds(*load(*listed(range(VOCAB)))))
    assert every.blocks == whole.blocks and every.counts == whole.counts
    assert all(map(torch.equal, every.logits[0], whole.logits[0]))


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_ids_that_are_never_drafted_are_not_missed(load, drafter_for, listed, temperature):
    """The same blocks, so the same τ; sampled with the noise of the id itself."""
    request = {"temperature": temperature, "seed": 4}
    whole = finished(Rounds(*load(*drafter_for("llama"))), **request)
    needed = sorted(drafted(whole))
    assert 1 < len(needed) < VOCAB - 4
    few = finished(Rounds(*load(*listed(needed))), **request)
    assert few.blocks == whole.blocks and few.counts == whole.counts


def test_implementations_draft_the_same(listed):
    require("cpp")
    folders = listed(**SLIDING)
    for request in ({}, {"temperature": 1.5, "seed": 3}, {"width": 8}):
        a, b = (
            finished(Rounds(*load_pair(*folders, implementation=name)), **request)
            for name in ("torch", "cpp")
        )
        assert a.blocks == b.blocks and a.counts == b.counts


def test_noise_is_that_of_the_target_id(load, listed):
    rounds, ids = Rounds(*load(*listed(), temperature=0.6)), torch.tensor(IDS)
    rounds.start(0, [9, 8, 7], width=6, budget=30, temperature=1.1, seed=11)
    for _ in range(5):
        before = int(rounds.state.length[0])
        rounds.step()
        logits = rounds.logits[0][-1]
        n, off = len(logits), torch.zeros(len(logits))
        g = gumbel_noise(torch.full((n,), 11), before + torch.arange(n), VOCAB)[:, ids].contiguous()
        heat = torch.full((n,), 1.1 * 0.6)
        at, _ = choose(logits, g, heat, off.long(), off + 1, off, None, filtered=False)
        assert rounds.blocks[0][-1][1:] == ids[at].tolist()


def test_stop_ids_are_banned_by_their_own_columns(load, listed):
    """3 lies in column 2: a banned 3 is not drafted, and a banned EOS, which has no column, bans no other id."""
    assert IDS[EOS] == 3 and EOS not in IDS
    rounds = Rounds(*load(*listed()))
    free = finished(rounds, stops=[], free_from=0)
    blocks, tokens = free.blocks[0], free.tokens(0)
    assert 3 in drafted(free) and EOS not in tokens
    assert finished(rounds, stops=[EOS], free_from=99).blocks[0] == blocks
    assert 3 not in drafted(finished(rounds, stops=[3], free_from=99))


@pytest.mark.parametrize(("tree", "drafts"), [(0, [7, 7, 7]), (8, [])])
def test_what_is_not_finite_drafts_the_first_id(load, listed, tree, drafts):
    """Or no node of a tree; and it is counted."""
    rounds = Rounds(*load(*listed([7, 9])))
    rounds.start(0, [5, 6, 7], width=4, budget=9, tree=tree)
    rounds.drafter.cache.k[:, 0] = float("nan")
    rounds.step()
    assert rounds.blocks[0][0][1:] == drafts
    assert int(rounds.drafter.non_finite) == 3


@pytest.mark.parametrize("weights", ["dense", "stored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_covers_the_head(listed, dtype, weights):
    """In the C++ decoder and on PyTorch: what the head adds to what is held, it adds to the estimate at least."""
    require("cpp")
    target, folder = listed(range(VOCAB))
    published = load_dflash(folder)
    loaded = build("cpp", in_blocks(load_checkpoint(target)), 1, 64, dtype, weights)
    held = [
        len(CppDFlashDrafter(replace(published, vocabulary=v), loaded, 1)._weights[0])
        for v in (None, published.vocabulary)
    ]
    sizes = (published.config, 1, 64, dtype)
    estimates = [CppDFlashDrafter.memory_bytes(*sizes, n) for n in (0, VOCAB)]
    assert 0 < held[1] - held[0] <= estimates[1] - estimates[0]
    rows = VOCAB * published.config.model.hidden_size
    assert DFlashDrafter.memory_bytes(*sizes, VOCAB) - DFlashDrafter.memory_bytes(*sizes) == 2 * 4 * rows


def test_few_ids_need_few_logits(config):
    from blockpilot.drafters.dflash_config import DFlashConfig

    parsed = DFlashConfig.from_json(config)
    for kind in (DFlashDrafter, CppDFlashDrafter):
        many, few = (kind.memory_bytes(parsed, 64, 8, torch.float32, n) for n in (0, 2))
        assert many - few > 0.8 * 2 * 4 * 64 * 2 * parsed.block_size * (VOCAB - 2)


def test_loading_counts_the_head(listed, monkeypatch):
    require("cpp")
    target, folder = listed()
    asked: list[int] = []
    monkeypatch.setattr(
        "blockpilot.drafters.dflash.require_fits", lambda parts, _: asked.append(parts["drafter"])
    )
    _, drafter = load_pair(target, folder, implementation="cpp", capacity=64)
    assert asked == [drafter.memory_bytes(drafter.config, 1, 64, torch.float32, len(IDS))]
