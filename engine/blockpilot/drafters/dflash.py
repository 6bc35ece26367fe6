"""DFlash: one masked-denoising pass drafts a whole block (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.dflash_checkpoint import DFlashCheckpoint, check_pair, load_dflash
from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.drafters.dflash_tree import tree_proposal
from blockpilot.drafters.draft_vocabulary import DraftVocabulary
from blockpilot.drafters.draws import LARGEST_TREE, Draws, checked_temperature, terms
from blockpilot.drafters.folder import find_drafter
from blockpilot.drafters.head_rows import HeadRows, head_rows
from blockpilot.drafters.room import Room
from blockpilot.memory import require_fits
from blockpilot.plan import StepPlan
from blockpilot.rows import KVCache, Rows, make_rows
from blockpilot.state import State
from blockpilot.targets import Target
from blockpilot.targets.layers import DecoderLayer, LayerShape, Pass, run_layers
from blockpilot.targets.rope import rope_tables
from blockpilot_kernels.head_choice import head_choice
from blockpilot_kernels.norm_rope import block_input, rms_norm
from blockpilot_kernels.qk_rope_append import context_append
from blockpilot_kernels.tiled_linear import TILE, PackedLinear, pad_rows

CONTEXT_ROWS = 128


class DFlashDrafter:
    """Drafts from the target's hidden states of committed tokens, through the target's embedding and head, of which it
    takes only the rows of its draft vocabulary where it has one.

    The drafter's cache holds keys and values made from target features only: one context row per committed
    position before the anchor. A block's own keys and values live there during its pass, at the block's
    positions, and are never read again: `commit` writes context rows over those that were accepted.

    Args:
        checkpoint: config and tensors. target: whose embedding, head and features it uses.
        max_requests: slots. draft_temperature: factor on a request's temperature when drafting.

    Raises:
        ValueError: a drafter made for another target, or a draft temperature that is not positive.

    Attributes:
        non_finite: [] int64, drafts so far whose logits were not finite (its first id was proposed); above zero, the
            drafter overflows in this dtype.
    """

    kind = "dflash"
    largest_tree = LARGEST_TREE
    row_tile = TILE
    cache: Any  # of the layout that the implementation reads

    def __init__(
        self,
        checkpoint: DFlashCheckpoint,
        target: Target,
        max_requests: int,
        draft_temperature: float | None = None,
    ) -> None:
        check_pair(checkpoint, target.config)
        self.draft_temperature = checked_temperature(draft_temperature)
        c = self.config = checkpoint.config
        self.fingerprint, self.block_size = checkpoint.fingerprint, c.block_size
        self.feature_layers = tuple(i + 1 for i in c.target_layer_ids)
        self.window = tuple(range(1, 2 * c.block_size + 1))
        self._embedding = target.embedding
        self._room = Room(target.embedding, max_requests, target.capacity)
        self._vocabulary = DraftVocabulary(checkpoint.vocabulary, c.model.vocab_size, target.device)
        self._build(checkpoint, target, max_requests)
        self.non_finite = torch.zeros((), dtype=torch.long, device=target.device)
        columns = torch.arange(max(*self.window, self.largest_tree) - 1, device=target.device)
        self._tokens = torch.zeros(max_requests + 1, len(columns), dtype=torch.long, device=target.device)
        self._parent = (columns - 1).expand_as(self._tokens)
        self._depth = (columns + 1).expand_as(self._tokens)

    @classmethod
    def load(
        cls,
        source: str | Path,
        target: Target,
        max_requests: int,
        draft_temperature: float | None = None,
    ) -> DFlashDrafter:
        """From "bundled", a folder in z-lab's format, or a hub id; see `load_dflash` for what is refused."""
        checkpoint = load_dflash(find_drafter(source))
        draft_ids = 0 if checkpoint.vocabulary is None else len(checkpoint.vocabulary)
        sizes = (checkpoint.config, max_requests, target.capacity, target.dtype)
        need = cls.memory_bytes(*sizes, draft_ids)
        require_fits({"drafter": need}, target.device)
        return cls(checkpoint, target, max_requests, draft_temperature)

    @staticmethod
    def memory_bytes(
        config: DFlashConfig, max_requests: int, capacity: int, dtype: torch.dtype, draft_ids: int = 0
    ) -> int:
        """Bytes of weights and KV cache, and of the logits of one widest block per slot.

        Args:
            draft_ids: rows of a head of its own, 0 where the target's is borrowed. The target's is there once more
                while they are taken from it.
        """
        m = config.model
        attention = m.hidden_size * m.head_dim * 2 * (m.num_heads + 2 * m.num_kv_heads)
        per_layer = attention + 3 * m.hidden_size * m.intermediate_size
        # A CPU without bf16 matrix instructions keeps rounded weights in fp32, so fp32 is the safe count.
        weights = 4 * (m.num_layers * per_layer + config.feature_size * m.hidden_size)
        kv = (m.num_layers, max_requests, m.num_kv_heads, capacity, m.head_dim, dtype)
        if draft_ids:
            weights += 4 * (draft_ids + m.vocab_size) * m.hidden_size
        logits = 4 * (draft_ids or m.vocab_size) * max_requests * 2 * config.block_size
        return weights + KVCache.bytes_needed(*kv) + 2 * logits  # with their noise

    def attach(self, target: Target, max_requests: int) -> None:
        """Refuse a target whose embedding this drafter does not borrow, or more room than its cache has.

        Raises:
            ValueError: what was built and what is asked for.
        """
        self._room.check(target, max_requests)

    def begin(self, slot: int, features: Tensor, tokens: Sequence[int]) -> None:
        """Context rows of a prompt: features [len(tokens), n·H] of positions 0 … len(tokens) − 1.

        The token chosen after the prompt is the first anchor; it has no context row yet.

        Raises:
            ValueError: features of another length or width.
        """
        expected = (len(tokens), self.config.feature_size)
        if tuple(features.shape) != expected:
            raise ValueError(f"features: expected {expected}, got {tuple(features.shape)}")
        for start in range(0, len(tokens), CONTEXT_ROWS):
            chunk = features[start : start + CONTEXT_ROWS]
            rows = make_rows((slot,), (len(chunk),), self.cache.dump, features.device, self.row_tile)
            if rows.padded > rows.total:
                chunk = pad_rows(chunk)
            self._remember(rows, rows.column + start, rows.slot != self.cache.dump, chunk)

    def propose(self, state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
        """Guess columns 1 … effective − 1 of every drafting slot in one pass over [anchor, mask, …].

        Args:
            noise: [N, V] Gumbel noise by target row, or None when every request is greedy.

        Raises:
            ValueError: blocks wider than the drafter's window, or a state with more columns than its trees have.
        """
        self._check_room(state, plan)
        head = head_rows(plan.draft_rows, plan.dump, self.row_tile)
        if plan.trees is None and self.config.final_logit_softcapping is None:
            self._put(state, head, *self._guess(state, plan, head, noise))
            return self._chain(state)
        logits, draws = self.draft_logits(state, plan), self._draws(state, plan, head, noise)
        if plan.chains:
            columns, finite = draws.choose(logits)
            self._put(state, head, self._vocabulary.ids(columns), finite)
        chain = self._chain(state)
        if plan.trees is None:
            return chain
        proposal, finite = tree_proposal(state, plan, head, draws.scores(logits), chain, self._vocabulary)
        if not plan.chains:
            self._count(state, head, finite)
        return proposal

    def _put(self, state: State, head: HeadRows, ids: Tensor, finite: Tensor) -> None:
        """Drafts [M] of a chain, and how many of them were not finite."""
        stride = self._tokens.shape[1]
        self._tokens.view(-1).index_copy_(0, head.slot * stride + head.column - 1, ids)
        self._count(state, head, finite)

    def _count(self, state: State, head: HeadRows, finite: Tensor) -> None:
        self.non_finite += (~finite & (head.column < state.effective[head.slot])).sum()

    def _check_room(self, state: State, plan: StepPlan) -> None:
        most, widest, columns = max(self.window), max(plan.widths), self._tokens.shape[1] + 1
        if widest > most or state.widest > columns:
            raise ValueError(
                f"plan, state: expected blocks of at most {most} in {columns} columns, "
                f"got {widest} in {state.widest}"
            )

    def _chain(self, state: State) -> Proposal:
        n = state.widest - 1
        return Proposal(self._tokens[:, :n], self._parent[:, :n], self._depth[:, :n])

    def draft_logits(self, state: State, plan: StepPlan) -> Tensor:
        """Logits [M, V'] float32 of columns 1 … width − 1 of every drafting slot, in order, in whole tiles.

        V' is the number of ids of the draft vocabulary, V where there is none.
        Rows at or beyond a slot's effective width hold anything.
        """
        logits = self._raw_logits(state, plan)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def commit(self, state: State, plan: StepPlan, features: Tensor) -> None:
        """Context rows of what the step committed; `state.length` has already advanced by `state.count`.

        The first count[r] verified rows of a slot are the anchor and the accepted tokens; the bonus is the
        next anchor and was not verified, so it has no features.
        """
        rows = plan.draft_rows
        count = state.count[rows.slot]
        position = state.length[rows.slot] - count - 1 + rows.column
        self._remember(rows, position, rows.column < count, features.index_select(0, plan.draft_source))

    def _raw_logits(self, state: State, plan: StepPlan) -> Tensor:
        hidden = self._denoise(state, plan)[head_rows(plan.draft_rows, plan.dump, self.row_tile).row]
        return self._head(hidden) * self.config.output_multiplier

    def _build(self, checkpoint: DFlashCheckpoint, target: Any, max_requests: int) -> None:
        """Lay out weights, rotary tables and the context cache beside a target of the same implementation."""
        m, device = self.config.model, target.device
        ids, self._head = checkpoint.vocabulary, target.head
        if ids is not None:
            self._head = PackedLinear(target.head.rows(ids.to(device)), None, target.dtype)
        self._load_weights({k: v.to(device) for k, v in checkpoint.tensors.items()}, target.dtype)
        self._cos, self._sin = (t.to(device) for t in rope_tables(m.rope, m.head_dim, target.capacity))
        kv = (m.num_layers, max_requests, m.num_kv_heads, target.capacity, m.head_dim)
        self.cache = KVCache(*kv, target.dtype, device)

    def _load_weights(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        c, m = self.config, self.config.model
        shape = LayerShape(m.num_heads, m.num_kv_heads, m.head_dim, m.rms_norm_eps)
        masks = zip(c.causal, m.sliding_window, strict=True)
        self.layers = [
            DecoderLayer(tensors, f"layers.{i}.", shape, dtype, causal=causal, window=window)
            for i, (causal, window) in enumerate(masks)
        ]
        # Every layer makes its context keys and values from the same rows, so one product serves them all.
        names = [f"layers.{i}.self_attn.{p}_proj" for i in range(m.num_layers) for p in "kv"]
        bias = torch.cat([tensors[f"{n}.bias"] for n in names]).float() if m.qkv_bias else None
        self.context_kv = PackedLinear(torch.cat([tensors[f"{n}.weight"] for n in names]), bias, dtype)
        self.k_norms = torch.stack(
            [tensors[f"layers.{i}.self_attn.k_norm.weight"] for i in range(m.num_layers)]
        ).float()
        self.fc = PackedLinear(tensors["fc.weight"], None, dtype)
        self.hidden_norm = tensors["hidden_norm.weight"].float()
        self.norm = tensors["norm.weight"].float()

    def _remember(self, rows: Rows, position: Tensor, exists: Tensor, features: Tensor) -> None:
        """Write context keys and values of features [N, n·H] at `position`; absent rows write nowhere."""
        m = self.config.model
        position = torch.where(exists, position, 0)
        to = self.cache.destination(rows.slot, position, exists)
        context = rms_norm(self.fc(features), self.hidden_norm, m.rms_norm_eps)
        kv = self.context_kv(context).view(len(features), m.num_layers, 2, m.num_kv_heads, m.head_dim)
        cos, sin = self._cos[position], self._sin[position]
        held = (self.cache.k, self.cache.v, self.cache.bad)
        context_append(kv, self.k_norms, cos, sin, to, *held, m.rms_norm_eps)

    def _denoise(self, state: State, plan: StepPlan) -> Tensor:
        """Hidden rows [N, H] of the drafting slots' blocks, after the final norm."""
        rows = plan.draft_rows
        cached = state.length - 1
        exists = rows.column < state.effective[rows.slot]
        position = torch.where(exists, cached[rows.slot] + rows.column, 0)
        to = self.cache.destination(rows.slot, position, exists)
        extent = cached + state.effective
        step = Pass(rows, position, self._cos[position], self._sin[position], to, extent, plan.bound)
        tokens = torch.where(rows.column == 0, state.block[rows.slot, 0], self.config.mask_token_id)
        scale, eps = self.config.input_embedding_scale, self.config.model.rms_norm_eps
        x, normed = block_input(tokens, self._embedding, scale, self.layers[0].input_norm, eps)
        return run_layers(self.layers, x, normed, self.cache, step, self.norm)[0]

    def _guess(
        self, state: State, plan: StepPlan, head: HeadRows, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Draft ids [M] of a chain, and whether their logits were finite."""
        source = plan.draft_source[head.row] - 1
        temperature, banned = terms(state, plan, head.slot, head.column, self.draft_temperature)
        hidden, listed = self._denoise(state, plan)[head.row], self._vocabulary.listed
        scale = self.config.output_multiplier
        return head_choice(hidden, self._head, scale, listed, noise, source, temperature, banned)

    def _draws(self, state: State, plan: StepPlan, head: HeadRows, noise: Tensor | None) -> Draws:
        """Column j guesses what target row j − 1 chooses."""
        rows = (head.slot, head.column, plan.draft_source[head.row] - 1)
        return Draws.of(state, plan, rows, noise, self._vocabulary, self.draft_temperature)
