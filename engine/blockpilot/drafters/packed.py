"""What drafters on the C++ decoder share: how their inputs are rounded, and what their packed weights are kept as."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import torch
from torch import Tensor

from blockpilot.targets.cpp_target import CppTarget
from blockpilot.targets.packed_cache import PackedKey
from blockpilot.targets.packing import rounding_of


class Checkpoint(Protocol):
    """A loaded drafter of any kind."""

    @property
    def config(self) -> Any: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def vocabulary(self) -> Tensor | None: ...


def drafter_rounding(target: CppTarget) -> str:
    """No output shows a drafter's rounding, so it takes the fastest beside any rounded target."""
    return "int8" if target.weights.startswith("stored-") else rounding_of(target.weights, target.dtype)


def packed_key(checkpoint: Checkpoint, target: PackedKey) -> PackedKey:
    """Every byte counts: they are in memory anyway, and a caller may have changed them."""
    digest = hashlib.sha256(f"{target.source} {checkpoint.config!r}".encode())
    tensors = {**checkpoint.tensors}
    if checkpoint.vocabulary is not None:
        tensors["vocabulary"] = checkpoint.vocabulary
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return PackedKey("drafter", (*target.model, checkpoint.fingerprint), digest.hexdigest())
