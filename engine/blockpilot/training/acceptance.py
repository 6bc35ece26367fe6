"""Tables of τ by prompt and width: read from a label file, or from a folder of published acceptance tables.

A folder holds one file a width, `<width>.json`, an object {prompt: τ}; its sets are its subfolders, or it is one set
itself. `1.json` would be all ones as a table of τ: it holds the width somebody chose for each prompt instead.
`mapped.json`, the τ of those choices, follows from the other files and is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

PAPER_BLOCK = 16
PAPER_REACH = 2  # the paper's window is B−2 … B+2
_CHOSEN, _DERIVED = "1", "mapped"


@dataclass(frozen=True)
class AcceptanceTable:
    """τ of one set of prompts.

    Attributes:
        name: of the set. ids, groups: one per prompt; a group is a family of prompts.
        widths: C measured widths, ascending. tau: [N, C] float64, tokens per step.
        block_size: the drafter's training block size B.
        window: the widths a policy would choose from, among `widths`.
        chosen: the width somebody chose for each prompt, or None.
    """

    name: str
    ids: tuple[str, ...]
    groups: tuple[str, ...]
    widths: tuple[int, ...]
    tau: Values
    block_size: int
    window: tuple[int, ...]
    chosen: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.tau.shape != (len(self.ids), len(self.widths)) or not self.tau.size:
            raise ValueError(f"{self.name}: expected τ of prompts at widths, got an array {self.tau.shape}")
        if not (np.isfinite(self.tau).all() and (self.tau > 0).all()):
            raise ValueError(f"{self.name}: expected finite τ above 0, got some that is not")
        check_subset("window", self.window, self.widths)
        check_subset(f"{self.name}: chosen widths", self.chosen or (), self.widths)

    @property
    def block_column(self) -> int | None:
        """Column of width B; None: it was not measured."""
        return self.widths.index(self.block_size) if self.block_size in self.widths else None

    def columns(self, widths: Sequence[int]) -> Values:
        """τ at some of the widths, [N, len(widths)]."""
        return self.tau[:, [self.widths.index(w) for w in widths]]

    def group(self, name: str) -> AcceptanceTable:
        """The prompts of one group."""
        rows = [i for i, group in enumerate(self.groups) if group == name]
        ids, groups = (tuple(x[i] for i in rows) for x in (self.ids, self.groups))
        chosen = None if self.chosen is None else tuple(self.chosen[i] for i in rows)
        return replace(self, name=name, ids=ids, groups=groups, tau=self.tau[rows], chosen=chosen)


def check_subset(what: str, widths: Sequence[int], measured: Sequence[int]) -> None:
    """Refuse widths that were not measured."""
    if missing := [w for w in widths if w not in measured]:
        raise ValueError(f"{what}: expected widths among the measured {list(measured)}, got {missing}")


def read_acceptance(path: str | Path, block_size: int | None = None) -> list[AcceptanceTable]:
    """The sets of a folder of tables, or the one set of a label file.

    Args:
        block_size: the drafter's, for a folder (default 16, the paper's); a label file records its own.

    Raises:
        ValueError: what is there cannot be read as either.
    """
    path = Path(path)
    if not path.is_dir():
        if block_size is not None:
            raise ValueError(
                f"block size: expected none with a label file, which records it, got {block_size}"
            )
        return [label_table(path)]
    block_size = PAPER_BLOCK if block_size is None else block_size
    folders = sorted(p for p in path.iterdir() if p.is_dir()) or [path]
    return [_read_set(folder, block_size) for folder in folders]


def label_table(path: str | Path) -> AcceptanceTable:
    """τ of the usable prompts of a label file, grouped by family; its window is every labelled width."""
    from blockpilot.training.label_rows import usable
    from blockpilot.training.label_store import read_labels

    settings, rows = read_labels(path)
    kept = [row for row in rows if usable(row)]
    if not kept:
        raise ValueError(f"{path}: expected labelled prompts, got none usable of {len(rows)}")
    widths: Any = settings.get("window")
    block_size: Any = settings.get("block_size")
    if not isinstance(widths, list) or not all(isinstance(w, int) for w in [block_size, *widths]):
        raise ValueError(
            f"{path}: expected settings with window and block_size, got {widths!r}, {block_size!r}"
        )
    if bad := next((row for row in kept if len(row["tau"]) != len(widths)), None):
        raise ValueError(
            f"{path}: prompt {bad['id']!r}: expected τ at {len(widths)} widths, got {bad['tau']}"
        )
    return AcceptanceTable(
        name=Path(path).stem,
        ids=tuple(row["id"] for row in kept),
        groups=tuple(row["family"] for row in kept),
        widths=tuple(widths),
        tau=np.array([row["tau"] for row in kept], dtype=np.float64),
        block_size=block_size,
        window=tuple(widths),
    )


def _read_set(folder: Path, block_size: int) -> AcceptanceTable:
    files = {f.stem: _read_file(f) for f in sorted(folder.glob("*.json")) if f.stem != _DERIVED}
    chosen = files.pop(_CHOSEN, None)
    if not files or not all(name.isdecimal() for name in files):
        raise ValueError(
            f"{folder}: expected files named by width, as 16.json, got {sorted(files) or 'no JSON files'}"
        )
    widths = tuple(sorted(int(name) for name in files))
    ids = tuple(files[str(widths[0])])
    for name, values in {**files, _CHOSEN: chosen}.items():
        if values is not None and values.keys() != set(ids):
            raise ValueError(f"{folder}/{name}.json: expected the prompts of {widths[0]}.json, got others")
    window = tuple(w for w in widths if abs(w - block_size) <= PAPER_REACH)
    if not window:
        raise ValueError(f"{folder}: expected widths near the block size {block_size}, got {list(widths)}")
    return AcceptanceTable(
        name=folder.name,
        ids=ids,
        groups=(folder.name,) * len(ids),
        widths=widths,
        tau=np.array([[files[str(w)][i] for w in widths] for i in ids], dtype=np.float64),
        block_size=block_size,
        window=window,
        chosen=None if chosen is None else tuple(int(chosen[i]) for i in ids),
    )


def _read_file(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: expected a readable table, got {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object of τ by prompt, got {error}") from error
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path}: expected a JSON object of τ by prompt, got {str(found)[:60]}")
    if bad := next((k for k, v in found.items() if not _number(v)), None):
        raise ValueError(f"{path}: prompt {bad!r}: expected a finite number, got {found[bad]!r}")
    return found


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
