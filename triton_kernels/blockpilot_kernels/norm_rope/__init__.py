"""Norms, what is added or looked up before them, and gated activation: a row's bits are its own wherever it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.norm_rope import reference
from blockpilot_kernels.norm_rope.reference import apply_rope
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["apply_rope", "block_input", "residual_norm", "rms_norm", "swiglu"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension.

    Args:
        x: [..., H] float32. weight: [H] float32.

    Returns:
        [..., H] float32.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    expect("rms_norm", "x", x, torch.float32, tuple(x.shape), x)
    expect("rms_norm", "weight", weight, torch.float32, tuple(x.shape[-1:]), x)
    if dispatch.backend_for("norm_rope", x) == "triton":
        from blockpilot_kernels.norm_rope import kernel

        return kernel.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def residual_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its `rms_norm`.

    Args:
        x, y: [N, H] float32. weight: [H] float32.

    Returns:
        [N, H] float32 each.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    expect_dim("residual_norm", "x", x, 2)
    expect("residual_norm", "x", x, torch.float32, tuple(x.shape), x)
    expect("residual_norm", "y", y, torch.float32, tuple(x.shape), x)
    expect("residual_norm", "weight", weight, torch.float32, tuple(x.shape[1:]), x)
    if dispatch.backend_for("norm_rope", x) == "triton":
        from blockpilot_kernels.norm_rope import kernel

        return kernel.residual_norm(x, y, weight, eps)
    total = x + y
    return total, reference.rms_norm(total, weight, eps)


def block_input(
    tokens: Tensor, table: Tensor, scale: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Rows of an embedding table times a factor, and their `rms_norm`: what the first layer of a pass reads.

    Args:
        tokens: [N] int64 in [0, V). table: [V, H] float32 or bfloat16, contiguous. weight: [H] float32.

    Returns:
        [N, H] float32 each.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    op = "block_input"
    expect_dim(op, "tokens", tokens, 1)
    expect_dim(op, "table", table, 2)
    expect(op, "tokens", tokens, torch.int64, tuple(tokens.shape), table)
    expect(op, "weight", weight, torch.float32, tuple(table.shape[1:]), table)
    if dispatch.backend_for("norm_rope", table) == "triton":
        from blockpilot_kernels.norm_rope import kernel

        return kernel.block_input(tokens, table, scale, weight, eps)
    x = table[tokens].float() * scale
    return x, reference.rms_norm(x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up.

    Args:
        gate_up: [n, 2·I] float32, the gates first.

    Returns:
        [n, I] float32.

    Raises:
        ValueError: wrong shape or dtype.
    """
    expect_dim("swiglu", "gate_up", gate_up, 2)
    rows, width = gate_up.shape
    expect("swiglu", "gate_up", gate_up, torch.float32, (rows, width // 2 * 2), gate_up)
    if dispatch.backend_for("norm_rope", gate_up) == "triton":
        from blockpilot_kernels.norm_rope import kernel

        return kernel.swiglu(gate_up)
    return reference.swiglu(gate_up)
