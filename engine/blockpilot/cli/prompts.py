"""Prompt files: one JSON object a line with the strings `id`, `dataset` and `prompt`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = ("id", "dataset", "prompt")


@dataclass(frozen=True)
class Prompt:
    """A prompt of a dataset. `id` is unique within a run."""

    id: str
    dataset: str
    prompt: str

    @property
    def key(self) -> str:
        """Identity of the content: id, dataset and text, hashed."""
        return hashlib.sha256(json.dumps([self.id, self.dataset, self.prompt]).encode()).hexdigest()[:32]

    def seed(self, base: int) -> int:
        """A seed of this prompt's own, whatever else is in the run."""
        return int.from_bytes(hashlib.sha256(f"{base} {self.key}".encode()).digest()[:7], "big")


def load_prompts(files: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """The prompts of `files`, or the bundled ones; the first `limit` of each dataset, in file order.

    Raises:
        ValueError: naming a file that cannot be read, or file and line of the first malformed or repeated prompt.
    """
    if files:
        prompts = [prompt for file in files for prompt in _read(file)]
    else:
        from blockpilot import bundled

        prompts = [Prompt(**row) for row in bundled.demo_prompts()]
    repeated = _first_repeated(prompt.id for prompt in prompts)
    if repeated is not None:
        raise ValueError(f"prompts: expected unique ids, got {repeated!r} twice")
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.dataset] = taken.get(prompt.dataset, 0) + 1
        if limit is None or taken[prompt.dataset] <= limit:
            kept.append(prompt)
    return kept


def _read(file: Path) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file}: expected a UTF-8 file of prompts, one JSON object a line with {', '.join(FIELDS)}, got "
            f"{getattr(error, 'strerror', None) or error}; name such a file, or none for the bundled prompts"
        ) from error
    prompts = [_parse(line, f"{file}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{file}: expected at least one prompt, got an empty file")
    return prompts


def _parse(line: str, place: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: expected JSON, got {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object with {', '.join(FIELDS)}, got {row!r}")
    for field in FIELDS:
        if not isinstance(row.get(field), str) or not row[field]:
            raise ValueError(f"{place}: expected a non-empty string {field!r}, got {row.get(field)!r}")
    return Prompt(*(row[field] for field in FIELDS))


def _first_repeated(ids: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            return name
        seen.add(name)
    return None
