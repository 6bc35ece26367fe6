"""What drafters on the C++ decoder share: how their inputs are rounded, and what their packed weights are kept as."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from blockpilot.drafters.headed_checkpoint import HEAD
from blockpilot.targets.cpp_target import CppTarget
from blockpilot.targets.packed_cache import Packed, PackedKey
from blockpilot.targets.packing import GetMatrix, in_bytes, rounding_of, stored_or_float
from blockpilot_kernels.packed_decoder import head_of, overwrite


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


def matrices(tensors: Mapping[str, Tensor], target: CppTarget) -> GetMatrix:
    """By name, in the format that a drafter beside that target packs."""
    get = stored_or_float(tensors, {}, "dense")
    return get if target.weights == "dense" else in_bytes(get)


def replace_packed(
    blob: Tensor, plan: Tensor, tensors: Mapping[str, Tensor], target: CppTarget, pack: Callable[[], Packed]
) -> None:
    """`PairDrafter.replace` for packed weights; `pack` makes them all of the same tensors."""
    if set(tensors) == {HEAD}:
        overwrite(blob, head_of(plan), matrices(tensors, target)(HEAD), target.dtype)
    else:
        blob.copy_(pack().blob)
