"""One step: draft, verify, accept, commit. No device value is read on the host in here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from blockpilot.drafters import Drafter, Proposal
from blockpilot.output import TokenLogprob
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot.targets import Target
from blockpilot.tree import Tree, plant
from blockpilot_kernels import accept_commit, choose, gumbel_noise
from blockpilot_kernels.draft_tree import largest


@dataclass(frozen=True)
class Logprobs:
    """Raw-distribution log-probabilities of packed rows: chosen [N], top ids and values [N, n]."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def of(self, rows: Tensor) -> Logprobs:
        """Those of packed rows [N]."""
        return Logprobs(self.chosen[rows], self.top_ids[rows], self.top[rows])

    def entries(self, start: int, tokens: list[int], top: int) -> list[TokenLogprob]:
        """Those of `tokens`, which the rows from `start` on committed, each with the `top` likeliest ids."""
        at = slice(start, start + len(tokens))
        chosen, ids, values = (t[at].tolist() for t in (self.chosen, self.top_ids, self.top))
        return [
            TokenLogprob(t, c, tuple(zip(ids[j][:top], values[j][:top], strict=True)))
            for j, (t, c) in enumerate(zip(tokens, chosen, strict=True))
        ]


@dataclass(frozen=True)
class Report:
    """What one step did to a slot: `accepted` drafts of `effective` columns, `tokens` committed, FINISH_* code."""

    accepted: int
    effective: int
    finish: int
    tokens: list[int]


@dataclass
class StepClock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def run_step(
    state: State, plan: StepPlan, target: Target, drafter: Drafter | None, clock: StepClock
) -> tuple[list[Report] | None, Logprobs | None]:
    """Advance every active slot by 1 … width tokens. Reports come back from a target that has them on the host;
    None: `read_commit` reads them.

    The emitted token at each position is the target's own choice there (argmax, or the Gumbel draw of its
    seed and position), so what the drafter proposes decides only how many of them one step yields.
    """
    fused = plan.logprobs is None and target.verify_commit is not None
    if plan.drafts or not fused:
        begin_block(state)
    noise = draw_noise(state, plan, target.config.vocab_size)
    tree: Tree | None = None
    trees: tuple[Proposal, ...] = ()
    if plan.drafts:
        assert drafter is not None  # widths above 1 are refused at admission without a drafter
        proposal = drafter.propose(state, plan, noise)
        state.block[:, 1:] = proposal.tokens
        trees = (proposal,) if plan.nodes else ()
        tree = plant(state, plan, proposal) if plan.nodes and not fused else None
    clock.lap("draft")

    reports = logprobs = None
    if fused:
        assert target.verify_commit is not None
        features, numbers = target.verify_commit(state, plan, noise, *trees)
        reports = _reports(numbers)
        clock.lap("verify")
    else:
        features, logprobs = _verify_commit(state, plan, target, noise, tree, clock)

    if plan.drafts:
        assert drafter is not None
        drafter.commit(state, plan, features)
    clock.lap("commit")
    return reports, logprobs


def _verify_commit(
    state: State, plan: StepPlan, target: Target, noise: Tensor | None, tree: Tree | None, clock: StepClock
) -> tuple[Tensor, Logprobs | None]:
    """Verify, choose and commit op by op → features [N, n·H], the first `state.count` rows of a slot those of what
    it committed, and log-probabilities of the same rows."""
    rows = plan.rows
    exists = tree.exists if tree else rows.column < state.effective[rows.slot]
    position = state.length[rows.slot] + (tree.row_depth if tree else rows.column)
    extent = tree.extent if tree else state.length - 1 + state.effective
    asked = (rows, state.block[rows.slot, rows.column], position - 1, exists, extent, plan.bound)
    logits, features = target.verify(*asked, tree.path) if tree else target.verify(*asked)
    clock.lap("verify")

    ids, finite = choose_rows(state, plan, logits, tree.by_depth(noise) if tree else noise, position)
    put_choices(state, plan, ids, finite)
    walk = tree.follow(state) if tree else None
    commit_choices(state)
    found = row_logprobs(logits, ids, plan)
    if walk:
        kept = walk.gather(state, target)
        features, found = features.index_select(0, kept), found and found.of(kept)
    clock.lap("accept")
    return features, found


def begin_block(state: State) -> None:
    """Set this step's effective widths and anchors.

    Width is cut to remaining + 1, as the published DFlash loop does; no limit is beyond the context.
    """
    cached = state.length - 1
    room = state.limit - cached
    state.effective.copy_(torch.where(state.done, 0, torch.minimum(state.width, room)))
    state.block[:, :1] = state.tokens.gather(1, cached[:, None])


def chosen_position(state: State, plan: StepPlan) -> Tensor:
    """[N] position of the token that each packed row chooses."""
    return state.length[plan.rows.slot] + plan.rows.column


def draw_noise(state: State, plan: StepPlan, vocab: int) -> Tensor | None:
    """Gumbel noise [N, V] of the token each target row chooses, shared with the drafter; None if all greedy.

    Of trees the rows beyond a block's width, which share others' positions, hold anything.
    """
    if not plan.sampled:
        return None
    seed, position = state.seed[plan.rows.slot], chosen_position(state, plan)
    read = plan.noisy
    if read is None:
        return gumbel_noise(seed, position, vocab)
    drawn = gumbel_noise(seed.index_select(0, read), position.index_select(0, read), vocab)
    return drawn.new_empty(len(seed), vocab).index_copy_(0, read, drawn)


def choose_rows(
    state: State, plan: StepPlan, logits: Tensor, noise: Tensor | None, position: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's choice per packed row → ids [N], finite [N]; `position` [N] of what is chosen."""
    slot = plan.rows.slot
    banned = None
    if plan.bans:
        early = position < state.free_from[slot]
        banned = torch.where(early[:, None], state.stop_ids[slot], -1)
    per_row = plan.greedy
    if plan.sampled:
        per_row = (state.temperature[slot], state.top_k[slot], state.top_p[slot], state.min_p[slot])
    return choose(logits, noise, *per_row, banned, filtered=plan.filtered)


def put_choices(state: State, plan: StepPlan, ids: Tensor, finite: Tensor) -> None:
    """Scatter packed choices to [R, W]."""
    at = plan.rows.places(state.widest)
    state.choice.view(-1).index_copy_(0, at, ids)
    state.finite.view(-1).index_copy_(0, at, finite)


def commit_choices(state: State) -> None:
    """Longest accepted prefix, bonus, stops, limits and lengths: the one place where requests advance."""
    accept_commit(
        state.block,
        state.choice,
        state.finite,
        state.effective,
        state.stop_ids,
        state.limit,
        state.tokens,
        state.length,
        state.done,
        state.finish,
        state.accepted,
        state.count,
    )


def read_commit(state: State, plan: StepPlan) -> list[Report]:
    """What the last commit did, slot by slot: the one read of device values, between steps."""
    return _reports(committed(state, plan))


def committed(state: State, plan: StepPlan) -> list[int]:
    """What the last commit did: of each slot count, accepted, effective, finish and `count` ids, on the host."""
    s = state
    numbers = torch.stack([s.count, s.accepted, s.effective, s.finish], 1)
    rows = torch.cat([numbers, s.choice], 1).tolist()  # what was committed is the first `count` choices
    return [x for slot in plan.slots for x in rows[slot][: 4 + rows[slot][0]]]


def _reports(numbers: list[int]) -> list[Report]:
    """Parts of count, accepted, effective, finish and `count` ids."""
    found, at = [], 0
    while at < len(numbers):
        count, accepted, effective, finish = numbers[at : at + 4]
        at += 4 + count
        found.append(Report(accepted, effective, finish, numbers[at - count : at]))
    return found


def row_logprobs(logits: Tensor, ids: Tensor, plan: StepPlan) -> Logprobs | None:
    """Log-probabilities under softmax(logits), taken in tiles of `plan.tile` rows so that a row's bits are its own."""
    top = plan.logprobs
    if top is None:
        return None
    tiles = [_tile_logprobs(*t, top) for t in zip(logits.split(plan.tile), ids.split(plan.tile), strict=True)]
    return Logprobs(*(torch.cat([getattr(t, f.name) for t in tiles]) for f in fields(Logprobs)))


def _tile_logprobs(logits: Tensor, ids: Tensor, top: int) -> Logprobs:
    norm = torch.logsumexp(logits, -1, keepdim=True)
    chosen = (logits.gather(1, ids[:, None]) - norm)[:, 0]
    if top == 0:
        return Logprobs(chosen, ids.new_empty(len(ids), 0), norm[:, :0])
    best = largest(logits, min(top, logits.shape[1]))
    return Logprobs(chosen, best, logits.gather(1, best) - norm)


def first_token(state: State, plan: StepPlan, logits: Tensor) -> Logprobs | None:
    """Choose and commit the token after a prompt, with the functions a step uses.

    Args:
        plan: one slot of width 1. logits: [V] of the last prompt position.
    """
    rows, (slot,) = plan.rows, plan.slots
    noise = draw_noise(state, plan, len(logits))
    tiled = logits.expand(rows.padded, -1).contiguous()
    ids, finite = choose_rows(state, plan, tiled, noise, chosen_position(state, plan))
    put_choices(state, plan, ids, finite)
    state.effective[slot] = 1
    commit_choices(state.at(slot))
    return row_logprobs(tiled, ids, plan)
