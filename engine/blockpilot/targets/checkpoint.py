"""Reading a target's weights: every expected tensor is checked by name, shape and dtype before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.targets import hub
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.stored import (
    CheckpointError,
    FileState,
    OnDemand,
    StoredTensor,
    check_stored,
    fingerprint,
    read_json,
    read_tensor,
    sample_of,
    stored_tensors,
)
from blockpilot_kernels.packed_decoder import Blocks

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers that old exporters stored and the model recomputes.
HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded target.

    Attributes:
        tensors: HF name → tensor, rows in HF order; stored dtype (safetensors) or float32 (GGUF, made on each
            access). `lm_head.weight` is absent when `config.tie_word_embeddings`.
        blocks: HF name → the blocks a GGUF file stores, rows in HF order; read on each access.
        block_bytes: their sizes.
        path: the folder or file. kind: "safetensors" or "gguf".
        fingerprint: SHA-256 of the config, tensor names, shapes, dtypes and a sample of each tensor's bytes.
        tokenizer_source: the folder, or the `tokenizer.*` metadata of the GGUF file; see `load_tokenizer`.
        files: states of the files that the tensors are read from.
    """

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    path: Path
    kind: str
    fingerprint: str
    tokenizer_source: Path | Mapping[str, Any]
    blocks: Mapping[str, Blocks] = field(default_factory=dict)
    block_bytes: Mapping[str, int] = field(default_factory=dict)
    files: tuple[FileState, ...] = ()


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Load "smollm2", a safetensors folder, a `.gguf` file or a hub id.

    A folder holds `config.json` and either `model.safetensors` or the shards that
    `model.safetensors.index.json` names; with an index, the index alone decides where each tensor comes from.
    Tensors the config does not account for: known leftovers (`HARMLESS`, a head equal to the tied embedding)
    and names outside `model.` and `lm_head.` are ignored; anything else inside the decoder means that config
    and weights disagree, and is refused. Pickle files are never opened.

    Raises:
        CheckpointError: naming file, tensor, what was expected and what was found.
        ValueError: nothing at `source`.
    """
    path = hub.resolve(source)
    if path.is_file():
        from blockpilot.targets.gguf_load import load_gguf

        return load_gguf(path)
    config = _folder_config(path)
    stored = _wanted(config, stored_tensors(path), path)
    mark = fingerprint(config, {name: sample_of(s) for name, s in stored.items()})
    tensors = OnDemand(stored, lambda name: read_tensor(stored[name], name))
    states = {s.file: s.state for s in stored.values() if s.state is not None}
    files = tuple(states[file] for file in sorted(states))
    return Checkpoint(config, tensors, path, "safetensors", mark, path, files=files)


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """HF name and shape of every tensor the config calls for."""
    c = config
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield EMBEDDING, (c.vocab_size, c.hidden_size)
    linears = (
        ("self_attn.q_proj", query, c.hidden_size, c.qkv_bias),
        ("self_attn.k_proj", key, c.hidden_size, c.qkv_bias),
        ("self_attn.v_proj", key, c.hidden_size, c.qkv_bias),
        ("self_attn.o_proj", c.hidden_size, query, c.o_bias),
        ("mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
    )
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, bias in linears:
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)
        if c.qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (c.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (c.head_dim,)
        yield f"{prefix}input_layernorm.weight", (c.hidden_size,)
        yield f"{prefix}post_attention_layernorm.weight", (c.hidden_size,)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield HEAD, (c.vocab_size, c.hidden_size)


def _folder_config(folder: Path) -> ModelConfig:
    path, generation = folder / "config.json", folder / "generation_config.json"
    if not path.is_file():
        names = sorted(p.name for p in folder.iterdir())
        raise CheckpointError(f"{folder}: expected config.json, found {names or 'an empty folder'}")
    try:
        return ModelConfig.from_hf(read_json(path), read_json(generation) if generation.is_file() else None)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _wanted(config: ModelConfig, stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """Where each tensor that the config calls for lies."""
    wanted = dict(expected_tensors(config))
    check_stored(wanted, stored, folder)
    tied_head = {HEAD} & stored.keys() if config.tie_word_embeddings else set()
    refuse_unexpected(stored.keys() - wanted.keys() - tied_head, folder)
    for name in tied_head:
        head, embedding = (read_tensor(stored[n], n) for n in (name, EMBEDDING))
        if not torch.equal(head.float(), embedding.float()):
            raise CheckpointError(
                f"{folder}: tensor {HEAD}: expected the embedding (tie_word_embeddings is true), found other "
                "values; set tie_word_embeddings to false in config.json if the model has its own head"
            )
    return {name: stored[name] for name in wanted}


def refuse_unexpected(names: set[str], where: Path) -> None:
    """Refuse tensors that belong to the decoder but that the config does not account for.

    Raises:
        CheckpointError: listing them.
    """
    inside = [n for n in names if n.startswith(("model.", "lm_head.")) and not n.endswith(HARMLESS)]
    if inside:
        raise CheckpointError(
            f"{where}: expected only the tensors its config describes, found also {sorted(inside)[:5]} "
            f"({len(inside)} in all); config and weights disagree"
        )
