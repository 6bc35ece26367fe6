"""Reading a target's weights: every expected tensor is checked by name, shape and dtype before it is used."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from blockpilot.errors import BlockPilotError
from blockpilot.targets import hub
from blockpilot.targets.config import ModelConfig
from blockpilot_kernels.packed_decoder import Blocks

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOAT_TYPES = ("F32", "BF16", "F16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Buffers that old exporters stored and the model recomputes.
HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_HEADER_LIMIT = 100_000_000
_SAMPLES, _SAMPLE_BYTES = 16, 32


class CheckpointError(BlockPilotError, ValueError):
    """A model file is missing, damaged, or does not fit its configuration."""


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
    """

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    path: Path
    kind: str
    fingerprint: str
    tokenizer_source: Path | Mapping[str, Any]
    blocks: Mapping[str, Blocks] = field(default_factory=dict)
    block_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a safetensors header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


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
    stored = stored_tensors(path)
    tensors = _read(config, stored, path)
    return Checkpoint(config, tensors, path, "safetensors", fingerprint(config, tensors), path)


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


@dataclass(frozen=True)
class Sample:
    """What a fingerprint looks at: shape, dtype, size in bytes, and a reader of byte ranges."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, tensor: Tensor) -> Sample:
        """A tensor in memory."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return cls(tuple(tensor.shape), tensor.dtype, len(data), lambda a, b: data[a:b].tobytes())


def fingerprint(config: ModelConfig, tensors: Mapping[str, Tensor | Sample]) -> str:
    """Hex SHA-256 of the config and of each tensor's name, shape, dtype and 16 spread runs of 32 bytes."""
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for name in sorted(tensors):
        found = tensors[name]
        sample = Sample.of(found) if isinstance(found, Tensor) else found
        last = max(sample.size - _SAMPLE_BYTES, 0)
        digest.update(f"{name} {sample.shape} {sample.dtype}".encode())
        for start in (last * i // (_SAMPLES - 1) for i in range(_SAMPLES)):
            digest.update(sample.read(start, min(start + _SAMPLE_BYTES, sample.size)))
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: not JSON, or not an object.
    """
    return _object(path, path.read_bytes())


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON object, but it cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Where every tensor of a folder is stored, from the index or the single file; no weights are read.

    Raises:
        CheckpointError: no safetensors, missing shards, or damaged files.
    """
    if (folder / INDEX).is_file():
        return _indexed_tensors(folder)
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    names = sorted(p.name for p in folder.iterdir())
    if any(name.endswith(PICKLES) for name in names):
        raise CheckpointError(
            f"{folder}: pickle checkpoints are not loaded (opening one can run code); expected {WEIGHTS} or "
            f"{INDEX}, found {names}. Save the model again with safetensors"
        )
    raise CheckpointError(f"{folder}: expected {WEIGHTS} or {INDEX}, found {names or 'an empty folder'}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Names, dtypes and shapes in a safetensors file, with every size checked against the file's.

    Raises:
        CheckpointError: truncated or damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise CheckpointError(f"{path}: expected a header of {length} bytes, found {size} bytes in all")
        header = _object(path, file.read(length))
    entries = {name: _entry(path, name, value) for name, value in header.items() if name != "__metadata__"}
    end = 8 + length + max((stop for _, stop in entries.values()), default=0)
    if end != size:
        raise CheckpointError(f"{path}: truncated or damaged: the header says {end} bytes, found {size}")
    return {name: stored for name, (stored, _) in entries.items()}


def _entry(path: Path, name: str, value: Any) -> tuple[StoredTensor, int]:
    try:
        dtype, shape, (start, stop) = str(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name}: bad header entry {value!r}") from error
    bytes_needed = math.prod(shape) * _ITEM_BYTES[dtype] if whole and dtype in _ITEM_BYTES else None
    if not whole or (bytes_needed is not None and stop - start != bytes_needed):
        raise CheckpointError(
            f"{path}: tensor {name}: expected {bytes_needed} bytes for {dtype} {list(shape)}, found offsets "
            f"{value['data_offsets']}"
        )
    return StoredTensor(path, dtype, shape), stop


def _indexed_tensors(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    placed = read_json(index).get("weight_map")
    names = placed.values() if isinstance(placed, dict) else [None]
    if any(not isinstance(name, str) or name != Path(name).name for name in names):
        raise CheckpointError(f"{index}: expected weight_map to name a file in this folder for every tensor")
    assert isinstance(placed, dict)  # for the type checker
    files = sorted(set(placed.values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder}: missing shards {missing}: expected {files} from {INDEX}; download them again"
        )
    headers = {name: read_header(folder / name) for name in files}
    if absent := [tensor for tensor, name in placed.items() if tensor not in headers[name]]:
        first = absent[0]
        raise CheckpointError(
            f"{folder / placed[first]}: tensor {first}: expected in this shard by {INDEX}, found nothing "
            f"({len(absent)} such tensors)"
        )
    return {tensor: headers[name][tensor] for tensor, name in placed.items()}


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


def _read(config: ModelConfig, stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, Tensor]:
    wanted = dict(expected_tensors(config))
    for name, shape in wanted.items():
        found = stored.get(name)
        if found is None:
            raise CheckpointError(f"{folder}: tensor {name}: expected {list(shape)}, found nothing")
        where = f"{found.file}: tensor {name}"
        if found.shape != shape:
            raise CheckpointError(f"{where}: expected {list(shape)}, found {list(found.shape)}")
        if found.dtype not in FLOAT_TYPES:
            raise CheckpointError(f"{where}: expected {', '.join(FLOAT_TYPES)}, found {found.dtype}")
    tied_head = {HEAD} & stored.keys() if config.tie_word_embeddings else set()
    refuse_unexpected(stored.keys() - wanted.keys() - tied_head, folder)
    by_file: dict[Path, list[str]] = {}
    for name in wanted.keys() | tied_head:
        by_file.setdefault(stored[name].file, []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, names in sorted(by_file.items()):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update((name, opened.get_tensor(name)) for name in names)
        except Exception as error:  # safetensors raises its own error type, straight from Rust
            raise CheckpointError(f"{file}: {error}") from error
    if tied_head and not torch.equal(tensors.pop(HEAD).float(), tensors[EMBEDDING].float()):
        raise CheckpointError(
            f"{folder}: tensor {HEAD}: expected the embedding (tie_word_embeddings is true), found other "
            "values; set tie_word_embeddings to false in config.json if the model has its own head"
        )
    return tensors


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
