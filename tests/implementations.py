"""The implementations of target and drafter, by name, for tests that hold for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from blockpilot.targets import Target
from blockpilot.targets.checkpoint import Checkpoint
from blockpilot.targets.cpp_target import CppTarget
from blockpilot.targets.torch_target import TorchTarget
from blockpilot_kernels import dispatch

IMPLEMENTATIONS = ("torch", "cpp")


def require(implementation: str) -> None:
    """Skip, or fail where the extension is required, if it cannot run here."""
    reason = dispatch.extension_error() if implementation == "cpp" else None
    if reason is None:
        return
    if os.environ.get("BLOCKPILOT_REQUIRE_EXT") == "1":
        pytest.fail(f"the C++ extension is required: {reason}")
    pytest.skip(f"cpp: {reason}")


def build(
    implementation: str,
    checkpoint: Checkpoint,
    slots: int,
    capacity: int,
    dtype: torch.dtype = torch.float32,
    weights: str = "dense",
    device: str = "cpu",
) -> Target:
    """A target of `slots` slots of `capacity` positions; `weights` is for "cpp", `device` for "torch"."""
    if implementation == "torch":
        return TorchTarget(checkpoint, slots, capacity, dtype, device)
    return CppTarget(checkpoint, slots, capacity, dtype, weights)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What torch makes of numbers that name no dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
