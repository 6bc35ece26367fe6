"""config.json dictionaries of every family, in both forms, against the config classes of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from blockpilot.targets.config import ModelConfig, RopeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CLASSES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def hf(family: str, **over: Any) -> dict[str, Any]:
    """A config.json in 5.x form."""
    return dict(CLASSES[family](**{**SIZES, **over}).to_dict())


def as_4x(config: dict[str, Any]) -> dict[str, Any]:
    """The same in 4.x form: rope_theta and rope_scaling instead of rope_parameters."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return old


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("form", [dict, as_4x])
def test_sizes_and_defaults(family: str, form: Any) -> None:
    config = ModelConfig.from_hf(form(hf(family, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 5e5})))
    assert (config.family, config.vocab_size, config.hidden_size) == (family, 96, 64)
    assert (config.intermediate_size, config.num_layers) == (80, 4)
    assert (config.num_heads, config.num_kv_heads) == (8, 2)
    assert config.head_dim == (128 if family == "qwen3" else 8)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 256)
    assert config.rope == RopeConfig(theta=5e5, max_position=256, original_max_position=256)
    assert not config.tie_word_embeddings and not config.mlp_bias and not config.o_bias
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")


@pytest.mark.parametrize("family", CLASSES)
def test_a_minimal_file_gets_the_defaults_of_the_class(family: str) -> None:
    """Keys that transformers fills in silently are filled in with the same values."""
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    given = {key: SIZES[key] for key in keep} | {"num_attention_heads": 32}
    config = ModelConfig.from_hf({"model_type": family, **given})
    reference = CLASSES[family](**given)
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == (getattr(reference, "head_dim", None) or 2)
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.sliding_window == ((4096 if family == "mistral" else None),) * 4
    assert config.eos_token_ids == () and config.bos_token_id is None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_bias_covers_the_output_projection(family: str) -> None:
    config = ModelConfig.from_hf(hf(family, attention_bias=True))
    assert config.qkv_bias and config.o_bias and not config.mlp_bias


def test_switches() -> None:
    assert ModelConfig.from_hf(hf("llama", mlp_bias=True)).mlp_bias
    assert ModelConfig.from_hf(hf("qwen2", tie_word_embeddings=True)).tie_word_embeddings
    assert not ModelConfig.from_hf(hf("qwen2")).o_bias
    assert ModelConfig.from_hf(hf("llama", head_dim=16)).head_dim == 16
    assert ModelConfig.from_hf({**hf("llama"), "num_key_value_heads": None}).num_kv_heads == 8


@pytest.mark.parametrize(
    ("family", "over"),
    [
        ("mistral", {"sliding_window": 16}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
    ],
)
def test_windows_equal_transformers(family: str, over: dict[str, Any]) -> None:
    reference = CLASSES[family](**{**SIZES, **over})
    types = getattr(reference, "layer_types", None) or ["sliding_attention"] * 4
    expected = tuple(reference.sliding_window if t == "sliding_attention" else None for t in types)
    assert ModelConfig.from_hf(reference.to_dict()).sliding_window == expected


def test_windows_follow_max_window_layers_without_layer_types() -> None:
    """The 4.x files that predate layer_types."""
    config = hf("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    del config["layer_types"]
    assert ModelConfig.from_hf(config).sliding_window == (None, 16, 16, 16)


def test_special_ids_are_the_union_of_both_files() -> None:
    config = {**hf("llama"), "eos_token_id": 7, "bos_token_id": 1}
    both = ModelConfig.from_hf(config, {"eos_token_id": [9, 7, 8], "bos_token_id": 3})
    assert both.eos_token_ids == (7, 9, 8) and both.bos_token_id == 1
    only = ModelConfig.from_hf({**config, "eos_token_id": None, "bos_token_id": None}, {"bos_token_id": 3})
    assert only.eos_token_ids == () and only.bos_token_id == 3


def test_inner_rope_values_win_as_in_transformers() -> None:
    config = {**hf("llama"), "rope_theta": 1234.0, "rope_parameters": {"rope_theta": 5e5}}
    assert ModelConfig.from_hf(config).rope.theta == 5e5
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    outer = {**hf("llama"), "rope_parameters": yarn, "original_max_position_embeddings": 32}
    assert ModelConfig.from_hf(outer).rope.original_max_position == 32


def test_yarn_infers_a_missing_factor() -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert ModelConfig.from_hf({**hf("llama"), "rope_parameters": rope}).rope.factor == 4.0


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"model_type": "gpt2"}, "unsupported model_type 'gpt2'.*llama.*mistral.*qwen2.*qwen3"),
    "head": ({"architectures": ["LlamaForSequenceClassification"]}, "supported: llama .LlamaForCausalLM."),
    "moe": ({"num_local_experts": 8}, "mixture-of-experts"),
    "activation": ({"hidden_act": "gelu"}, "unsupported activation 'gelu'; supported: silu"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "rope type": (
        {"rope_scaling": {"type": "longrope", "factor": 2}},
        "rope type 'longrope'; supported: def",
    ),
    "multi rope": ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; expected 1.0"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "expected factor .* got None"),
    "equal bands": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "expected high_freq_factor .* above 4.0, got 4",
    ),
    "two ropes": (
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"factor": 4}},
        r"disagree on \['factor'\]",
    ),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "one flat dictionary"),
    "theta": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
    "missing size": ({"hidden_size": None}, "expected hidden_size to be an integer"),
    "huge": ({"num_hidden_layers": 2**40}, r"num_hidden_layers .* in 1\.\.1024"),
    "text size": ({"vocab_size": "96"}, "expected vocab_size .* got '96'"),
    "kv heads": ({"num_key_value_heads": 3}, "8 query heads cannot share 3"),
    "odd heads": ({"head_dim": 7}, "even head_dim, got 7"),
    "eos outside": ({"eos_token_id": 96}, r"\[96\] lie outside the vocabulary of 96"),
    "eos text": ({"eos_token_id": "</s>"}, "expected eos_token_id"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_is_supported(name: str) -> None:
    over, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**hf("llama"), "rope_parameters": None, **over})


def test_refuses_layer_types_it_does_not_know() -> None:
    config = hf("qwen2", use_sliding_window=True, sliding_window=16)
    with pytest.raises(ValueError, match="expected 4 layer_types"):
        ModelConfig.from_hf({**config, "layer_types": ["chunked_attention"] * 4})


def test_refuses_windows_of_the_wrong_length() -> None:
    config = ModelConfig.from_hf(hf("llama"))
    with pytest.raises(ValueError, match="expected 4 windows, one a layer"):
        type(config)(**{**vars(config), "sliding_window": (None,)})
