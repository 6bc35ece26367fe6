"""Turning what a caller names into a target length, a drafter and a policy."""

from __future__ import annotations

from pathlib import Path

import torch

from blockpilot.drafters import Drafter, load_drafter
from blockpilot.memory import require_fits
from blockpilot.policies import BlockPolicy, load_policy
from blockpilot.targets import Target
from blockpilot.targets.checkpoint import Checkpoint, load_checkpoint
from blockpilot.targets.cpp_target import CppTarget, packed_bytes
from blockpilot.targets.torch_target import TorchTarget
from blockpilot_kernels import dispatch

DEFAULT_MAX_LENGTH = 2048
AUTO = "stored-int16"  # as accurate as float inputs, and faster at every width: `bench/run.py accuracy`
WEIGHTS = ("auto", "dense", "stored", "stored-int16", "stored-int8")


def resolve_device(name: str) -> torch.device:
    """The torch device called `name`.

    Raises:
        ValueError: no such device, or not in this build of torch.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"device: expected one torch can use here, such as 'cpu', got {name!r}: {error}"
        ) from error
    return device


def resolve_checkpoint(source: str | Path | Checkpoint) -> Checkpoint:
    """Load or take a target."""
    if isinstance(source, Checkpoint):
        return source
    if not isinstance(source, (str, Path)):
        raise ValueError(f"target: expected a name, a path or a Checkpoint, got {type(source).__name__}")
    return load_checkpoint(source)


def resolve_max_length(asked: int | None, checkpoint: Checkpoint) -> int:
    """Positions per request: as asked, or the model's own limit up to 2048.

    Raises:
        ValueError: below 2 or beyond what the model's position encoding covers.
    """
    limit = checkpoint.config.max_position_embeddings
    length = min(DEFAULT_MAX_LENGTH, limit) if asked is None else asked
    if isinstance(length, bool) or not isinstance(length, int) or not 2 <= length <= limit:
        raise ValueError(f"max_length: expected 2..{limit} (the model's position limit), got {length!r}")
    return length


def resolve_weights(asked: str, checkpoint: Checkpoint, device: torch.device) -> str:
    """The weight format that runs: as asked; "auto" keeps a file's blocks where the C++ decoder can use them.

    Raises:
        ValueError: an unknown name, or blocks without a file that has them or a decoder that reads them.
    """
    if not isinstance(asked, str) or asked not in WEIGHTS:
        raise ValueError(f"weights: expected one of {WEIGHTS}, got {asked!r}")
    packed = device.type == "cpu" and dispatch.backend_of("cpu") == "cpp"
    if asked == "auto":
        return AUTO if packed and checkpoint.blocks else "dense"
    if asked != "dense" and not (packed and checkpoint.blocks):
        lacking = "the C++ extension on a CPU" if not packed else "a GGUF file of Q8_0, Q4_0 or Q4_1 blocks"
        raise ValueError(f"weights={asked!r} needs {lacking}; use weights='auto' or 'dense'")
    return asked


def build_target(
    checkpoint: Checkpoint,
    slots: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    weights: str,
    keep: bool = False,
) -> Target:
    """The implementation that runs on `device`, its memory checked before anything is allocated; `keep` as in
    `CppTarget`."""
    if device.type == "cpu" and dispatch.backend_of("cpu") == "cpp":
        sizes = (checkpoint.config, slots, length, dtype)
        size = packed_bytes(checkpoint, weights, dtype)
        require_fits({"target": CppTarget.memory_bytes(*sizes, size)}, device)
        return CppTarget(checkpoint, slots, length, dtype, weights, keep=keep)
    size = TorchTarget.memory_bytes(checkpoint.config, slots, length, dtype, device.type)
    require_fits({"target": size}, device)
    return TorchTarget(checkpoint, slots, length, dtype, device)


def resolve_drafter(
    source: str | Path | Drafter | None, target: Target, slots: int, temperature: float | None
) -> Drafter | None:
    """Load or take a drafter, and have the target hand out the features it wants."""
    if temperature is not None and not (
        isinstance(temperature, (int, float)) and 0 < temperature < float("inf")
    ):
        raise ValueError(f"draft_temperature: expected a number > 0, got {temperature!r}")
    if source is None:
        return None
    if not isinstance(source, (str, Path)) and not hasattr(source, "feature_layers"):
        raise ValueError(
            f"drafter: expected 'bundled', 'lookup', a folder, a hub id or a Drafter, got {source!r}"
        )
    drafter = load_drafter(source, target, slots, temperature) if isinstance(source, (str, Path)) else source
    drafter.attach(target, slots)
    target.use_features(drafter.feature_layers)
    return drafter


def resolve_policy(
    source: str | Path | int | BlockPolicy | None, target: Target, drafter: Drafter | None
) -> BlockPolicy:
    """Load or take a policy; without one, every block is as wide as the drafter was trained for."""
    name, widths = (drafter.fingerprint, drafter.window) if drafter else ("none", (1,))
    if source is None:
        source = drafter.block_size if drafter else 1
    largest = getattr(drafter, "largest_tree", 0)  # a drafter of somebody else's may know of chains only
    policy = load_policy(source, target.fingerprint, name, widths, largest)
    policy.bind(target.embedding)
    return policy
