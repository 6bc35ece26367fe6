"""Norm, rotary embedding and gated activation whose bits do not depend on a value's place in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.norm_rope import reference
from blockpilot_kernels.norm_rope.reference import apply_rope
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["apply_rope", "norm_rope", "rms_norm", "swiglu"]


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


def norm_rope(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """`rms_norm` of each head, unless there is no weight, then the rotation of its halves (RoFormer, 2104.09864).

    Args:
        x: [n, heads, D] float32, any strides. weight: [D] float32 or None.
        cos, sin: [n, D/2] float32 at the rows' positions.

    Returns:
        [n, heads, D] float32. Rows that are padding give anything and change no other.

    Raises:
        ValueError: wrong shape, dtype or device, or an odd D.
    """
    _validate(x, weight, cos, sin)
    if dispatch.backend_for("norm_rope", x) == "triton":
        from blockpilot_kernels.norm_rope import kernel

        return kernel.norm_rope(x, weight, cos, sin, eps)
    return apply_rope(x if weight is None else reference.rms_norm(x, weight, eps), cos, sin)


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


def _validate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    expect_dim("norm_rope", "x", x, 3)
    rows, heads, dim = x.shape
    expect("norm_rope", "x", x, torch.float32, (rows, heads, dim // 2 * 2), x)
    if weight is not None:
        expect("norm_rope", "weight", weight, torch.float32, (dim,), x)
    for name, table in (("cos", cos), ("sin", sin)):
        expect("norm_rope", name, table, torch.float32, (rows, dim // 2), x)
