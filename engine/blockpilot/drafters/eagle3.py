"""EAGLE-3: one layer drafts token after token from its own hidden states (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.draft_vocabulary import DraftVocabulary
from blockpilot.drafters.draws import LARGEST_TREE, Draws, checked_temperature
from blockpilot.drafters.eagle3_checkpoint import EMBEDDING, Eagle3Checkpoint, load_eagle3
from blockpilot.drafters.eagle3_config import Eagle3Config
from blockpilot.drafters.eagle3_tree import BEAM, grow
from blockpilot.drafters.levels import Level, level_of
from blockpilot.drafters.room import Room
from blockpilot.memory import require_fits
from blockpilot.plan import StepPlan
from blockpilot.rows import KVCache, Rows, kv_bound, make_rows
from blockpilot.state import State
from blockpilot.targets import Target
from blockpilot.targets.layers import DecoderLayer, LayerShape, Pass, own_place
from blockpilot.targets.rope import rope_tables
from blockpilot_kernels.norm_rope import rms_norm
from blockpilot_kernels.tiled_linear import TILE, PackedLinear, pad_rows

CONTEXT_ROWS = 128
Where = tuple[Rows, Tensor, Tensor, Tensor, int]  # rows; position, exists [N]; extent [S] and its bound


class Eagle3Drafter:
    """Drafts from pairs of a target's feature and the token behind it, then from its own hidden states.

    Pair t is (feature of position t, token t + 1). Its cache holds keys and values of the pairs whose token is
    committed, t ≤ length − 2, and beyond them those of the drafts of one step, which the next overwrites. Pairs that a
    step has committed wait for the next `propose`, which runs them together: the last one guesses depth 1, and each
    further depth is a pass of one row a slot, or of a beam where it drafts a tree.

    Args:
        checkpoint: config and tensors. target: whose features it uses, and whose embedding unless it has its own.
        max_requests: slots. draft_temperature: factor on a request's temperature when drafting.

    Raises:
        ValueError: a drafter made for another target, or a draft temperature that is not positive.

    Attributes:
        non_finite: [] int64, drafts so far whose logits were not finite; above zero, the drafter overflows in this
            dtype.
    """

    kind = "eagle3"
    largest_tree = LARGEST_TREE
    row_tile = TILE
    cache: Any  # of the layout that the implementation reads
    cache_bytes = staticmethod(KVCache.bytes_needed)

    def __init__(
        self,
        checkpoint: Eagle3Checkpoint,
        target: Target,
        max_requests: int,
        draft_temperature: float | None = None,
    ) -> None:
        self.feature_layers = checkpoint.hidden_states(target.config)
        self.draft_temperature = checked_temperature(draft_temperature)
        c = self.config = checkpoint.config
        self.fingerprint, self.block_size = checkpoint.fingerprint, c.block_size
        self.window = tuple(range(1, 2 * c.block_size + 1))
        self.vocabulary = DraftVocabulary(checkpoint.vocabulary, c.model.vocab_size, target.device)
        self.beam = min(BEAM, c.draft_vocab_size)
        self._room = Room(target.embedding, max_requests, target.capacity)
        self._build(checkpoint, target, max_requests)
        device = target.device
        self.non_finite = torch.zeros((), dtype=torch.long, device=device)
        columns = torch.arange(max(*self.window, self.largest_tree) - 1, device=device)
        self._tokens = torch.zeros(max_requests + 1, len(columns), dtype=torch.long, device=device)
        self._parent = (columns - 1).expand_as(self._tokens)
        self._depth = (columns + 1).expand_as(self._tokens)
        self._pending = torch.zeros(max_requests + 1, len(columns) + 1, c.feature_size, device=device)

    @classmethod
    def load(
        cls, folder: Path, target: Target, max_requests: int, draft_temperature: float | None = None
    ) -> Eagle3Drafter:
        """From a folder; see `load_eagle3` for what is refused."""
        checkpoint = load_eagle3(folder)
        need = cls.memory_bytes(checkpoint.config, max_requests, target.capacity, target.dtype)
        require_fits({"drafter": need}, target.device)
        return cls(checkpoint, target, max_requests, draft_temperature)

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

    def attach(self, target: Target, max_requests: int) -> None:
        """Refuse another target than it was built on, or more room than its cache has.

        Raises:
            ValueError: what was built and what is asked for.
        """
        self._room.check(target, max_requests)

    def begin(self, slot: int, features: Tensor, tokens: Sequence[int]) -> None:
        """Pairs of a prompt: features [len(tokens), n·H] of positions 0 … len(tokens) − 1.

        The last feature waits for the first anchor, the token chosen after the prompt.

        Raises:
            ValueError: features of another length or width.
        """
        expected = (len(tokens), self.config.feature_size)
        if tuple(features.shape) != expected:
            raise ValueError(f"features: expected {expected}, got {tuple(features.shape)}")
        whole, device, dump = len(tokens) - 1, features.device, self.cache.dump
        for start in range(0, whole, CONTEXT_ROWS):
            end = min(start + CONTEXT_ROWS, whole)
            rows = make_rows((slot,), (end - start,), dump, device, self.row_tile)
            extent = torch.full((dump + 1,), end, device=device)
            where = (rows, rows.column + start, rows.slot != dump, extent, kv_bound(end))
            said = torch.zeros(rows.padded, dtype=torch.long, device=device)
            said[: rows.total] = torch.tensor(tokens[start + 1 : end + 1], device=device)
            chunk = features[start:end]
            chunk = pad_rows(chunk) if rows.padded > rows.total else chunk
            self._run(where, said, chunk, rows.every[:0], fuse=True)
        self._pending[slot, 0] = features[-1]

    def propose(self, state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
        """Guess columns 1 … effective − 1 of every drafting slot, a pass a depth; or trees as deep.

        Args:
            noise: [N, V] Gumbel noise by target row, or None when every request is greedy.

        Raises:
            ValueError: blocks wider than the drafter's window, or a state with more columns than its trees have.
        """
        most, widest, columns = max(self.window), max(plan.widths), self._tokens.shape[1] + 1
        if widest > most or state.widest > columns:
            raise ValueError(
                f"plan, state: expected blocks of at most {most} in {columns} columns, "
                f"got {widest} in {state.widest}"
            )
        if plan.trees is None:
            self._draft_chains(state, plan, noise)
        n = state.widest - 1
        chain = Proposal(self._tokens[:, :n], self._parent[:, :n], self._depth[:, :n])
        return chain if plan.trees is None else grow(self, state, plan, noise, chain)

    def commit(self, state: State, plan: StepPlan, features: Tensor) -> None:
        """Keep the features of what the step committed, the first `state.count[r]` rows of a slot, for `propose`."""
        rows, room = plan.draft_rows, self._pending.shape[1]
        kept = features.index_select(0, plan.draft_source)
        self._pending.flatten(0, 1).index_copy_(0, rows.slot * room + rows.column, kept)

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
        count = torch.where(state.done, 0, state.count)
        exists = rows.column < count[rows.slot]
        position = torch.where(exists, cached[rows.slot] - count[rows.slot] + rows.column, 0)
        said = state.tokens[rows.slot, torch.where(exists, position + 1, 0)]
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

    def _build(self, checkpoint: Eagle3Checkpoint, target: Any, max_requests: int) -> None:
        """Lay out weights, rotary tables and the cache beside a target of the same implementation."""
        m, device, dtype = self.config.model, target.device, target.dtype
        tensors = {k: v.to(device) for k, v in checkpoint.tensors.items()}
        own = tensors.get(EMBEDDING)
        self._embedding = target.embedding if own is None else own.to(dtype)
        self._head = PackedLinear(tensors["lm_head.weight"], None, dtype)
        self.fc = PackedLinear(tensors["fc.weight"], None, dtype)
        self.norm = tensors["norm.weight"].float()
        self.hidden_norm = tensors["midlayer.hidden_norm.weight"].float()
        shape = LayerShape(m.num_heads, m.num_kv_heads, m.head_dim, m.rms_norm_eps)
        self.layer = DecoderLayer(tensors, "midlayer.", shape, dtype, window=m.sliding_window[0])
        self._cos, self._sin = (t.to(device) for t in rope_tables(m.rope, m.head_dim, target.capacity))
        self.cache = KVCache(1, max_requests, m.num_kv_heads, self._places(target), m.head_dim, dtype, device)

    def _places(self, target: Target) -> int:
        """Positions of the cache: those of the target, and the branches of one tree."""
        return target.capacity + max(self.window) * self.beam
