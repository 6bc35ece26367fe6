"""The CPU target: one C++ call a pass, over packed weights, for exactly the rows that exist."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.plan import StepPlan
from blockpilot.rows import Rows, make_rows
from blockpilot.state import State
from blockpilot.targets.checkpoint import Checkpoint, expected_tensors
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.cpp_cache import CppCache
from blockpilot.targets.packed_cache import Packed, PackedKey, cached
from blockpilot.targets.packing import pack_layer, padded_size, rounding_of, stored_or_float
from blockpilot.targets.rope import rope_tables
from blockpilot.targets.torch_target import PREFILL_ROWS, WIDEST_BLOCK, check_features
from blockpilot_kernels.packed_decoder import (
    FORMATS,
    Blocks,
    Geometry,
    Record,
    Weights,
    decoder_forward,
    decoder_plan,
    move_places,
    packed_rows,
    records_of,
    verify_commit,
    weighted_rows,
)

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def packed_bytes(checkpoint: Checkpoint, weights: str, dtype: torch.dtype) -> int:
    """Bytes of the packed weights, padding left out."""
    shapes = dict(expected_tensors(checkpoint.config))
    total = 0
    for name, shape in shapes.items():
        dense = math.prod(shape) * (dtype.itemsize if len(shape) == 2 else 4)
        # One product's matrices stay in blocks only if all are of one kind, which their density tells.
        density = {checkpoint.block_bytes.get(n, 0) / math.prod(shapes[n]) for n in _product(name)}
        stored = weights != "dense" and len(density) == 1 and 0 not in density
        total += checkpoint.block_bytes[name] if stored else dense
    return total


def _product(name: str) -> list[str]:
    """The tensors that are packed into one matrix with `name`, itself among them."""
    part = name.split(".")[-2]
    return [name.replace(part, p) for p in next((j for j in _JOINED if part in j), (part,))]


def _packed_key(checkpoint: Checkpoint, dtype: torch.dtype, weights: str) -> PackedKey:
    source = json.dumps(checkpoint.files)
    place = str(checkpoint.path.resolve())
    return PackedKey("target", (checkpoint.fingerprint, weights, str(dtype), place), source)


class PackedTable:
    """The target's embedding [V, H], for policies and for drafters that borrow it."""

    def __init__(self, blob: Tensor, record: Record) -> None:
        self._blob, self._record = blob, record
        self.shape, self.device, self.ndim = record[2:4], blob.device, 2

    def __getitem__(self, ids: Tensor) -> Tensor:
        """ids of any shape → their rows [..., H], floats."""
        rows = packed_rows(self._blob, self._record, ids.flatten())
        return (rows.dequantise() if isinstance(rows, Blocks) else rows).unflatten(0, ids.shape)

    def weighted_mean(self, p: Tensor) -> Tensor:
        """p [R, V] float32 → p @ E, [R, H]."""
        return weighted_rows(p, self._blob, self._record)


class CppTarget:
    """Llama-style decoder over `max_requests` slots of `capacity` positions, on CPU tensors.

    Args:
        checkpoint: config and tensors under HF names.
        max_requests: slots. capacity: positions per slot.
        dtype: torch.float32 or torch.bfloat16: KV cache, float weights and the rounding of matmul inputs.
        weights: "stored" keeps the file's blocks, "stored-int16" and "stored-int8" round their inputs to 16-bit codes
            or bytes as well, "dense" makes floats of them.
        keep: take packed weights from the cache and put them there. Only for a checkpoint that is as it was loaded:
            the cache goes by fingerprint and files, not by every value.

    Attributes:
        blob: the packed weights, uint8. matrices: records in `blob` of a pass's products, in their order.
        formats: bytes of matrices by format name. packed_key: what `blob` is cached as; None: it is not.
    """

    row_tile = 1

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_requests: int,
        capacity: int,
        dtype: torch.dtype,
        weights: str,
        *,
        keep: bool = False,
    ) -> None:
        c = self.config = checkpoint.config
        self.device, self.dtype, self.capacity, self.weights = torch.device("cpu"), dtype, capacity, weights
        self.fingerprint = checkpoint.fingerprint
        self.geometry = Geometry(
            c.hidden_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            padded_size(c.intermediate_size),
            c.num_layers,
            rounding_of(weights, dtype),
        )
        self.packed_key = _packed_key(checkpoint, dtype, weights) if keep and checkpoint.files else None
        self._take(cached(self.packed_key, lambda: self._pack(checkpoint)))
        cos, sin = rope_tables(c.rope, c.head_dim, capacity)
        self.rope = (cos.float().contiguous(), sin.float().contiguous())
        self.cache = CppCache(c.num_layers, max_requests, c.num_kv_heads, capacity, c.head_dim, dtype)
        self.feature_layers: tuple[int, ...] = ()
        self.forwards = 0

    def _pack(self, checkpoint: Checkpoint) -> Packed:
        c, tensors = self.config, checkpoint.tensors
        get = stored_or_float(tensors, checkpoint.blocks, self.weights)
        size = packed_bytes(checkpoint, self.weights, self.dtype)
        packed = Weights(self.dtype, size + size // 16 + (1 << 20))  # rows are padded to whole panels
        embedding = packed.linear(get("model.embed_tokens.weight"))
        head = embedding if c.tie_word_embeddings else packed.linear(get("lm_head.weight"))
        norm = packed.vector(tensors["model.norm.weight"])
        layers = [
            pack_layer(packed, get, tensors, f"model.layers.{i}.", self.geometry, window=c.sliding_window[i])
            for i in range(c.num_layers)
        ]
        records = (embedding, *(r for x in layers for r in (x.qkv, x.out, x.gate_up, x.down)), head)
        words = {
            "plan": decoder_plan(self.geometry, embedding, head, norm, layers).tolist(),
            "records": [word for record in records for word in record],
            "formats": [packed.formats.get(name, 0) for name in FORMATS],
        }
        return Packed(packed.blob(), words)

    def _take(self, packed: Packed) -> None:
        words = packed.words
        self.blob, self._plan = packed.blob, torch.tensor(words["plan"], device="cpu")
        self.embedding_record, *matrices = records_of(words["records"])
        self.matrices, self.head_record = tuple(matrices), matrices[-1]
        self.formats = {name: size for name, size in zip(FORMATS, words["formats"], strict=True) if size}
        self._weights = (self.blob,)
        self._scalars = (self.config.rms_norm_eps, 1.0, 1.0)
        self.embedding = PackedTable(self.blob, self.embedding_record)

    @staticmethod
    def memory_bytes(
        config: ModelConfig, max_requests: int, capacity: int, dtype: torch.dtype, stored: int
    ) -> int:
        """Bytes of `stored` packed weights, KV cache and the largest activations."""
        c = config
        kv = (c.num_layers, max_requests, c.num_kv_heads, capacity, c.head_dim, dtype)
        rows = max(PREFILL_ROWS, max_requests * WIDEST_BLOCK)
        wide = 4 * c.hidden_size + 3 * c.intermediate_size + 3 * c.num_heads * c.head_dim
        logits = 4 * 4 * c.vocab_size * max_requests * WIDEST_BLOCK
        return stored + CppCache.bytes_needed(*kv) + 8 * rows * wide + logits

    def use_features(self, layers: Sequence[int]) -> None:
        """Choose the hidden states handed to the drafter (HF convention: k = output of layer k−1, 0 = embeddings).

        Raises:
            ValueError: an index outside 0 … num_layers.
        """
        self.feature_layers = check_features(layers, self.config.num_layers)

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
        """One pass over packed rows → logits [N, V], features [N, n·H]; see `TorchTarget.forward`."""
        return self._forward(rows, tokens, position, exists, extent, rows.every, path)

    def compact(self, begin: Tensor, source: Tensor, count: Tensor) -> None:
        """See `Target.compact`."""
        slots, columns = (torch.arange(n, device=begin.device) for n in source.shape)
        kept = columns < count[:, None]
        # What does not move goes from place 0 to place 0, which is skipped.
        moves = [torch.where(kept, begin[:, None] + x, 0).flatten() for x in (source, columns)]
        move_places(self.cache.k, self.cache.v, slots.repeat_interleave(len(columns)), *moves)

    def verify_commit(
        self, state: State, plan: StepPlan, noise: Tensor | None, trees: Proposal | None = None
    ) -> tuple[Tensor, list[int]]:
        """Verify every active slot's block or tree, choose and commit, in one call; see `Target`."""
        self.forwards += 1
        return verify_commit(
            self._weights,
            self._plan,
            self._scalars,
            self.cache.k,
            self.cache.v,
            self.rope,
            state.tensors,
            (plan.slots, plan.nodes or plan.widths),
            self.feature_layers,
            noise,
            bans=plan.bans,
            filtered=plan.filtered,
            drafted=None if trees is None else trees.shape,
        )

    def prefill(self, slot: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0, in chunks of 128 rows.

        Returns:
            last-position logits [V] float32, features [len(prompt), n·H] float32.
        """
        features, logits = [], None
        for start in range(0, len(prompt), PREFILL_ROWS):
            ids = prompt[start : start + PREFILL_ROWS]
            end = start + len(ids)
            rows = make_rows((slot,), (len(ids),), self.cache.dump, self.device, 1)
            extent = torch.full((self.cache.dump + 1,), end, device=self.device)
            asked = rows.every[-1:] if end == len(prompt) else rows.every[:0]
            exists = torch.ones(len(ids), dtype=torch.bool, device=self.device)
            tokens = torch.tensor(ids, device=self.device)
            logits, chunk = self._forward(rows, tokens, rows.column + start, exists, extent, asked)
            features.append(chunk)
        assert logits is not None  # a prompt has at least one token; submit refuses an empty one
        return logits[0], torch.cat(features)

    def _forward(
        self,
        rows: Rows,
        tokens: Tensor,
        position: Tensor,
        exists: Tensor,
        extent: Tensor,
        asked: Tensor,
        path: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        where = (rows.slot, position, exists)
        return decoder_forward(
            self._weights,
            self._plan,
            self._scalars,
            self.cache.k,
            self.cache.v,
            self.rope,
            tokens,
            where,
            extent,
            self.feature_layers,
            asked,
            path,
        )
