"""Rotary position embedding: frequencies and cosine/sine tables for every supported scaling.

RoPE: Su et al. 2021. Dynamic NTK: the frequencies of a sequence that fits the declared context, the only ones
that keys in a cache can keep. YaRN: Peng et al. 2023. llama3: the piecewise scaling of Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockpilot.targets.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position of each pair of head dimensions.

    Returns:
        inv_freq [head_dim / 2] float32, and the factor on cosine and sine (1.0 except for yarn).

    Raises:
        ValueError: unknown `config.type`, or `frequency_factors` of the wrong length.
    """
    powers = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain, scale = 1.0 / powers, 1.0
    if config.type in ("default", "dynamic"):
        frequencies = plain
    elif config.type == "linear":
        frequencies = plain / config.factor
    elif config.type == "llama3":
        frequencies = _llama3(config, plain)
    elif config.type == "yarn":
        frequencies, scale = _yarn(config, powers, head_dim), _yarn_attention_scale(config)
    else:
        raise ValueError(f"unknown rope type {config.type!r}")
    if config.frequency_factors is not None:
        factors = torch.tensor(config.frequency_factors, dtype=torch.float32)
        if len(factors) != head_dim // 2:
            raise ValueError(f"expected {head_dim // 2} frequency factors, got {len(factors)}")
        frequencies = frequencies / factors
    return frequencies, scale


def rope_tables(config: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine at positions 0 … length − 1, attention scale folded in.

    Returns:
        cos, sin: [length, head_dim / 2] float32.

    Raises:
        ValueError: `length` beyond the positions whose rotation is fixed (dynamic scaling).
    """
    limit = config.max_exact_position
    if limit is not None and length > limit:
        raise ValueError(
            f"dynamic rope scaling rotates every cached key anew beyond {limit} positions, so {length} "
            f"cannot be served exactly; use max_length <= {limit}"
        )
    frequencies, scale = inverse_frequencies(config, head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies  # [length, head_dim / 2]
    return angles.cos() * scale, angles.sin() * scale


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Keep short waves, divide long ones by `factor`, blend between."""
    low, high, original = config.low_freq_factor, config.high_freq_factor, config.original_max_position
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / config.factor + blend * plain
    scaled = torch.where(wavelength > original / low, plain / config.factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(config: RopeConfig, powers: Tensor, head_dim: int) -> Tensor:
    """Interpolate the slow dimensions, keep the fast ones, ramp between the two correction bounds."""

    def dimension(rotations: float) -> float:
        ratio = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_attention_scale(config: RopeConfig) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return temperature(config.mscale) / temperature(config.mscale_all_dim)
    return temperature(1.0)
