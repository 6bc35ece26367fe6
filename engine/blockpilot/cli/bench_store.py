"""The sidecar of a benchmark: finished prompts, so that an interrupted run continues where it stopped.

A JSONL file beside the report. Line 1 holds the settings, every other line a finished prompt with its
records. A line is written whole and synced; a torn last line, left by a kill, is dropped on the next start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockpilot.cli.console import finite
from blockpilot.cli.measure import Record
from blockpilot.cli.prompts import Prompt


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Hash of everything that a stored record depends on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def sidecar_of(output: Path) -> Path:
    """Where the finished prompts of `output` are kept."""
    return output.with_name(f"{output.name}.prompts.jsonl")


class Store:
    """Records of finished prompts by content, kept in `path` or, without one, in memory.

    Raises:
        ValueError: the file was made with other settings, or a line of it is not what this wrote.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.records: dict[str, dict[str, Record]] = {}
        if path is None:
            return
        lines = _whole_lines(path)
        if lines:
            self._check(lines[0], settings)
            for i, line in enumerate(lines[1:], 2):
                row = _parse(path, i, line)
                self.records[row["key"]] = row["records"]
        else:
            self._append({"fingerprint": fingerprint(settings), "settings": settings})

    def add(self, prompt: Prompt, records: dict[str, Record]) -> None:
        """Keep a finished prompt: one record for each arm."""
        self.records[prompt.key] = records
        self._append({"key": prompt.key, "id": prompt.id, "dataset": prompt.dataset, "records": records})

    def _append(self, row: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _check(self, line: str, settings: Mapping[str, Any]) -> None:
        header = _parse(self.path, 1, line, ("fingerprint", "settings"))
        if header["fingerprint"] == fingerprint(settings):
            return
        was, now = header["settings"], json.loads(json.dumps(settings))
        changed = [k for k in sorted({*was, *now}) if was.get(k) != now.get(k)]
        shown = ", ".join(f"{k} {was.get(k)!r} -> {now.get(k)!r}" for k in changed[:3])
        raise ValueError(
            f"{self.path} holds prompts measured with other settings ({shown}); "
            "repeat those settings, choose another --output, or remove the file"
        )


def _whole_lines(path: Path) -> list[str]:
    """Lines of `path` that end in a newline; cuts a torn last one off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    return data[:end].decode("utf-8").splitlines()


def _parse(
    path: Path | None, i: int, line: str, keys: tuple[str, ...] = ("key", "records")
) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{i}: expected a line of a benchmark, got {error.msg}") from error
    if not isinstance(row, dict) or not all(key in row for key in keys):
        raise ValueError(f"{path}:{i}: expected {' and '.join(keys)}; remove the file to start anew")
    return row
