"""Sampling through the whole engine: the right distribution, one noise for both sides, and checks that can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

import blockpilot.step as step_module
from blockpilot import SamplingParams
from blockpilot.drafters import Proposal
from blockpilot.targets.cpp_target import CppTarget
from blockpilot_kernels import choose, gumbel_noise
from tests.engine.inside import change_logits
from tests.engine.pair import VOCAB, WIDEST, ScriptedDrafter, plain, prompts, script_answers, sized, tiny_llm

BASE = SamplingParams(max_new_tokens=120, ignore_eos=True, temperature=0.9)
LOGITS = torch.linspace(0, 4, VOCAB)[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))]
SETTINGS = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "all": {"top_k": 12, "top_p": 0.8, "min_p": 0.1, "temperature": 1.4},
}


class GuessingDrafter(ScriptedDrafter):
    """Always proposes the three most likely ids in turn: often right, often wrong."""

    def begin(self, slot, features, tokens) -> None:
        pass

    def propose(self, state, plan, noise) -> Proposal:
        best = LOGITS.topk(3).indices.repeat(WIDEST)[: state.widest - 1]
        tokens = best.expand(state.block.shape[0], -1)
        order = torch.arange(tokens.shape[1])
        return Proposal(tokens, (order - 1).expand_as(tokens), (order + 1).expand_as(tokens))


def forced_engine(**options):
    """A target whose logits are the same everywhere, so every token is one draw from one known distribution."""
    llm = tiny_llm(GuessingDrafter(), max_requests=8, **options)
    change_logits(llm, lambda logits: LOGITS.expand(len(logits), -1).contiguous())
    return llm


def expected_distribution(params: SamplingParams) -> torch.Tensor:
    """Reference filter in float64: temperature, then top-k, then top-p on the rest, then min-p."""
    p = (LOGITS.double() / params.temperature).softmax(-1)
    order = p.argsort(descending=True)
    keep = torch.ones(VOCAB, dtype=torch.bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    q = torch.where(keep, p, 0) / p[keep].sum()
    before = q[order].cumsum(0) - q[order]
    keep[order[before >= params.top_p]] = False
    keep &= p >= params.min_p * p.max()
    q = torch.where(keep, p, 0)
    return q / q.sum()


def draws(llm, params: SamplingParams, width: int) -> list[list[int]]:
    each = [replace(params, width=width, seed=100 + i) for i in range(16)]
    return [o.token_ids for o in llm.generate([[3, 4, 5]] * len(each), each)]


def fits(sequences: list[list[int]], params: SamplingParams) -> bool:
    expected = expected_distribution(params)
    counts = torch.bincount(torch.tensor(sequences).flatten(), minlength=VOCAB).double()
    if counts[expected == 0].sum() > 0:
        return False
    big = expected * counts.sum() >= 5
    observed = [*counts[big].tolist(), counts[~big].sum().item()]
    wanted = [*(expected[big] * counts.sum()).tolist(), (expected[~big] * counts.sum()).sum().item()]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    return chisquare(observed, wanted, sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_distribution_equals_the_filtered_softmax(setting, width):
    params = replace(BASE, **SETTINGS[setting])
    llm = forced_engine()
    sequences = draws(llm, params, width)
    assert fits(sequences, params)
    assert independent(sequences)


def independent(sequences: list[list[int]]) -> bool:
    """Neighbouring positions and different requests agree no more often than independent draws do."""
    ids = torch.tensor(sequences)
    flat = torch.bincount(ids.flatten(), minlength=VOCAB).double() / ids.numel()
    chance = float((flat**2).sum())
    for same in ((ids[:, 1:] == ids[:, :-1]), (ids[1:] == ids[:-1])):
        n = same.numel()
        if abs(same.double().mean().item() - chance) > 5 * (chance * (1 - chance) / n) ** 0.5:
            return False
    return True


def faulty_noise(change):
    """A `draw_noise` with its key changed: change(state, plan, position) → seed, position."""

    def draw(state, plan, vocab):
        return gumbel_noise(*change(state, plan, step_module.chosen_position(state, plan)), vocab)

    return draw


def test_planted_same_noise_at_every_position_is_caught(monkeypatch):
    def change(state, plan, position):
        return state.seed[plan.rows.slot], torch.zeros_like(position)

    monkeypatch.setattr(step_module, "draw_noise", faulty_noise(change))
    assert not independent(draws(forced_engine(), BASE, 4))


def test_planted_same_noise_for_two_requests_is_caught(monkeypatch):
    def change(state, plan, position):
        return torch.zeros_like(position), position

    monkeypatch.setattr(step_module, "draw_noise", faulty_noise(change))
    assert not independent(draws(forced_engine(), BASE, 4))


def test_planted_filter_on_the_drafting_side_only_is_caught(monkeypatch):
    """The target side has to filter; dropping its filter shows in the distribution."""
    right = step_module.choose_rows

    def unfiltered(state, plan, logits, noise, position):
        return right(state, replace(plan, filtered=False), logits, noise, position)

    monkeypatch.setattr(step_module, "choose_rows", unfiltered)
    monkeypatch.setattr(CppTarget, "verify_commit", None)
    params = replace(BASE, top_k=5)
    assert not fits(draws(forced_engine(), params, 4), params)


def identical(params: SamplingParams, width: int = 4) -> bool:
    """Whether the engine as it stands equals the plain decoder of the untouched one."""
    asked = prompts(3, seed=21)
    drafter = ScriptedDrafter()
    script_answers(drafter, [(p, params) for p in asked], "float32", 40)
    outputs = tiny_llm(drafter, max_requests=2).generate(asked, replace(params, width=width))
    return [o.token_ids for o in outputs] == [plain(p, params).token_ids for p in asked]


SHORT = replace(BASE, max_new_tokens=sized(30, 10), seed=5)


def test_planted_noise_keyed_by_column_is_caught(monkeypatch):
    assert identical(SHORT)

    def change(state, plan, position):
        return state.seed[plan.rows.slot], plan.rows.column

    monkeypatch.setattr(step_module, "draw_noise", faulty_noise(change))
    assert not identical(SHORT)


def test_planted_fresh_draw_on_reject_is_caught(monkeypatch):
    """The token after a rejection drawn with other noise than plain decoding would use at that position."""
    right = step_module.commit_choices

    def redraw(state):
        agrees = (state.block[:, 1:] == state.choice[:, :-1]).long().cumprod(1).sum(1)
        fresh = gumbel_noise(state.seed + 1, state.length, VOCAB).argmax(-1)
        rejected = agrees < state.effective - 1
        at = agrees.clamp(max=state.widest - 1)[:, None]
        state.choice.scatter_(
            1, at, torch.where(rejected[:, None], fresh[:, None], state.choice.gather(1, at))
        )
        right(state)

    monkeypatch.setattr(step_module, "commit_choices", redraw)
    monkeypatch.setattr(CppTarget, "verify_commit", None)
    assert not identical(SHORT)


class PerfectDrafter(ScriptedDrafter):
    """Knows the target's own logits at every position and draws from them as a drafter must.

    `shift` moves the noise by that many columns, `by_row` keys it by a permuted draft vocabulary.
    """

    def __init__(self, shift: int = 0, by_row: bool = False) -> None:
        super().__init__()
        self.shift, self.by_row = shift, by_row
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}

    def propose(self, state, plan, noise) -> Proposal:
        tokens = torch.zeros(state.block.shape[0], state.widest - 1, dtype=torch.long)
        ones = torch.ones(1)
        off = (torch.zeros(1, dtype=torch.long), ones, torch.zeros(1), None)
        for start, slot, width in zip(plan.rows.starts, plan.slots, plan.widths, strict=True):
            for j in range(1, width):
                known = self.logits[self._prompt[slot]]
                row = known[min(int(state.length[slot]) - 2 + j, len(known) - 1)][None]
                g = noise[start + min(j - 1 + self.shift, width - 1)][None]
                g = g.flip(-1) if self.by_row else g
                tokens[slot, j - 1] = choose(row, g, state.temperature[slot][None], *off, filtered=False)[0][
                    0
                ]
        order = torch.arange(tokens.shape[1])
        return Proposal(tokens, (order - 1).expand_as(tokens), (order + 1).expand_as(tokens))


@pytest.mark.parametrize(("shift", "by_row", "kept"), [(0, False, True), (1, False, False), (0, True, False)])
def test_a_drafter_with_the_targets_distribution_is_always_accepted(shift, by_row, kept):
    """q = p with the same noise: every draft is kept. Noise off by a column or keyed by draft row: not."""
    (prompt,) = prompts(1, seed=22)
    params = replace(SHORT, max_new_tokens=sized(25, 11), temperature=1.5)
    answer = plain(prompt, params).token_ids
    drafter = PerfectDrafter(shift, by_row)
    llm = tiny_llm(drafter, max_requests=1)
    with torch.inference_mode():
        all_logits = [
            llm.target.prefill(0, (prompt + answer)[:n])[0] for n in range(1, len(prompt + answer) + 1)
        ]
    drafter.logits[tuple(prompt)] = torch.stack(all_logits)
    output = llm.generate([prompt], replace(params, width=5))[0]
    assert output.token_ids == answer
    every_draft_kept = output.stats.steps == -(-(len(answer) - 1) // 5)
    assert every_draft_kept == kept
