"""The SpecBlock drafter on the C++ decoder: one call drafts a chain, one a pass of trees."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.headed_checkpoint import EMBEDDING, HEAD, HeadedCheckpoint
from blockpilot.drafters.packed import drafter_rounding, matrices, packed_key, replace_packed
from blockpilot.drafters.specblock import Guesses, SpecBlockDrafter
from blockpilot.drafters.specblock_rank import RankHead
from blockpilot.plan import StepPlan
from blockpilot.rows import Rows
from blockpilot.state import State
from blockpilot.targets.cpp_cache import CppCache
from blockpilot.targets.cpp_target import CppTarget
from blockpilot.targets.packed_cache import Packed, cached
from blockpilot.targets.packing import pack_layer, padded_size
from blockpilot_kernels.norm_rope import rms_norm
from blockpilot_kernels.packed_decoder import (
    Geometry,
    Weights,
    borrowed,
    decoder_plan,
    packed_linear,
    records_of,
    specblock_chain,
    specblock_forward,
    specblock_plan,
)

_FUSE = "input_layer.fuse.weight"


class CppSpecBlockDrafter(SpecBlockDrafter):
    """`SpecBlockDrafter` over packed weights; beside a target in stored blocks its matrices are rounded to Q8_0.

    The query of a slot never changes, so what `fuse` makes of it is computed when it is packed.
    """

    row_tile = 1
    cache_bytes = staticmethod(CppCache.bytes_needed)

    def _build(self, checkpoint: HeadedCheckpoint, target: CppTarget, max_requests: int) -> None:
        m = self.config.model
        key = None if target.packed_key is None else packed_key(checkpoint, target.packed_key)
        packed = cached(key, lambda: self._pack(checkpoint.tensors, target))
        self._plan = torch.tensor(packed.words["plan"], device="cpu")
        self._weights = (packed.blob, target.blob)
        self._rules = (checkpoint.vocabulary, self.draft_temperature)
        self._records, self._rounding = records_of(packed.words["rank"]), drafter_rounding(target)
        self.rank = self._rank_head()
        cos, sin = self._tables(target)
        self._rope = (cos.float().contiguous(), sin.float().contiguous())
        shape = (m.num_layers, max_requests, m.num_kv_heads, self._places(target), m.head_dim)
        # K keys a token are much to read, and no output shows their rounding.
        self.cache = CppCache(*shape, torch.bfloat16 if self._rounding == "int8" else target.dtype)

    def _rank_head(self) -> RankHead:
        blob = self._weights[0]
        first, second = (
            partial(packed_linear, weights=blob, record=r, rounding=self._rounding) for r in self._records
        )
        return RankHead(first, second, blob.device)

    def own(self) -> None:
        """See `PairDrafter.own`: packed weights are nobody else's."""

    def replace(self, tensors: Mapping[str, Tensor], target: Any) -> None:
        """See `PairDrafter.replace`."""
        replace_packed(self._weights[0], self._plan, tensors, target, lambda: self._pack(tensors, target))

    def _pack(self, given: Mapping[str, Tensor], target: CppTarget) -> Packed:
        c, m, tensors = self.config, self.config.model, dict(given)
        queries = tensors["input_layer.position_queries.weight"].float()
        queries = rms_norm(queries, tensors["input_layer.query_norm.weight"].float(), m.rms_norm_eps)
        tensors[_FUSE], ours = tensors[_FUSE].split([2 * m.hidden_size, m.hidden_size], 1)
        sizes = (m.hidden_size, m.num_heads, m.num_kv_heads, m.head_dim, padded_size(m.intermediate_size))
        geometry = Geometry(*sizes, m.num_layers, drafter_rounding(target))
        count = sum(t.numel() for t in tensors.values())
        packed = Weights(target.dtype, count * target.dtype.itemsize + (1 << 20))
        get = matrices(tensors, target)
        layers = [pack_layer(packed, get, tensors, f"layers.{i}.", geometry) for i in range(m.num_layers)]
        own = EMBEDDING in tensors
        embedding = packed.linear(get(EMBEDDING)) if own else borrowed(target.embedding_record, 1)
        head = packed.linear(get(HEAD))
        plan = decoder_plan(geometry, embedding, head, packed.vector(tensors["norm.weight"]), layers)
        condition, fuse = packed.linear(get("input_layer.condition_proj.weight")), packed.linear(get(_FUSE))
        norms = (packed.vector(tensors[f"input_layer.{n}_norm.weight"]) for n in ("condition", "token"))
        vectors = (*norms, packed.vector((queries @ ours.float().T).flatten()))
        shifts = range(m.num_layers - 1 if c.shift else 0)
        shift = [packed.linear(get(f"shift_proj.{i}.weight")) for i in shifts]
        plan = specblock_plan(plan, c.slots, condition, fuse, vectors, shift)
        rank = [word for i in (0, 2) for word in packed.linear(get(f"rank_head.{i}.weight"))]
        return Packed(packed.blob(), {"plan": plan.tolist(), "rank": rank})

    def propose_some(
        self, state: State, plan: StepPlan, noise: Tensor | None, copied: Tensor | None
    ) -> Proposal:
        """See `drafters.lookup.ProposesSome`: the pairs that wait are run of every slot."""
        return self._propose(state, plan, noise, partial(self._draft_chains, copied=copied))

    def _draft_chains(
        self, state: State, plan: StepPlan, noise: Tensor | None, copied: Tensor | None = None
    ) -> None:
        self.passes += 1 + (max(plan.widths) - 1 > self.config.slots)
        broken = specblock_chain(
            self._weights,
            self._plan,
            self.config.model.rms_norm_eps,
            self.cache.k,
            self.cache.v,
            self._rope,
            state.tensors,
            plan.drafting,
            self._pending,
            self._rules,
            noise,
            self._tokens,
            bans=plan.bans,
            copied=copied,
        )
        if broken:
            self.non_finite += broken

    def run(
        self,
        rows: Rows,
        said: Tensor,
        x: Tensor,
        place: Tensor,
        number: Tensor,
        exists: Tensor,
        extent: Tensor,
        bound: int,
        head: Tensor,
        path: Tensor | None = None,
        *,
        features: bool = False,
    ) -> Guesses:
        """As `SpecBlockDrafter.run`, where all rows of a block are given the same."""
        k = self.config.slots
        at = place if path is None else path[:, 1]
        slot, place, at, number = (t[::k] for t in (rows.slot, place, at, number))
        where = (slot, place, at, number)
        return self._forward(x[::k], said[::k], where, exists[::k], extent, head, features=features)

    def _remember(self, slot: int, start: int, features: Tensor, said: Tensor) -> None:
        number = torch.arange(start, start + len(said), device=said.device)
        place = number * self.config.slots
        end = (start + len(said)) * self.config.slots
        extent = torch.full((self.cache.dump + 1,), end, device=said.device)
        where = (torch.full_like(number, slot), place, place, number)
        self._forward(features, said, where, torch.ones_like(said, dtype=torch.bool), extent, number[:0])

    def _forward(
        self,
        x: Tensor,
        tokens: Tensor,
        where: tuple[Tensor, Tensor, Tensor, Tensor],
        exists: Tensor,
        extent: Tensor,
        head: Tensor,
        *,
        features: bool = True,
    ) -> Guesses:
        self.passes += 1
        return specblock_forward(
            self._weights,
            self._plan,
            self.config.model.rms_norm_eps,
            self.cache.k,
            self.cache.v,
            self._rope,
            x,
            tokens,
            where,
            exists,
            extent,
            head,
            features=features,
        )
