"""The EAGLE-3 drafter on the C++ decoder: one call drafts a chain, one a depth of trees."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.eagle3 import Eagle3Drafter, Where
from blockpilot.drafters.eagle3_tree import BEAM
from blockpilot.drafters.headed_checkpoint import EMBEDDING, HEAD, HeadedCheckpoint
from blockpilot.drafters.packed import drafter_rounding, matrices, packed_key, replace_packed
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot.targets.cpp_cache import CppCache
from blockpilot.targets.cpp_target import CppTarget
from blockpilot.targets.packed_cache import Packed, cached
from blockpilot.targets.packing import pack_layer, padded_size
from blockpilot.targets.rope import rope_tables
from blockpilot_kernels.packed_decoder import (
    Geometry,
    Weights,
    borrowed,
    decoder_plan,
    draft_chain,
    eagle3_plan,
    eagle_forward,
)


class CppEagle3Drafter(Eagle3Drafter):
    """`Eagle3Drafter` over packed weights; beside a target in stored blocks its matrices are rounded to Q8_0."""

    row_tile = 1
    cache_bytes = staticmethod(CppCache.bytes_needed)

    def _build(self, checkpoint: HeadedCheckpoint, target: CppTarget, max_requests: int) -> None:
        m = self.config.model
        self.beam = min(BEAM, self.config.draft_vocab_size)
        key = None if target.packed_key is None else packed_key(checkpoint, target.packed_key)
        packed = cached(key, lambda: self._pack(checkpoint.tensors, target))
        self._plan = torch.tensor(packed.words["plan"], device="cpu")
        self._weights = (packed.blob, target.blob)
        self._rules = (checkpoint.vocabulary, self.draft_temperature)
        cos, sin = rope_tables(m.rope, m.head_dim, target.capacity)
        self._rope = (cos.float().contiguous(), sin.float().contiguous())
        self.cache = CppCache(1, max_requests, m.num_kv_heads, self._places(target), m.head_dim, target.dtype)

    def own(self) -> None:
        """See `PairDrafter.own`: packed weights are nobody else's."""

    def replace(self, tensors: Mapping[str, Tensor], target: Any) -> None:
        """See `PairDrafter.replace`."""
        replace_packed(self._weights[0], self._plan, tensors, target, lambda: self._pack(tensors, target))

    def _pack(self, tensors: Mapping[str, Tensor], target: CppTarget) -> Packed:
        m = self.config.model
        sizes = (m.hidden_size, m.num_heads, m.num_kv_heads, m.head_dim, padded_size(m.intermediate_size))
        geometry = Geometry(*sizes, 1, drafter_rounding(target))
        count = sum(t.numel() for t in tensors.values())
        packed = Weights(target.dtype, count * target.dtype.itemsize + (1 << 20))
        get = matrices(tensors, target)
        layer = pack_layer(packed, get, tensors, "midlayer.", geometry, window=m.sliding_window[0])
        own = EMBEDDING in tensors
        embedding = packed.linear(get(EMBEDDING)) if own else borrowed(target.embedding_record, 1)
        head = packed.linear(get(HEAD))
        plan = decoder_plan(geometry, embedding, head, packed.vector(tensors["norm.weight"]), [layer])
        fc, norm = packed.linear(get("fc.weight")), packed.vector(tensors["midlayer.hidden_norm.weight"])
        plan = eagle3_plan(plan, fc, norm, norm_before_residual=self.config.norm_before_residual)
        return Packed(packed.blob(), {"plan": plan.tolist()})

    def propose_some(
        self, state: State, plan: StepPlan, noise: Tensor | None, copied: Tensor | None
    ) -> Proposal:
        """See `drafters.lookup.ProposesSome`: the pairs that wait are run of every slot."""
        return self._propose(state, plan, noise, partial(self._draft_chains, copied=copied))

    def _draft_chains(
        self, state: State, plan: StepPlan, noise: Tensor | None, copied: Tensor | None = None
    ) -> None:
        broken = draft_chain(
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

    def _run(
        self, where: Where, tokens: Tensor, x: Tensor, head: Tensor, *, fuse: bool, path: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, position, exists, extent, _ = where
        return eagle_forward(
            self._weights,
            self._plan,
            self.config.model.rms_norm_eps,
            self.cache.k,
            self.cache.v,
            self._rope,
            x,
            tokens,
            (rows.slot, position, exists),
            extent,
            head,
            path,
            fuse=fuse,
        )
