"""The DFlash drafter on the C++ decoder: one call drafts a block, one call takes over committed features."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_checkpoint import DFlashCheckpoint
from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.drafters.head_rows import head_rows
from blockpilot.drafters.packed import drafter_rounding, packed_key
from blockpilot.plan import StepPlan
from blockpilot.rows import Rows
from blockpilot.state import State
from blockpilot.targets.cpp_cache import CppCache
from blockpilot.targets.cpp_target import CppTarget
from blockpilot.targets.packed_cache import Packed, cached
from blockpilot.targets.packing import (
    GetMatrix,
    in_bytes,
    pack_layer,
    padded_size,
    stored_or_float,
)
from blockpilot.targets.rope import rope_tables
from blockpilot_kernels.packed_decoder import (
    Geometry,
    Weights,
    borrowed,
    commit_context,
    context_append,
    context_plan,
    decoder_forward,
    decoder_plan,
    draft_block,
    packed_rows,
    stack,
)


class CppDFlashDrafter(DFlashDrafter):
    """`DFlashDrafter` over packed weights; beside a target in stored blocks its matrices are rounded to Q8_0."""

    row_tile = 1

    def _build(self, checkpoint: DFlashCheckpoint, target: CppTarget, max_requests: int) -> None:
        m = self.config.model
        rounding = drafter_rounding(target)
        size = padded_size(m.intermediate_size)
        sizes = (m.hidden_size, m.num_heads, m.num_kv_heads, m.head_dim)
        geometry = Geometry(*sizes, size, m.num_layers, rounding)
        key = None if target.packed_key is None else packed_key(checkpoint, target.packed_key)
        packed = cached(key, lambda: self._pack(checkpoint, target, geometry))
        self._plan, self._context = (torch.tensor(packed.words[n], device="cpu") for n in ("plan", "context"))
        self._weights = (packed.blob, target.blob)
        self._scalars = (m.rms_norm_eps, self.config.input_embedding_scale, self.config.output_multiplier)
        self._rules = (self.config.mask_token_id, checkpoint.vocabulary, self.draft_temperature)
        cos, sin = rope_tables(m.rope, m.head_dim, target.capacity)
        self._rope = (cos.float().contiguous(), sin.float().contiguous())
        shape = (m.num_layers, max_requests, m.num_kv_heads, target.capacity, m.head_dim)
        self.cache = CppCache(*shape, target.dtype)

    def _pack(self, checkpoint: DFlashCheckpoint, target: CppTarget, geometry: Geometry) -> Packed:
        m, tensors, ids = self.config.model, checkpoint.tensors, checkpoint.vocabulary
        count = sum(t.numel() for t in tensors.values()) + (0 if ids is None else len(ids) * m.hidden_size)
        packed = Weights(target.dtype, count * target.dtype.itemsize + (1 << 20))
        get = stored_or_float(tensors, {}, "dense")
        if target.weights != "dense":
            get = in_bytes(get)
        masks = zip(self.config.causal, m.sliding_window, strict=True)
        layers = [
            pack_layer(packed, get, tensors, f"layers.{i}.", geometry, causal=causal, window=window)
            for i, (causal, window) in enumerate(masks)
        ]
        embedding, head = borrowed(target.embedding_record, 1), borrowed(target.head_record, 1)
        if ids is not None:
            head = packed.linear(packed_rows(target.blob, target.head_record, ids))
        plan = decoder_plan(geometry, embedding, head, packed.vector(tensors["norm.weight"]), layers)
        context = self._context_plan(packed, get, tensors, geometry)
        return Packed(packed.blob(), {"plan": plan.tolist(), "context": context.tolist()})

    def _context_plan(
        self, packed: Weights, get: GetMatrix, tensors: dict[str, Tensor], geometry: Geometry
    ) -> Tensor:
        count = self.config.model.num_layers
        names = [f"layers.{i}.self_attn.{p}_proj" for i in range(count) for p in "kv"]
        bias = (
            torch.cat([tensors[f"{n}.bias"].float() for n in names]) if self.config.model.qkv_bias else None
        )
        fc = packed.linear(get("fc.weight"))
        project = packed.linear(stack([get(f"{n}.weight") for n in names]), bias)
        norms = [packed.vector(tensors[f"layers.{i}.self_attn.k_norm.weight"]) for i in range(count)]
        return context_plan(geometry, fc, project, packed.vector(tensors["hidden_norm.weight"]), norms)

    @staticmethod
    def memory_bytes(
        config: DFlashConfig, max_requests: int, capacity: int, dtype: torch.dtype, draft_ids: int = 0
    ) -> int:
        """As `DFlashDrafter.memory_bytes`; a head of its own lies there twice while it is packed."""
        m = config.model
        attention = m.hidden_size * m.head_dim * 2 * (m.num_heads + 2 * m.num_kv_heads)
        per_layer = attention + 3 * m.hidden_size * m.intermediate_size
        matrices = m.num_layers * per_layer + (config.feature_size + 2 * draft_ids) * m.hidden_size
        kv = (m.num_layers, max_requests, m.num_kv_heads, capacity, m.head_dim, dtype)
        logits = 4 * (draft_ids or m.vocab_size) * max_requests * 2 * config.block_size
        return dtype.itemsize * matrices + CppCache.bytes_needed(*kv) + 2 * logits  # with their noise

    def propose(self, state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
        """As `DFlashDrafter.propose`; chains in one call, unless logits are capped."""
        return self.propose_some(state, plan, noise, None)

    def propose_some(
        self, state: State, plan: StepPlan, noise: Tensor | None, copied: Tensor | None
    ) -> Proposal:
        """See `drafters.lookup.ProposesSome`."""
        if plan.trees is not None or self.config.final_logit_softcapping is not None:
            return super().propose(state, plan, noise)
        self._check_room(state, plan)
        self.non_finite += draft_block(
            self._weights,
            self._plan,
            self._scalars,
            self.cache.k,
            self.cache.v,
            self._rope,
            state.tensors,
            plan.drafting,
            self._rules,
            noise,
            self._tokens,
            bans=plan.bans,
            copied=copied,
        )
        return self._chain(state)

    def commit(self, state: State, plan: StepPlan, features: Tensor) -> None:
        """As `DFlashDrafter.commit`, in one call."""
        eps, where = self.config.model.rms_norm_eps, (self.cache.k, self.cache.v, self._rope)
        commit_context(self._weights, self._context, eps, *where, state.tensors, plan.drafting, features)

    def _raw_logits(self, state: State, plan: StepPlan) -> Tensor:
        rows = plan.draft_rows
        cached = state.length - 1
        exists = rows.column < state.effective[rows.slot]
        position = cached[rows.slot] + rows.column
        tokens = torch.where(rows.column == 0, state.block[rows.slot, 0], self.config.mask_token_id)
        logits, _ = decoder_forward(
            self._weights,
            self._plan,
            self._scalars,
            self.cache.k,
            self.cache.v,
            self._rope,
            tokens,
            (rows.slot, position, exists),
            cached + state.effective,
            (),
            head_rows(rows, plan.dump, self.row_tile).row,
        )
        return logits

    def _remember(self, rows: Rows, position: Tensor, exists: Tensor, features: Tensor) -> None:
        where = (rows.slot, position, exists)
        eps = self.config.model.rms_norm_eps
        context_append(
            self._weights, self._context, eps, self.cache.k, self.cache.v, self._rope, features, where
        )
