"""GGUF files of every supported type, architecture and setting, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.gguf import SUPPORTED_TYPES, read_gguf
from blockpilot.targets.rope import inverse_frequencies
from blockpilot.targets.stored import CheckpointError
from tests.targets.gguf_files import SIZES, hf_weights, write_gguf


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return hf_weights("llama", tie_word_embeddings=True)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_every_type_equals_the_gguf_package(
    kind: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", weights, kind=Type[kind]))
    assert checkpoint.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        stored = Type[kind] if tensor.dim() == 2 else Type.F32
        expected = gguf.dequantize(gguf.quantize(tensor.numpy(), stored), stored)
        assert checkpoint.tensors[name].dtype == torch.float32
        assert torch.equal(checkpoint.tensors[name], torch.from_numpy(expected.copy())), name
    assert checkpoint.kind == "gguf" and checkpoint.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("arch", "family", "over"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral3", "llama", {"tie_word_embeddings": True}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_architectures(arch: str, family: str, over: dict[str, Any], tmp_path: Path) -> None:
    weights = hf_weights(family, **over)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", weights, arch))
    assert checkpoint.tensors.keys() == weights.keys()
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in weights.items())
    config = checkpoint.config
    assert (config.family, config.head_dim, config.vocab_size) == (family, 16, 48)
    assert (config.num_heads, config.num_kv_heads, config.num_layers) == (4, 2, 2)
    assert (config.rms_norm_eps, config.rope.theta, config.max_position_embeddings) == (1e-5, 50000.0, 128)
    assert config.tie_word_embeddings == bool(over.get("tie_word_embeddings"))
    assert config.qkv_bias == (family == "qwen2" or "attention_bias" in over)
    assert config.o_bias == ("attention_bias" in over) and config.mlp_bias == ("mlp_bias" in over)
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1


def test_metadata_equals_the_gguf_package(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    values = {"a.bool": True, "a.int": 7, "a.text": "é😀", "a.list": [1, -2], "a.words": ["x", "", "ü"]}
    path = write_gguf(tmp_path / "m.gguf", weights, metadata=values)
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata.keys() == theirs.keys()
    for key, value in theirs.items():
        assert file.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value)
    assert all(file.metadata[key] == value for key, value in values.items())
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.offset, ours.nbytes, ours.type) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type,
        )
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))


def test_every_declared_end_is_a_stop_id(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    assert load_checkpoint(write_gguf(tmp_path / "m.gguf", weights, metadata=ends)).config.eos_token_ids == (
        2,
        9,
    )


@pytest.mark.parametrize(
    ("metadata", "hf"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_log_multiplier": 0.5,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling(
    metadata: dict[str, Any], hf: dict[str, Any], weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    prefixed = {f"llama.{key}": value for key, value in metadata.items()}
    config = load_checkpoint(write_gguf(tmp_path / "m.gguf", weights, metadata=prefixed)).config
    reference = LlamaConfig(**{**SIZES, "rope_parameters": {**hf, "rope_theta": 50000.0}})
    expected, scale = ROPE_INIT_FUNCTIONS[hf["rope_type"]](reference)
    frequencies, our_scale = inverse_frequencies(config.rope, 16)
    assert torch.equal(frequencies, expected) and our_scale == pytest.approx(scale)


def test_llama3_frequency_factors(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The converter stores plain / llama3 frequencies as a tensor; dividing by it gives llama3's back."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    reference = LlamaConfig(**{**SIZES, "rope_parameters": {**llama3, "rope_theta": 50000.0}})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](reference)
    plain = 1.0 / 50000.0 ** (torch.arange(0, 16, 2).float() / 16)
    path = write_gguf(tmp_path / "m.gguf", weights, extra={"rope_freqs.weight": plain / expected})
    frequencies, scale = inverse_frequencies(load_checkpoint(path).config.rope, 16)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(frequencies, plain) and scale == 1.0


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("gemma2", {}, "architecture 'gemma2'.*supported: whole models of llama, mistral3, qwen2, qwen3"),
        ("llama", {"general.type": "adapter"}, "type 'adapter'"),
        ("llama", {"split.count": 2}, "one of 2 parts"),
        ("llama", {"llama.expert_count": 8}, "'expert_count': 8"),
        ("llama", {"llama.attention.sliding_window": 64}, "'attention.sliding_window': 64"),
        ("llama", {"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 is not supported"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "'longrope'; supported: none, linear, yarn"),
        (
            "llama",
            {"llama.rope.scale_linear": 2.0, "llama.rope.scaling.attn_factor": 2.0},
            "attn_factor = 2.0",
        ),
        ("llama", {"tokenizer.ggml.eot_token_id": 48}, "outside the vocabulary of 48"),
    ],
)
def test_unsupported_models(
    arch: str, metadata: dict[str, Any], message: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_gguf(tmp_path / "m.gguf", weights, arch, metadata=metadata))


def test_unsupported_type_is_named(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights, kind=Type.Q5_0)
    with pytest.raises(CheckpointError, match=r"token_embd.weight: expected one of F32.*Q4_1, found Q5_0"):
        load_checkpoint(path)


def test_tensors_must_be_those_the_metadata_describes(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    less = {name: tensor for name, tensor in weights.items() if name != norm}
    with pytest.raises(CheckpointError, match=r"blk.1.attn_norm.weight: expected \[64\], found nothing"):
        load_checkpoint(write_gguf(tmp_path / "a.gguf", less))
    with pytest.raises(CheckpointError, match=r"blk.1.attn_norm.weight: expected \[64\], found \[32\]"):
        load_checkpoint(write_gguf(tmp_path / "b.gguf", {**weights, norm: torch.zeros(32)}))
    more = {"blk.0.attn_sinks.weight": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"found also \['blk.0.attn_sinks.weight'\]"):
        load_checkpoint(write_gguf(tmp_path / "c.gguf", weights, extra=more))
