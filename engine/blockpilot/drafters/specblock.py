"""SpecBlock: a pass guesses a block of K ids, another goes on from where the first is likely to end (2605.07243)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.draws import Draws
from blockpilot.drafters.headed_checkpoint import EMBEDDING, HEAD, HeadedCheckpoint
from blockpilot.drafters.pairs import PairDrafter
from blockpilot.drafters.specblock_checkpoint import load_specblock
from blockpilot.drafters.specblock_config import BLOCKS, SpecBlockConfig
from blockpilot.drafters.specblock_rank import RankHead
from blockpilot.drafters.specblock_rows import BlockRows, first_rows, pair_rows, second_rows
from blockpilot.drafters.specblock_tree import BEAM, grow
from blockpilot.plan import StepPlan
from blockpilot.rows import KVCache, Rows, kv_bound, make_rows
from blockpilot.state import State
from blockpilot.targets import Target
from blockpilot.targets.layers import DecoderLayer, LayerShape, Pass, own_place
from blockpilot.targets.rope import rope_tables
from blockpilot_kernels.norm_rope import rms_norm
from blockpilot_kernels.tiled_linear import TILE, PackedLinear

Guesses = tuple[Tensor, Tensor, Tensor]  # of M rows: hidden [M, H], the same normed, logits [M, V']


class SpecBlockDrafter(PairDrafter):
    """Every pair has K slots, and slot k guesses the k-th id behind it: the last pair's are a draft, and one more pass
    goes on from slots of it.

    Slot k of pair t lies at place t·K + k of the cache and sees all that comes before it. Its rotary
    position is t + 1 + k. The second block lies behind all pairs and sees the first up to the slot it goes on from.

    Attributes:
        passes: passes so far.
    """

    kind = "specblock"
    row_tile = TILE
    cache_bytes = staticmethod(KVCache.bytes_needed)
    passes = 0
    loader = staticmethod(load_specblock)

    def _widths(self) -> tuple[int, ...]:
        return tuple(range(1, BLOCKS * self.config.slots + 2))

    @classmethod
    def memory_bytes(
        cls, config: SpecBlockConfig, max_requests: int, capacity: int, dtype: torch.dtype
    ) -> int:
        """Bytes of weights and an embedding in float32, of the cache, of features that wait, and of a pass's logits."""
        m, k, shapes = config.model, config.slots, [*config.expected_tensors().values()]
        shapes.append((m.vocab_size, m.hidden_size))
        # Matrices are padded to multiples of 32.
        weights = sum(math.prod(-(-n // 32) * 32 for n in s) for s in shapes if len(s) == 2)
        kv = (m.num_layers, max_requests, m.num_kv_heads, (capacity + BEAM) * k, m.head_dim, dtype)
        pending = 4 * (max_requests + 1) * max(BLOCKS * k + 1, cls.largest_tree) * config.feature_size
        logits = 2 * 4 * config.draft_vocab_size * max(TILE, max_requests * BEAM * k)
        return 4 * weights + cls.cache_bytes(*kv) + pending + logits

    def _build(self, checkpoint: HeadedCheckpoint, target: Any, max_requests: int) -> None:
        c, m, device, dtype = self.config, self.config.model, target.device, target.dtype
        tensors = {k: v.to(device) for k, v in checkpoint.tensors.items()}
        own, names = tensors.get(EMBEDDING), ("condition", "token")
        self._embedding = target.embedding if own is None else own.to(dtype)
        norms = {n: tensors[f"input_layer.{n}_norm.weight"].float() for n in names}
        self._condition_norm, self._token_norm = norms["condition"], norms["token"]
        self._queries = self._normed_queries(tensors)
        self._condition, self._fuse, self._head = (
            PackedLinear(tensors[f"{n}.weight"], None, dtype)
            for n in ("input_layer.condition_proj", "input_layer.fuse", "lm_head")
        )
        shape = LayerShape(m.num_heads, m.num_kv_heads, m.head_dim, m.rms_norm_eps)
        self.layers = [DecoderLayer(tensors, f"layers.{i}.", shape, dtype) for i in range(m.num_layers)]
        shifts = range(m.num_layers - 1 if c.shift else 0)
        self._shift = [PackedLinear(tensors[f"shift_proj.{i}.weight"], None, dtype) for i in shifts]
        self.norm = tensors["norm.weight"].float()
        self._ranks = {i: PackedLinear(tensors[f"rank_head.{i}.weight"], None, dtype) for i in (0, 2)}
        self.rank = RankHead(self._ranks[0], self._ranks[2], device)
        self._cos, self._sin = (t.to(device) for t in self._tables(target))
        places = self._places(target)
        self.cache = KVCache(m.num_layers, max_requests, m.num_kv_heads, places, m.head_dim, dtype, device)

    def own(self) -> None:
        """See `PairDrafter.own`."""
        self.norm, self._condition_norm, self._token_norm = (
            x.clone() for x in (self.norm, self._condition_norm, self._token_norm)
        )
        for layer in self.layers:
            layer.own()

    def replace(self, tensors: Mapping[str, Tensor], target: Any) -> None:
        """See `PairDrafter.replace`."""
        self._head.replace(tensors[HEAD])
        if set(tensors) == {HEAD}:
            return
        self.norm.copy_(tensors["norm.weight"])
        self._condition.replace(tensors["input_layer.condition_proj.weight"])
        self._fuse.replace(tensors["input_layer.fuse.weight"])
        for norm, name in ((self._condition_norm, "condition"), (self._token_norm, "token")):
            norm.copy_(tensors[f"input_layer.{name}_norm.weight"])
        self._queries.copy_(self._normed_queries(tensors))
        for i, layer in enumerate(self.layers):
            layer.replace(tensors, f"layers.{i}.")
        for i, product in enumerate(self._shift):
            product.replace(tensors[f"shift_proj.{i}.weight"])
        for i, product in self._ranks.items():
            product.replace(tensors[f"rank_head.{i}.weight"])

    def _normed_queries(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[K, H] float32."""
        queries, norm = (tensors[f"input_layer.{n}.weight"] for n in ("position_queries", "query_norm"))
        return rms_norm(queries.float(), norm.float(), self.config.model.rms_norm_eps)

    def _tables(self, target: Target) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin; the last slots of a block at the end of the context stand beyond it."""
        c, m = self.config, self.config.model
        return rope_tables(m.rope, m.head_dim, target.capacity + (BLOCKS + 1) * c.slots)

    def _places(self, target: Target) -> int:
        """Places of the cache: those of the target's positions, and the blocks of one tree."""
        return (target.capacity + BEAM) * self.config.slots

    def _remember(self, slot: int, start: int, features: Tensor, said: Tensor) -> None:
        k, dump = self.config.slots, self.cache.dump
        rows = make_rows((slot,), (len(said) * k,), dump, features.device, self.row_tile)
        pair, end = rows.column // k, (start + len(said)) * k
        extent = torch.full((dump + 1,), end, device=features.device)
        exists = rows.slot != dump
        number = torch.where(exists, start + pair, 0)
        where = (number * k, number, exists, extent, kv_bound(end), rows.every[:0])
        self.run(rows, said[pair], features[pair], *where, features=True)

    def first_block(self, state: State, plan: StepPlan) -> tuple[BlockRows, Guesses]:
        """Run the pairs that wait → what the K slots of each request's last say."""
        k = self.config.slots
        rows, made = pair_rows(plan, k), first_rows(plan, k)
        pair, cached = rows.column // k, state.length - 1
        number, said, exists = self.waiting(state, rows, pair)
        count = torch.where(state.done, 0, state.count)[made.rows.slot]
        head = made.first + (count - 1).clamp(min=0) * k + made.slot
        where = (number * k, number, exists, cached * k, self.bound(plan), head)
        return made, self.run(rows, said, self._pending[rows.slot, pair], *where, features=True)

    def bound(self, plan: StepPlan) -> int:
        """Host bound on the places that hold keys."""
        return kv_bound((plan.bound + 1) * self.config.slots)

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
        """One pass over packed rows, K of each block one after another; says what the rows `head` [M] say.

        Args:
            said: [N] the block's input id. x: [N, ·] `features`, or the hidden states that the blocks go on from.
            place: [N] of its slot 0, as attention counts.
            number: [N] of its pair. exists: [N]. extent: [S] places that hold keys. path: as in `Target.verify`.
        """
        self.passes += 1
        c, eps = self.config, self.config.model.rms_norm_eps
        slot = rows.column % c.slots
        position = torch.where(exists, place + slot, 0)
        turn = torch.where(exists, number + 1 + slot, 0)
        to = self.cache.destination(rows.slot, own_place(path, position), exists)
        bound = min(bound, self.cache.k.shape[3])
        step = Pass(rows, position, self._cos[turn], self._sin[turn], to, extent, bound, path)
        parts = (
            rms_norm(self._condition(x) if features else x, self._condition_norm, eps),
            rms_norm(self._embedding[said].float(), self._token_norm, eps),
            self._queries[slot],
        )
        x = self._fuse(torch.cat(parts, -1))
        normed = rms_norm(x, self.layers[0].input_norm, eps)
        before = rows.every - (slot > 0).long()
        after = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for i, (layer, norm) in enumerate(zip(self.layers, after, strict=True)):
            if i and c.shift:
                x = self._shift[i - 1](torch.cat([x, x[before]], -1))
                normed = rms_norm(x, layer.input_norm, eps)
            x, normed = layer.forward(x, normed, self.cache, i, step, norm)
        x, normed = x[head], normed[head]
        return x, normed, self._head(normed) if len(head) else normed

    def draws(
        self, state: State, plan: StepPlan, made: BlockRows, depth: Tensor, noise: Tensor | None
    ) -> Draws:
        """How rows that guess `depth` [N] become tokens."""
        rows = (made.rows.slot, depth, made.source(depth))
        return Draws.of(state, plan, rows, noise, self.vocabulary, self.draft_temperature)

    def _draft_chains(self, state: State, plan: StepPlan, noise: Tensor | None) -> None:
        k, cached = self.config.slots, state.length - 1
        made, (hidden, _, logits) = self.first_block(state, plan)
        ids = self._write(state, plan, made, logits, noise, 0)
        if max(plan.widths) - 1 <= k:
            return
        after = second_rows(plan, k, k + 1, 1)
        rows, last = after.rows, after.first + k - 1
        exists = k + 1 < state.effective[rows.slot]
        place, number = cached[rows.slot] * k, cached[rows.slot] + k - 1
        where = (place, number, exists, (cached + 1) * k, self.bound(plan))
        _, _, logits = self.run(rows, ids[last], hidden[last], *where, rows.every)
        self._write(state, plan, after, logits, noise, k)

    def _write(
        self,
        state: State,
        plan: StepPlan,
        made: BlockRows,
        logits: Tensor,
        noise: Tensor | None,
        above: int,
    ) -> Tensor:
        """Ids [N] of a block's rows, behind `above` drafts, which become the columns that they guess."""
        request, depth, stride = made.rows.slot, made.slot + above + 1, self._tokens.shape[1]
        columns, finite = self.draws(state, plan, made, depth, noise).choose(logits)
        self.non_finite += (~finite & (depth < state.effective[request])).sum()
        ids = self.vocabulary.ids(columns)
        self._tokens.view(-1).index_copy_(0, request * stride + depth - 1, ids)
        return ids

    def _grow(self, state: State, plan: StepPlan, noise: Tensor | None, chain: Proposal) -> Proposal:
        return grow(self, state, plan, noise, chain)
