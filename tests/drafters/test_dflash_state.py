"""What the drafter remembers between rounds, and what may not touch it."""

from __future__ import annotations

import pytest
import torch

from blockpilot.drafters import dflash
from blockpilot.targets import cpp_target, torch_target
from blockpilot_kernels import choose, gumbel_noise
from tests.drafters.rounds import SLIDING, Rounds, remembered, spoil
from tests.tiny import EOS

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_after_every_round_the_state_is_a_fresh_one(load, drafter_for, dtype):
    """Block K/V are never kept and nothing is missing: a second request in the same slot included."""
    folders = drafter_for("llama")
    rounds, fresh = Rounds(*load(*folders, dtype=dtype)), Rounds(*load(*folders, dtype=dtype))
    counts: set[int] = set()
    for prompt, width, temperature in (([5, *range(6, 30)], 4, 0.0), ([8, 9], 6, 1.0), ([7], 8, 0.0)):
        rounds.start(0, prompt, width=width, budget=30, temperature=temperature, seed=5)
        while not rounds.state.done[0]:
            rounds.step()
            so_far = rounds.tokens(0)[:-1]
            with torch.inference_mode():
                fresh.drafter.begin(0, fresh.target.prefill(0, so_far)[1], so_far)
            seen, expected = (remembered(r.drafter, 0, len(so_far)) for r in (rounds, fresh))
            assert torch.equal(seen, expected)
        counts.update(rounds.counts[0])
    assert {1, 2, 3, 4} <= counts


def poison(rounds: Rounds, written: dict[int, int]) -> None:
    """NaN into every cache entry of both models that holds no committed position."""
    for cache in (rounds.target.cache, rounds.drafter.cache):
        for slot in range(cache.dump + 1):
            spoil(cache, slot, written.get(slot, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_wherever_nothing_was_written(load, drafter_for, dtype):
    def run(poisoned: bool) -> Rounds:
        rounds = Rounds(*load(*drafter_for("llama", **SLIDING), slots=2, dtype=dtype))
        poison(rounds, {})
        rounds.start(0, [5, 6, 7], width=5, budget=30, temperature=0.7, seed=1)
        rounds.start(1, [9] * 20, width=3, budget=20)
        while not rounds.state.done.all():
            if poisoned:
                poison(rounds, {i: int(rounds.state.length[i]) - 1 for i in range(2)})
            rounds.step()
        return rounds

    clean, dirty = run(False), run(True)
    for slot in range(2):
        assert dirty.tokens(slot) == clean.tokens(slot)
        assert all(map(torch.equal, dirty.logits[slot], clean.logits[slot]))
        assert torch.isfinite(torch.cat(clean.logits[slot])).all()


NEIGHBOURS = {
    "alone in another slot": [],
    "one": [([4, 4], 3, 0.0)],
    "many, of every width": [([3 + i] * (1 + 5 * i), w, t) for i, (w, t) in enumerate(
        [(1, 0.0), (8, 1.0), (2, 0.5), (12, 0.0), (1, 1.0), (5, 0.9)]
    )],
}  # fmt: skip


@pytest.mark.parametrize("around", NEIGHBOURS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_draft_logits_do_not_depend_on_the_batch(load, drafter_for, dtype, around):
    """Bit for bit, greedy and sampled, whatever runs beside the request and whichever slot it has."""
    folders = drafter_for("llama", **SLIDING)
    for temperature in (0.0, 0.8):
        request = {"width": 5, "budget": 24, "temperature": temperature, "seed": 77}
        solo = Rounds(*load(*folders, dtype=dtype))
        solo.start(0, [6, 7, 8, 9], **request)
        solo.finish()
        batch = Rounds(*load(*folders, slots=len(NEIGHBOURS[around]) + 2, dtype=dtype))
        for i, (prompt, width, heat) in enumerate(NEIGHBOURS[around]):
            batch.start(i, prompt, width=width, budget=40 - 4 * i, temperature=heat, seed=i)
        slot = len(NEIGHBOURS[around])
        batch.start(slot, [6, 7, 8, 9], **request)
        batch.finish()
        assert batch.tokens(slot) == solo.tokens(0)
        assert batch.blocks[slot] == solo.blocks[0]
        assert all(map(torch.equal, batch.logits[slot], solo.logits[0]))


def test_a_broken_neighbour_changes_nothing(load, drafter_for):
    """NaN in another slot's context reaches only that slot's drafts."""
    folders = drafter_for("llama")
    solo = Rounds(*load(*folders))
    solo.start(0, [6, 7, 8, 9], width=5, budget=20)
    solo.finish()
    pair = Rounds(*load(*folders, slots=2))
    pair.start(0, [5, 5], width=7, budget=40)
    pair.start(1, [6, 7, 8, 9], width=5, budget=20)
    spoil(pair.drafter.cache, 0, 1, 2)
    while not pair.state.done[1]:
        pair.step()
    assert not torch.isfinite(pair.logits[0][0]).any()
    assert pair.blocks[0][0][1:] == [0] * 6
    assert all(map(torch.equal, pair.logits[1], solo.logits[0]))


@pytest.mark.parametrize("rows", [16, 48])
def test_prefill_chunks_leave_no_trace(load, drafter_for, monkeypatch, rows):
    """Prompts around a chunk's end: the same context, and so the same first drafts."""
    folders = drafter_for("llama")
    for length in (1, 15, 16, 17, 47, 48, 49, 100):
        prompt = [3 + (i * i) % 29 for i in range(length)]
        seen = []
        for chunk in (128, rows):
            for module in (torch_target, cpp_target):
                monkeypatch.setattr(module, "PREFILL_ROWS", chunk)
            monkeypatch.setattr(dflash, "CONTEXT_ROWS", chunk)
            rounds = Rounds(*load(*folders))
            rounds.start(0, prompt, width=5, budget=2)
            context = remembered(rounds.drafter, 0, length)
            rounds.step()
            seen.append((context, rounds.logits[0][0]))
        assert torch.equal(seen[0][0], seen[1][0])
        assert torch.equal(seen[0][1], seen[1][1])


def test_up_to_the_last_position(load, drafter_for):
    """Blocks shrink at the end of the context: the answer is the start of a longer engine's."""
    folders = drafter_for("llama")
    roomy = Rounds(*load(*folders, capacity=128))
    tight = Rounds(*load(*folders, capacity=64))
    for length in (50, 56, 58, 60, 61, 62, 63):
        for rounds in (roomy, tight):
            rounds.start(0, [5 + i % 20 for i in range(length)], width=8, budget=60)
            rounds.finish()
        assert len(tight.tokens(0)) == 64
        assert tight.tokens(0) == roomy.tokens(0)[:64]


def test_drafts_use_the_noise_of_the_position_they_guess(load, drafter_for):
    """Column j's token is argmax(z + g) with g of position cached + j, per request, among mixed ones."""
    rounds = Rounds(*load(*drafter_for("llama"), slots=4, temperature=0.6))
    requests = [(5, 1.1, 11), (1, 0.9, 12), (4, 0.0, 13), (7, 0.3, -14)]
    for slot, (width, temperature, seed) in enumerate(requests):
        rounds.start(slot, [9, 8, 7][: slot + 1], width=width, budget=30, temperature=temperature, seed=seed)
    for _ in range(5):
        before = rounds.state.length.clone()
        rounds.step()
        for slot, (width, temperature, seed) in enumerate(requests):
            if width == 1 or not rounds.state.effective[slot]:
                continue
            logits = rounds.logits[slot][-1]
            n = len(logits)
            position = before[slot] - 1 + torch.arange(1, n + 1)
            g = gumbel_noise(torch.full((n,), seed), position, logits.shape[1]) if temperature else None
            heat, off = torch.full((n,), temperature * 0.6), torch.zeros(n)
            expected, _ = choose(logits, g, heat, off.long(), off + 1, off, None, filtered=False)
            assert rounds.blocks[slot][-1][1:] == expected.tolist()


def test_a_sampled_answer_is_the_plain_one(load, drafter_for):
    """With every accepted count: the drafter changes only the number of rounds."""
    rounds = Rounds(*load(*drafter_for("qwen3")))
    counts: dict[int, set[int]] = {2: set(), 5: set()}
    for seed in range(3):
        request = {"budget": 40, "temperature": 6.0, "seed": seed}
        rounds.start(0, [5, 6], width=1, **request)
        rounds.finish()
        plain = rounds.tokens(0)
        for width, seen in counts.items():
            rounds.start(0, [5, 6], width=width, **request)
            rounds.finish()
            assert rounds.tokens(0) == plain
            seen.update(rounds.counts[0])
    assert counts == {2: {1, 2}, 5: {1, 2, 3, 4, 5}}


def test_no_stop_id_is_drafted_before_it_is_allowed(load, drafter_for):
    """Up to the position before `free_from`, and from it on they are."""
    rounds = Rounds(*load(*drafter_for("llama")))
    stops = {3, EOS}
    last_banned, first_free = 0, 0
    for free_from in range(6, 16):
        rounds.start(0, [5, 6, 7], width=6, budget=20, stops=sorted(stops), free_from=free_from)
        rounds.finish()
        position = 4
        for block, count in zip(rounds.blocks[0], rounds.counts[0], strict=True):
            drafted = dict(enumerate(block[1:], position))
            assert not stops & {t for p, t in drafted.items() if p < free_from}
            last_banned += free_from - 1 in drafted
            first_free += drafted.get(free_from) in stops
            position += count
    assert last_banned
    assert first_free


def test_features_of_another_prompt_are_refused(load, drafter_for):
    _, drafter = load(*drafter_for("llama"))
    with pytest.raises(ValueError, match=r"features: expected \(3, 64\), got \(2, 64\)"):
        drafter.begin(0, torch.zeros(2, 64), [1, 2, 3])


def test_a_wider_engine_than_the_window_is_refused(load, drafter_for):
    target, drafter = load(*drafter_for("llama", block_size=2))
    rounds = Rounds(target, drafter, widest=5)
    assert drafter.window == (1, 2, 3, 4)
    rounds.start(0, [5], width=5, budget=9)
    with pytest.raises(ValueError, match="at most 4"):
        rounds.step()
