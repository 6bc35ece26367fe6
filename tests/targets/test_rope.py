"""Rotary frequencies and tables against transformers' own rotary modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockpilot.targets.config import RopeConfig
from blockpilot.targets.rope import inverse_frequencies, rope_tables

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 128},
    "llama3 without original": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 24, "beta_slow": 2, "truncate": False},
    "yarn no extension": {"rope_type": "yarn", "factor": 1.0},
}


def hf_config(scaling: dict[str, Any], theta: float, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters={**scaling, "rope_theta": theta},
    )


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 16), (1000000.0, 128)])
def test_frequencies_and_tables_equal_transformers(name: str, theta: float, head_dim: int) -> None:
    config = hf_config(dict(SCALINGS[name]), theta, head_dim)
    rope = RopeConfig.from_hf(config.to_dict())
    frequencies, scale = inverse_frequencies(rope, head_dim)
    if SCALINGS[name]["rope_type"] != "default":
        expected, expected_scale = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config)
        assert torch.equal(frequencies, expected)
        assert scale == pytest.approx(expected_scale)
    cos, sin = rope_tables(rope, head_dim, 512)
    module = LlamaRotaryEmbedding(config)
    expected_cos, expected_sin = module(torch.zeros(1), torch.arange(512)[None])
    half = head_dim // 2
    assert torch.equal(cos, expected_cos[0, :, :half])
    assert torch.equal(sin, expected_sin[0, :, half:])
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (512, half)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
def test_each_scaling_changes_something_but_dynamic(name: str) -> None:
    """Guards the comparison above: the scalings are not all the default in disguise."""
    rope = RopeConfig.from_hf(hf_config(dict(SCALINGS[name]), 10000.0, 64).to_dict())
    frequencies, scale = inverse_frequencies(rope, 64)
    plain, _ = inverse_frequencies(RopeConfig(theta=10000.0), 64)
    changed = not torch.allclose(frequencies, plain, atol=0) or scale != 1.0
    assert changed == (name not in ("dynamic", "yarn no extension"))


def test_dynamic_is_exact_up_to_its_context_and_refused_beyond() -> None:
    rope = RopeConfig.from_hf({"max_position_embeddings": 64, "rope_scaling": SCALINGS["dynamic"]})
    assert rope.max_exact_position == 64
    cos, _ = rope_tables(rope, 16, 64)
    assert torch.equal(cos, rope_tables(RopeConfig(), 16, 64)[0])
    with pytest.raises(ValueError, match="65 cannot be served exactly; use max_length <= 64"):
        rope_tables(rope, 16, 65)


def test_other_types_have_no_exact_limit() -> None:
    assert RopeConfig.from_hf({"rope_scaling": SCALINGS["linear"]}).max_exact_position is None


def test_frequency_factors_divide() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    scaled, _ = inverse_frequencies(RopeConfig(frequency_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    assert torch.equal(scaled, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
    with pytest.raises(ValueError, match="expected 4 frequency factors, got 3"):
        inverse_frequencies(RopeConfig(frequency_factors=(1.0, 2.0, 3.0)), 8)


def test_position_zero_is_the_attention_scale() -> None:
    rope = RopeConfig(type="yarn", factor=4.0, attention_factor=0.7)
    cos, sin = rope_tables(rope, 8, 3)
    assert cos[0].tolist() == pytest.approx([0.7] * 4) and sin[0].tolist() == [0.0] * 4
