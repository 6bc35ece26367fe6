"""Checks on what callers pass in: device, dtype and shape, never values (that would read the device)."""

from __future__ import annotations

import torch
from torch import Tensor


def expect(
    op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], like: Tensor
) -> None:
    """Raise ValueError unless `tensor` has this dtype and shape and lies where `like` lies."""
    if tensor.dtype == dtype and tensor.shape == shape and tensor.device == like.device:
        return
    wanted, got = _words(dtype, shape, like), _words(tensor.dtype, tensor.shape, tensor)
    raise ValueError(f"{op}: {name}: expected {wanted}, got {got}; convert it with .to() or reshape it")


def expect_dim(op: str, name: str, tensor: Tensor, dim: int) -> None:
    """Raise ValueError unless `tensor` has `dim` dimensions."""
    if tensor.dim() != dim:
        raise ValueError(
            f"{op}: {name}: expected {dim} dimensions, got shape {list(tensor.shape)}; reshape it"
        )


def _words(dtype: torch.dtype, shape: tuple[int, ...], at: Tensor) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {at.device}"
