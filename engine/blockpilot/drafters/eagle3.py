"""EAGLE-3: one layer drafts token after token from its own hidden states (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.draws import LARGEST_TREE, Draws
from blockpilot.drafters.eagle3_checkpoint import load_eagle3
from blockpilot.drafters.eagle3_config import Eagle3Config
from blockpilot.drafters.eagle3_tree import BEAM, grow
from blockpilot.drafters.headed_checkpoint import EMBEDDING, HEAD, HeadedCheckpoint
from blockpilot.drafters.levels import Level, level_of
from blockpilot.drafters.pairs import PairDrafter
from blockpilot.plan import StepPlan
from blockpilot.rows import KVCache, Rows, kv_bound, make_rows
from blockpilot.state import State
from blockpilot.targets import Target
from blockpilot.targets.layers import DecoderLayer, LayerShape, Pass, own_place
from blockpilot.targets.rope import rope_tables
from blockpilot_kernels.norm_rope import rms_norm
from blockpilot_kernels.tiled_linear import TILE, PackedLinear, pad_rows

Where = tuple[Rows, Tensor, Tensor, Tensor, int]  # rows; position, exists [N]; extent [S] and its bound


class Eagle3Drafter(PairDrafter):
    """Drafts from its own hidden states behind the first: each further depth is a pass of one row a slot, or of a beam
    where it drafts a tree.
    """

    kind = "eagle3"
    row_tile = TILE
    loader = staticmethod(load_eagle3)
    cache_bytes = staticmethod(KVCache.bytes_needed)

    @classmethod
    def memory_bytes(cls, config: Eagle3Config, max_requests: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes of weights, an embedding of its own included, of the cache, of features that wait, and of a level's
        logits and noise."""
        m, shapes = config.model, config.expected_tensors().values()
        weights = sum(s[0] * s[-1] for s in shapes if len(s) == 2) + m.vocab_size * m.hidden_size
        places = capacity + 2 * config.block_size * BEAM
        kv = (1, max_requests, m.num_kv_heads, places, m.head_dim, dtype)
        pending = 4 * (max_requests + 1) * max(2 * config.block_size, LARGEST_TREE) * config.feature_size
        logits = 2 * 4 * config.draft_vocab_size * max(TILE, max_requests * BEAM)
        # A CPU without bf16 matrix instructions keeps rounded weights in fp32, so fp32 is the safe count.
        return 4 * weights + cls.cache_bytes(*kv) + pending + logits

    def _widths(self) -> tuple[int, ...]:
        return tuple(range(1, 2 * self.config.block_size + 1))

    def _remember(self, slot: int, start: int, features: Tensor, said: Tensor) -> None:
        device, dump = features.device, self.cache.dump
        rows = make_rows((slot,), (len(said),), dump, device, self.row_tile)
        end = start + len(said)
        extent = torch.full((dump + 1,), end, device=device)
        where = (rows, rows.column + start, rows.slot != dump, extent, kv_bound(end))
        if rows.padded > rows.total:
            features, said = pad_rows(features), pad_rows(said)
        self._run(where, said, features, rows.every[:0], fuse=True)

    def _grow(self, state: State, plan: StepPlan, noise: Tensor | None, chain: Proposal) -> Proposal:
        return grow(self, state, plan, noise, chain)

    def _draft_chains(self, state: State, plan: StepPlan, noise: Tensor | None) -> None:
        stride = self._tokens.shape[1]
        ids = hidden = self._tokens  # nothing is above depth 1
        for depth in range(1, max(plan.widths)):
            level = level_of(plan, depth, self.beam, self.row_tile)
            slot = level.rows.slot
            exists = depth < state.effective[slot]
            if depth == 1:
                hidden, logits = self.begin_drafts(state, plan, level)
            else:
                above, extent = level.first, state.length + depth - 2
                given = (ids[above], hidden[above], exists, extent)
                hidden, logits = self.deepen(state, plan, level, *given)
            columns, finite = self.draws(state, plan, level, noise).choose(logits)
            self.non_finite += (~finite & exists).sum()
            ids = self.vocabulary.ids(columns)
            self._tokens.view(-1).index_copy_(0, slot * stride + depth - 1, ids)

    def draws(self, state: State, plan: StepPlan, level: Level, noise: Tensor | None) -> Draws:
        """How the rows of a level become tokens."""
        slot = level.rows.slot
        rows = (slot, torch.full_like(slot, level.depth), level.source)
        return Draws.of(state, plan, rows, noise, self.vocabulary, self.draft_temperature)

    def begin_drafts(self, state: State, plan: StepPlan, level: Level) -> tuple[Tensor, Tensor]:
        """Run the pairs that wait → hidden [N, H] and logits [N, V'] of each slot's last, which guess depth 1."""
        rows, cached = plan.draft_rows, state.length - 1
        position, said, exists = self.waiting(state, rows, rows.column)
        count = torch.where(state.done, 0, state.count)
        last = level.first + (count[level.rows.slot] - 1).clamp(min=0)
        where = (rows, position, exists, cached, plan.bound)
        features = self._pending[rows.slot, rows.column]
        hidden, logits = self._run(where, said, features, last, fuse=True)
        return hidden[last], logits

    def deepen(
        self,
        state: State,
        plan: StepPlan,
        level: Level,
        tokens: Tensor,
        hidden: Tensor,
        exists: Tensor,
        extent: Tensor,
        path: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One depth more: drafted tokens [N] and the hidden states [N, H] that guessed them → the same, with logits.

        Args:
            exists: [N] bool. extent: [S] places of each slot that hold keys afterwards. path: [N, D] as in
                `Target.verify`, of the pairs from the last committed one on; None for chains.
        """
        rows = level.rows
        position = torch.where(exists, state.length[rows.slot] + level.depth - 3, 0)
        where = (rows, position, exists, extent, plan.bound)
        return self._run(where, tokens, hidden, rows.every, fuse=False, path=path)

    def _run(
        self, where: Where, tokens: Tensor, x: Tensor, head: Tensor, *, fuse: bool, path: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer over packed rows of tokens [N] and hidden states or, to `fuse`, features x [N, K].

        Returns:
            hidden [N, H] before the final norm, and logits [M, V'] of the rows `head` [M].
        """
        rows, position, exists, extent, bound = where
        eps, layer = self.config.model.rms_norm_eps, self.layer
        to = self.cache.destination(rows.slot, own_place(path, position), exists)
        step = Pass(rows, position, self._cos[position], self._sin[position], to, extent, bound, path)
        x = self.fc(x) if fuse else x
        said = rms_norm(self._embedding[tokens].float(), layer.input_norm, eps)
        normed = rms_norm(x, self.hidden_norm, eps)
        residual = normed if self.config.norm_before_residual else x
        wide = torch.cat([said, normed], -1)
        hidden, normed = layer.forward(residual, wide, self.cache, 0, step, self.norm)
        asked = normed[head]
        return hidden, self._head(asked) if len(asked) else asked

    def _build(self, checkpoint: HeadedCheckpoint, target: Any, max_requests: int) -> None:
        m, device, dtype = self.config.model, target.device, target.dtype
        self.beam = min(BEAM, self.config.draft_vocab_size)
        tensors = {k: v.to(device) for k, v in checkpoint.tensors.items()}
        own = tensors.get(EMBEDDING)
        self._embedding = target.embedding if own is None else own.to(dtype)
        self._head = PackedLinear(tensors[HEAD], None, dtype)
        self.fc = PackedLinear(tensors["fc.weight"], None, dtype)
        self.norm = tensors["norm.weight"].float()
        self.hidden_norm = tensors["midlayer.hidden_norm.weight"].float()
        shape = LayerShape(m.num_heads, m.num_kv_heads, m.head_dim, m.rms_norm_eps)
        self.layer = DecoderLayer(tensors, "midlayer.", shape, dtype, window=m.sliding_window[0])
        self._cos, self._sin = (t.to(device) for t in rope_tables(m.rope, m.head_dim, target.capacity))
        self.cache = KVCache(1, max_requests, m.num_kv_heads, self._places(target), m.head_dim, dtype, device)

    def own(self) -> None:
        """See `PairDrafter.own`."""
        self.norm, self.hidden_norm = self.norm.clone(), self.hidden_norm.clone()
        self.layer.own()

    def replace(self, tensors: Mapping[str, Tensor], target: Any) -> None:
        """See `PairDrafter.replace`."""
        self._head.replace(tensors[HEAD])
        if "fc.weight" in tensors:
            self.norm.copy_(tensors["norm.weight"])
            self.fc.replace(tensors["fc.weight"])
            self.hidden_norm.copy_(tensors["midlayer.hidden_norm.weight"])
            self.layer.replace(tensors, "midlayer.")

    def _places(self, target: Target) -> int:
        """Positions of the cache: those of the target, and the branches of one tree."""
        return target.capacity + max(self.window) * self.beam
