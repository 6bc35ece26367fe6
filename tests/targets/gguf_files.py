"""Tiny GGUF files: real ones through gguf.GGUFWriter, crafted ones byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from blockpilot.targets.gguf_load import gguf_name

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def hf_weights(family: str, seed: int = 0, **over: Any) -> dict[str, Tensor]:
    """Random weights under HF names, a tied head left out."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **over}))
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    if over.get("tie_word_embeddings"):
        state.pop("lm_head.weight")
    return state


def write_gguf(
    path: Path,
    weights: dict[str, Tensor],
    arch: str = "llama",
    kind: Type = Type.F32,
    *,
    kinds: dict[str, Type] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Path:
    """Convert as llama.cpp does: vectors as F32, matrices as `kind`, llama's q and k rows permuted.

    kinds: of matrices whose GGUF names end so, such as "attn_q".
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_rope_freq_base(SIZES["rope_theta"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        add(writer, key, value)
    named = {gguf_name(name): permuted(arch, name, tensor) for name, tensor in weights.items()}
    for name, tensor in {**named, **(extra or {})}.items():
        stored = (kinds or {}).get(name.split(".")[-2], kind) if tensor.dim() == 2 else Type.F32
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    methods = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    methods.get(type(value), writer.add_array)(key, value)


def permuted(arch: str, name: str, tensor: Tensor) -> Tensor:
    """The row order that llama.cpp's interleaved rotary embedding wants."""
    heads = {"q_proj": SIZES["num_attention_heads"], "k_proj": SIZES["num_key_value_heads"]}
    part = name.split(".")[-2]
    if arch not in ("llama", "mistral3") or part not in heads:
        return tensor
    array = tensor.numpy().reshape(heads[part], 2, -1, *tensor.shape[1:])
    return torch.from_numpy(np.ascontiguousarray(array.swapaxes(1, 2)).reshape(tensor.shape))


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(
    name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0, count: int | None = None
) -> bytes:
    number = len(dims) if count is None else count
    return text(name) + struct.pack("<I", number) + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def crafted(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = bytes(64),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_kv: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A file from parts, with any count overridden."""
    entries, tensors = entries or [], tensors or []
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(entries) if n_kv is None else n_kv,
    )
    header = magic + struct.pack("<I", version) + struct.pack("<QQ", *counts) + b"".join(entries + tensors)
    return header + bytes(-len(header) % 32) + data
