"""A few requests driven through `run_step` itself, with everything a round leaves behind in reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from blockpilot.drafters import Proposal, load_drafter
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_cpp import CppDFlashDrafter
from blockpilot.drafters.eagle3 import Eagle3Drafter
from blockpilot.drafters.eagle3_cpp import CppEagle3Drafter
from blockpilot.drafters.specblock import SpecBlockDrafter
from blockpilot.drafters.specblock_cpp import CppSpecBlockDrafter
from blockpilot.plan import StepPlan
from blockpilot.rows import kv_bound
from blockpilot.state import State
from blockpilot.step import StepClock, first_token, run_step
from blockpilot.targets import Target
from blockpilot.targets.checkpoint import Checkpoint, load_checkpoint
from blockpilot.targets.cpp_cache import CppCache
from blockpilot_kernels.packed_decoder import quantise_q8_0
from tests.implementations import build

CPU = torch.device("cpu")
NAN = float("nan")
KINDS: dict[str, tuple[type, type]] = {
    "dflash": (DFlashDrafter, CppDFlashDrafter),
    "eagle3": (Eagle3Drafter, CppEagle3Drafter),
    "specblock": (SpecBlockDrafter, CppSpecBlockDrafter),
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}


def load_pair(
    target: Path | str,
    drafter: Path | str,
    *,
    implementation: str = "torch",
    slots: int = 1,
    capacity: int = 128,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    temperature: float | None = None,
) -> tuple[Target, Any]:
    """Target and drafter loaded from disk, the target set to hand out the drafter's features."""
    loaded = build(implementation, load_checkpoint(target), slots, capacity, dtype, device=device)
    guesser = load_drafter(drafter, loaded, slots, temperature)
    plain, packed = KINDS[guesser.kind]
    assert type(guesser) is (plain if implementation == "torch" else packed)
    loaded.use_features(guesser.feature_layers)
    return loaded, guesser


class Rounds:
    """Requests in slots; `start` prefills one, `step` advances some.

    Per round, `logits[slot]` collects the draft logits [effective − 1, V] of a drafter that makes them in one pass,
    `blocks[slot]` the block's ids and `counts[slot]` how many tokens were committed.
    """

    def __init__(self, target: Target, drafter: Any, widest: int = 12) -> None:
        self.target, self.drafter = target, drafter
        self.slots = target.cache.dump
        self.state = State.allocate(self.slots, target.capacity, widest, 4, target.device)
        self.widths = [1] * self.slots
        self.trees = [0] * self.slots
        self.cost: tuple[float, ...] | None = None
        self.logits: dict[int, list[Tensor]] = {}
        self.blocks: dict[int, list[list[int]]] = {}
        self.counts: dict[int, list[int]] = {}

    @torch.inference_mode()
    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        width: int,
        budget: int,
        temperature: float = 0.0,
        seed: int = 0,
        stops: Sequence[int] = (),
        free_from: int = 0,
        tree: int = 0,
    ) -> None:
        """Prefill a request into `slot` and commit its first token."""
        s, n = self.state, len(prompt)
        s.tokens[slot, :n] = torch.tensor(prompt)
        s.stop_ids[slot] = -1
        s.stop_ids[slot, : len(stops)] = torch.tensor(stops, dtype=torch.long)
        for name, value in {
            "length": n,
            "limit": min(n + budget, s.capacity),
            "free_from": free_from,
            "width": width,
            "seed": seed,
            "temperature": temperature,
            "done": False,
            "finish": 0,
        }.items():
            getattr(s, name)[slot] = value
        self.widths[slot], self.trees[slot] = width, tree
        self.logits[slot], self.blocks[slot], self.counts[slot] = [], [], []
        logits, features = self.target.prefill(slot, prompt)
        wants = {"sampled": temperature > 0, "bans": free_from > n, "tile": self.target.row_tile}
        alone = StepPlan((slot,), (1,), self.slots, 64, CPU, **wants)
        first_token(s, alone, logits)
        if width > 1 and not s.done[slot]:
            self.drafter.begin(slot, features, prompt)

    def plan(self, slots: Sequence[int]) -> StepPlan:
        """A plan for `slots` as they stand."""
        s = self.state
        at = list(slots)
        trees = tuple(self.trees[i] for i in at)
        longest = int((s.length + s.width)[at].max()) + max(trees)
        return StepPlan(
            tuple(at),
            tuple(self.widths[i] for i in at),
            self.slots,
            min(kv_bound(longest), kv_bound(self.target.capacity)),
            CPU,
            sampled=bool((s.temperature[at] > 0).any()),
            bans=bool((s.free_from[at] > s.length[at]).any()),
            tile=self.target.row_tile,
            trees=trees if any(trees) else None,
            cost=self.cost,
        )

    @torch.inference_mode()
    def step(self, slots: Sequence[int] | None = None) -> None:
        """One `run_step` over `slots`; all by default, finished ones included."""
        plan = self.plan(range(self.slots) if slots is None else slots)
        seen: list[Tensor] = []
        honest = self.drafter.propose

        def recording(state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
            seen.append(self.drafter.draft_logits(state, plan).clone())
            return honest(state, plan, noise)

        whole = hasattr(self.drafter, "draft_logits")
        with patch.object(self.drafter, "propose", recording if whole else honest):
            run_step(self.state, plan, self.target, self.drafter, StepClock())
        self._record(plan, seen)

    def _record(self, plan: StepPlan, seen: list[Tensor]) -> None:
        s, row = self.state, 0
        for slot, width in zip(plan.slots, plan.widths, strict=True):
            effective = int(s.effective[slot])
            if effective:
                self.blocks[slot].append(s.block[slot, :effective].tolist())
                self.counts[slot].append(int(s.count[slot]))
                if width > 1 and seen:
                    self.logits[slot].append(seen[0][row : row + effective - 1])
            row += width - 1

    def finish(self, slots: Sequence[int] | None = None) -> None:
        """Step until every request is done."""
        while not bool(self.state.done.all()):
            self.step(slots)

    def tokens(self, slot: int) -> list[int]:
        """Prompt and committed ids."""
        return self.state.tokens[slot, : int(self.state.length[slot])].tolist()


def remembered(drafter: Any, slot: int, cached: int) -> Tensor:
    """[2, layers, heads, cached, dim] keys and values of the first positions of a slot."""
    cache = drafter.cache
    if isinstance(cache, CppCache):
        return torch.stack(cache.canonical())[:, :, slot, :, :cached]
    assert not cache.bad[:, slot, :cached].any()
    return torch.stack([cache.k, cache.v])[:, :, slot, :, :cached].clone()


def spoil(cache: Any, slot: int, start: int, end: int | None = None) -> None:
    """NaN into the keys and values of positions start … end − 1 of a slot, in every layer."""
    if isinstance(cache, CppCache):
        position = torch.arange(cache.v.shape[3]).view(-1, 1, cache.k.shape[-1])
        cache.k[:, slot].masked_fill_((position >= start) & (position < (end or cache.v.shape[3])), NAN)
    else:
        cache.k[:, slot, :, start:end] = NAN
        cache.bad[:, slot, start:end] = True
    cache.v[:, slot, :, start:end] = NAN


def in_blocks(checkpoint: Checkpoint) -> Checkpoint:
    """The same target as a file of Q8_0 blocks would hold it."""
    blocks = {n: quantise_q8_0(t) for n, t in checkpoint.tensors.items() if t.dim() == 2}
    tensors = {**checkpoint.tensors, **{n: b.dequantise() for n, b in blocks.items()}}
    sizes = {n: b.data.numel() for n, b in blocks.items()}
    return replace(checkpoint, tensors=tensors, blocks=blocks, block_bytes=sizes)
