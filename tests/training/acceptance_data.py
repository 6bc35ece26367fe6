"""Small folders of acceptance tables, and where the published ones may lie."""

from __future__ import annotations

import json
import os
from pathlib import Path

WIDTHS = (4, 6, 7, 8, 9, 16)
TAU = {  # by prompt, at WIDTHS
    "0": (2.0, 3.0, 4.0, 4.0, 3.0, 2.0),
    "1": (2.0, 3.0, 3.0, 4.0, 5.0, 2.0),
    "2": (2.0, 2.0, 3.0, 6.0, 4.0, 3.0),
    "3": (1.0, 2.0, 3.0, 3.0, 3.0, 4.0),
}
CHOSEN = {"0": 7, "1": 9, "2": 8, "3": 6}


def write_set(folder: Path, chosen: bool = True) -> Path:
    """A set with block size 8: best widths 7 or 8, 9, 8 and, beyond B±3, 16."""
    folder.mkdir(parents=True)
    for column, width in enumerate(WIDTHS):
        values = {prompt: tau[column] for prompt, tau in TAU.items()}
        (folder / f"{width}.json").write_text(json.dumps(values))
    if chosen:
        (folder / "1.json").write_text(json.dumps(CHOSEN))
        (folder / "mapped.json").write_text("{}")
    return folder


def published() -> Path | None:
    """The folder of the published tables: BLOCKPILOT_ACCEPTANCE_DATA, else beside the repository if it is there."""
    if named := os.environ.get("BLOCKPILOT_ACCEPTANCE_DATA"):
        return Path(named)
    beside = Path(__file__).parents[3] / "shared" / "data" / "blockpilot_acceptance"
    return beside if beside.is_dir() else None
