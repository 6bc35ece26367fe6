"""The metadata of a GGUF file as a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockpilot.targets.config import ModelConfig
from blockpilot.targets.gguf import GGUFFile, read_tensor
from blockpilot.targets.stored import CheckpointError

# llama.cpp architecture → the family it is computed as.
ARCHITECTURES = {"llama": "llama", "mistral3": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Settings that change the arithmetic; any value but absent or 0 is refused.
_FOREIGN = ("expert_count", "attention.sliding_window", "attention.temperature_scale")


def model_config(file: GGUFFile) -> ModelConfig:
    """The config that the metadata and the tensor names describe.

    Raises:
        CheckpointError: an architecture or a setting that is not supported, or a missing or impossible value.
    """
    try:
        return _from_tensors(file, ModelConfig.from_hf(_as_hf(file)))
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file.path}: GGUF metadata: {error}") from error


def _as_hf(file: GGUFFile) -> dict[str, Any]:
    """The keys a `config.json` would have."""
    meta, tensors = file.metadata, file.tensors
    arch = _architecture(meta)
    get = {key.removeprefix(f"{arch}."): value for key, value in meta.items() if key.startswith(f"{arch}.")}
    if foreign := {key: get[key] for key in _FOREIGN if get.get(key)}:
        raise ValueError(f"unsupported settings {foreign}; expected them absent")
    if "token_embd.weight" not in tensors:
        raise ValueError("tensor token_embd.weight: expected an embedding, found nothing")
    if "attention.layer_norm_rms_epsilon" not in get:
        raise ValueError("expected attention.layer_norm_rms_epsilon, found nothing")
    special = [meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    heads = get.get("attention.head_count")
    return {
        "model_type": ARCHITECTURES[arch],
        "hidden_size": get.get("embedding_length"),
        "intermediate_size": get.get("feed_forward_length"),
        "num_hidden_layers": get.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get.get("attention.head_count_kv", heads),
        "head_dim": _head_dim(get),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": get["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": get.get("context_length"),
        "rope_theta": get.get("rope.freq_base"),
        "rope_scaling": _rope_scaling(get),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": [token for token in special if token is not None],
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
    }


def _from_tensors(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """What only the tensors say: biases, and the per-frequency divisors of Llama 3."""
    rope = config.rope
    if "rope_freqs.weight" in file.tensors:
        factors = read_tensor(file, "rope_freqs.weight", (config.head_dim // 2,))
        rope = replace(rope, frequency_factors=tuple(factors.tolist()))
    return replace(
        config,
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )


def _architecture(meta: Mapping[str, Any]) -> str:
    arch, kind = meta.get("general.architecture"), meta.get("general.type", "model")
    parts = meta.get("split.count", 1)
    if arch not in ARCHITECTURES or kind != "model" or parts > 1:
        raise ValueError(
            f"unsupported file: architecture {arch!r}, type {kind!r}, one of {parts} parts; "
            f"supported: whole models of {', '.join(ARCHITECTURES)}"
        )
    return str(arch)


def _head_dim(get: Mapping[str, Any]) -> Any:
    size = get.get("attention.key_length", get.get("rope.dimension_count"))
    for key in ("attention.value_length", "rope.dimension_count"):
        if size is not None and get.get(key, size) != size:
            raise ValueError(f"{key} = {get[key]} is not supported; expected the head size {size}")
    return size


def _rope_scaling(get: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope.scaling.*` metadata under transformers' names."""
    kind = get.get("rope.scaling.type", "linear" if get.get("rope.scale_linear") else "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"unsupported rope.scaling.type {kind!r}; supported: none, linear, yarn")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if (value := get.get(f"rope.scaling.{key}", 1.0)) != 1.0:
            raise ValueError(f"rope.scaling.{key} = {value} is not supported; expected 1")
    return {
        "rope_type": kind,
        "factor": get.get("rope.scaling.factor", get.get("rope.scale_linear")),
        "original_max_position_embeddings": get.get("rope.scaling.original_context_length"),
        "beta_fast": get.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": get.get("rope.scaling.yarn_beta_slow"),
        "mscale": 1.0,
        "mscale_all_dim": get.get("rope.scaling.yarn_log_multiplier"),
    }
