"""The reference target: a static-KV decoder on PyTorch ops, bitwise row independent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.rows import KVCache, Rows, kv_bound, make_rows
from blockpilot.targets.checkpoint import Checkpoint
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.layers import DecoderLayer, LayerShape, Pass, own_place, run_layers
from blockpilot.targets.rope import rope_tables
from blockpilot_kernels.block_attention import scratch_bytes
from blockpilot_kernels.norm_rope import block_input
from blockpilot_kernels.tiled_linear import TILE, PackedLinear, pad_rows

PREFILL_ROWS = 128
WIDEST_BLOCK = 16  # what the memory estimate allows for; published drafters are at most this wide


def check_features(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """The hidden states a drafter wants of a target of `count` layers, or ValueError."""
    if bad := [k for k in layers if not 0 <= k <= count]:
        raise ValueError(
            f"drafter wants hidden states {bad}, but the target has {count} layers "
            f"(indices 0..{count}); use the drafter that was trained for this target"
        )
    return tuple(layers)


class TorchTarget:
    """Llama-style decoder over `max_requests` slots of `capacity` positions.

    Args:
        checkpoint: config and tensors under HF names.
        max_requests: slots. capacity: positions per slot.
        dtype: torch.float32 or torch.bfloat16 (weights, matmul inputs and KV; the residual stays fp32).
        device: where everything lives.
    """

    row_tile = TILE
    verify_commit = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_requests: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.device, self.dtype, self.capacity = torch.device(device), dtype, capacity
        self.fingerprint = checkpoint.fingerprint
        c, tensors = self.config, {k: v.to(self.device) for k, v in checkpoint.tensors.items()}
        self.shape = LayerShape(c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps)
        self.embedding = tensors["model.embed_tokens.weight"].to(dtype)
        head = self.embedding if c.tie_word_embeddings else tensors["lm_head.weight"]
        self.head = PackedLinear(head, None, dtype)
        self.norm = tensors["model.norm.weight"].float()
        self.layers = [
            DecoderLayer(tensors, f"model.layers.{i}.", self.shape, dtype, window=c.sliding_window[i])
            for i in range(c.num_layers)
        ]
        self.cos, self.sin = (t.to(self.device) for t in rope_tables(c.rope, c.head_dim, capacity))
        kv = (c.num_layers, max_requests, c.num_kv_heads, capacity, c.head_dim)
        self.cache = KVCache(*kv, dtype, self.device)
        self.feature_layers: tuple[int, ...] = ()
        self.forwards = 0

    @staticmethod
    def memory_bytes(
        config: ModelConfig, max_requests: int, capacity: int, dtype: torch.dtype, device: str = "cpu"
    ) -> int:
        """Bytes of weights, KV cache and the largest activations on that type of device."""
        c = config
        attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
        per_layer = attention + 3 * c.hidden_size * c.intermediate_size
        # A CPU without bf16 matrix instructions keeps rounded weights in fp32, so fp32 is the safe count.
        weights = 4 * (c.num_layers * per_layer + 2 * c.vocab_size * c.hidden_size)
        kv = (c.num_layers, max_requests, c.num_kv_heads, capacity, c.head_dim, dtype)
        groups = c.num_heads // c.num_kv_heads
        tiles = max(PREFILL_ROWS * groups // TILE, max_requests * -(-WIDEST_BLOCK * groups // TILE))
        attention_scratch = scratch_bytes(tiles, c.num_kv_heads, c.head_dim, capacity, device)
        # Logits, noise and two temporaries of a filter.
        logits = 4 * 4 * c.vocab_size * max(TILE, max_requests * WIDEST_BLOCK)
        return weights + KVCache.bytes_needed(*kv) + attention_scratch + logits

    def use_features(self, layers: Sequence[int]) -> None:
        """Choose the hidden states handed to the drafter (HF convention: k = output of layer k−1, 0 = embeddings).

        Raises:
            ValueError: an index outside 0 … num_layers.
        """
        self.feature_layers = check_features(layers, self.config.num_layers)

    def forward(
        self,
        rows: Rows,
        tokens: Tensor,
        position: Tensor,
        exists: Tensor,
        extent: Tensor,
        bound: int,
        path: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass over packed rows.

        Args:
            tokens, position: [N] int64. exists: [N] bool; absent rows write nowhere and return garbage.
            extent: [S] places per slot that hold keys after this pass. bound: host bound on them.
            path: see `Target.verify`.

        Returns:
            hidden [N, H] float32 after the final norm; features [N, n·H] float32.
        """
        self.forwards += 1
        position = torch.where(exists, position, 0)
        cos, sin = self.cos[position], self.sin[position]
        to = self.cache.destination(rows.slot, own_place(path, position), exists)
        step = Pass(rows, position, cos, sin, to, extent, bound, path)
        x, normed = block_input(tokens, self.embedding, 1.0, self.layers[0].input_norm, self.shape.eps)
        hidden, states = run_layers(self.layers, x, normed, self.cache, step, self.norm, self.feature_layers)
        return hidden, torch.cat([states[k] for k in self.feature_layers], -1) if states else x[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] float32, N a multiple of 16 → [N, V] float32."""
        return self.head(hidden)

    def verify(
        self,
        rows: Rows,
        tokens: Tensor,
        position: Tensor,
        exists: Tensor,
        extent: Tensor,
        bound: int,
        path: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` for a block or tree per slot → logits [N, V], features [N, n·H]."""
        hidden, features = self.forward(rows, tokens, position, exists, extent, bound, path)
        return self.logits(hidden), features

    def compact(self, begin: Tensor, source: Tensor, count: Tensor) -> None:
        """See `Target.compact`."""
        self.cache.compact(begin, source, count)

    def prefill(self, slot: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0, in chunks of 128 rows.

        Returns:
            last-position logits [V] float32, features [len(prompt), n·H] float32.
        """
        features, hidden = [], None
        for start in range(0, len(prompt), PREFILL_ROWS):
            ids = prompt[start : start + PREFILL_ROWS]
            end = start + len(ids)
            rows = make_rows((slot,), (len(ids),), self.cache.dump, self.device)
            tokens = torch.zeros(rows.padded, dtype=torch.long, device=self.device)
            tokens[: rows.total] = torch.tensor(ids, device=self.device)
            exists = rows.slot != self.cache.dump
            extent = torch.full((self.cache.dump + 1,), end, device=self.device)
            hidden, chunk = self.forward(rows, tokens, rows.column + start, exists, extent, kv_bound(end))
            features.append(chunk[: rows.total])
        assert hidden is not None  # a prompt has at least one token; submit refuses an empty one
        last = hidden[rows.total - 1 : rows.total]
        return self.logits(pad_rows(last))[0], torch.cat(features)
