"""SpecBlock checkpoints, with the names that its authors publish."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from blockpilot.drafters.headed_checkpoint import Format, HeadedCheckpoint, load_headed, save_headed
from blockpilot.drafters.specblock_config import SpecBlockConfig

FORMAT = Format(SpecBlockConfig.from_json, {"input_layer.embed_tokens.": "embed_tokens."})


def load_specblock(folder: Path) -> HeadedCheckpoint:
    """Read a drafter's folder; see `load_headed`."""
    return load_headed(folder, FORMAT)


def save_specblock(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor | None
) -> None:
    """Write a drafter's folder; see `save_headed`."""
    save_headed(folder, FORMAT, config, tensors, ids)
