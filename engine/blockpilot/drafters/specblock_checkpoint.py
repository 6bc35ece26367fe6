"""SpecBlock checkpoints, with the names that its authors publish."""

from __future__ import annotations

from pathlib import Path

from blockpilot.drafters.headed_checkpoint import Format, HeadedCheckpoint, load_headed
from blockpilot.drafters.specblock_config import SpecBlockConfig

FORMAT = Format(SpecBlockConfig.from_json, {"input_layer.embed_tokens.": "embed_tokens."})


def load_specblock(folder: Path) -> HeadedCheckpoint:
    """Read a drafter's folder; see `load_headed`."""
    return load_headed(folder, FORMAT)
