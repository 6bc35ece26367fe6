"""EAGLE-3 checkpoints: SafeAILab's and SpecForge's names, and those of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from blockpilot.drafters.eagle3_config import Eagle3Config
from blockpilot.drafters.headed_checkpoint import Format, HeadedCheckpoint, load_headed, save_headed

FORMAT = Format(Eagle3Config.from_json, {"layers.0.": "midlayer."})  # speculators' name of the layer


def load_eagle3(folder: Path) -> HeadedCheckpoint:
    """Read a drafter's folder; see `load_headed`."""
    return load_headed(folder, FORMAT)


def save_eagle3(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor | None
) -> None:
    """Write a drafter's folder; see `save_headed`."""
    save_headed(folder, FORMAT, config, tensors, ids)
