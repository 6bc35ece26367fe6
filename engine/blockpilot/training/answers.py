"""Folders of prompts with the target's own answers: what drafters are trained on.

`settings.json` is {"answers": 1, "settings": {...}}. Shards `00000.jsonl`, `00001.jsonl`, … hold one JSON object a
line with the keys of `ROW_KEYS`. `manifest.jsonl` has a line per finished shard: file, prompts (asked for), rows
(answered), tokens (of the answers), dropped (reason → prompts), sha256 (of the file's bytes).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from blockpilot.policies.atomic import replacing

FORMAT = 1
SPLITS = ("train", "validation")
ROW_KEYS = (
    "id", "family", "split", "prompt", "prompt_ids", "output_ids", "temperature", "seed", "finish_reason",
)  # fmt: skip
_SHARD_KEYS = {"file", "prompts", "rows", "tokens", "dropped", "sha256"}
_SETTINGS, _MANIFEST = "settings.json", "manifest.jsonl"


class AnswerStore:
    """A folder of answers open for appending; the shards there are checked first.

    A torn last line of the manifest, and what a killed run left unlisted, is dropped.

    Raises:
        ValueError: the folder holds something else, was made with other settings, or a shard is missing or damaged.

    Attributes:
        shards: the manifest's lines. families: answered prompts of each. validation: those held out.
        seen: `prompt_key` of every prompt in the folder.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards: list[dict[str, Any]] = []
        self.families: Counter[str] = Counter()
        self.validation = 0
        self.seen: set[str] = set()
        _settle(self.folder, json.loads(json.dumps(settings)))
        manifest = self.folder / _MANIFEST
        manifest.touch()
        data = manifest.read_bytes()
        whole = data.rfind(b"\n") + 1
        for shard in _shards(manifest, data[:whole]):
            self._count(shard, _rows(self.folder, shard))
        for left in self.folder.glob(".*.tmp"):
            left.unlink()
        self._file = manifest.open("rb+")
        self._file.truncate(whole)
        self._end = self._file.seek(0, os.SEEK_END)

    def append(self, rows: Sequence[Mapping[str, Any]], prompts: int, dropped: Mapping[str, int]) -> None:
        """Writes the next shard whole, then lists it. `prompts`: how many were asked for."""
        wrong = [sorted(row) for row in rows if set(row) != set(ROW_KEYS)]
        if wrong:
            raise ValueError(f"answer row: expected keys {sorted(ROW_KEYS)}, got {wrong[0]}")
        if self._end != (self.folder / _MANIFEST).stat().st_size:
            raise ValueError(f"{self.folder}: another run writes here too; let one of them finish alone")
        name = _name(len(self.shards))
        data = b"".join(_line({key: row[key] for key in ROW_KEYS}) for row in rows)
        with replacing(self.folder / name) as temporary:
            temporary.write_bytes(data)
        shard = {
            "file": name,
            "prompts": prompts,
            "rows": len(rows),
            "tokens": sum(len(row["output_ids"]) for row in rows),
            "dropped": dict(dropped),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        self._end += self._file.write(_line(shard))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._count(shard, rows)

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _count(self, shard: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self.shards.append(shard)
        self.families.update(row["family"] for row in rows)
        self.validation += sum(row["split"] == "validation" for row in rows)
        self.seen.update(prompt_key(row["prompt"]) for row in rows)


def read_answers(folder: str | Path, split: str | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(settings, rows) of a folder, rows in order; all of them, or those of "train" or "validation".

    Raises:
        ValueError: no such folder, an unfinished manifest, a shard that is missing or not as it was written.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"split: expected one of {SPLITS} or None, got {split!r}")
    settings, shards = read_shards(folder)
    return settings, [row for _, _, rows in shards for row in rows if split in (None, row["split"])]


def read_shards(folder: str | Path) -> tuple[dict[str, Any], list[tuple[str, str, list[dict[str, Any]]]]]:
    """(settings, shards) of a folder, a shard being its file's name and sha256 and its rows.

    Raises:
        ValueError: as `read_answers`.
    """
    folder = Path(folder)
    settings, manifest = _read_settings(folder), folder / _MANIFEST
    data = _read(manifest)
    if not data.endswith(b"\n"):
        raise ValueError(
            f"{manifest}: expected a line per finished shard, found {'a torn line' if data else 'none'}; "
            "run make-data again to finish it"
        )
    shards = [(s["file"], s["sha256"], _rows(folder, s)) for s in _shards(manifest, data)]
    repeated = [i for i, n in Counter(row["id"] for _, _, rows in shards for row in rows).items() if n > 1]
    if repeated:
        raise ValueError(f"{folder}: expected every id once, found {sorted(repeated)[:5]} again")
    return settings, shards


def prompt_key(text: str) -> str:
    """Short hash of a prompt, blind to case and white space."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()[:24]


def _settle(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of a new folder, or compares those of an old one."""
    path = folder / _SETTINGS
    if not path.exists():
        others = sorted(p.name for p in folder.iterdir() if not p.name.endswith(".tmp"))
        if others:
            raise ValueError(
                f"{folder}: expected an empty folder or one made by make-data, found {others[:5]}"
            )
        with replacing(path) as temporary:
            text = json.dumps({"answers": FORMAT, "settings": settings}, indent=2)
            temporary.write_text(text + "\n", encoding="utf-8")
        return
    found = _read_settings(folder)
    differing = [k for k in sorted({*settings, *found}) if settings.get(k) != found.get(k)]
    if differing:
        changes = "; ".join(f"{k}: expected {found.get(k)!r}, got {settings.get(k)!r}" for k in differing)
        raise ValueError(
            f"{folder}: the answers there were made with other settings ({changes}); use another folder"
        )


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS
    if not folder.is_dir():
        there = "a file" if folder.exists() else "nothing"
        raise ValueError(
            f"{folder}: expected a folder of answers, found {there}; make one with `blockpilot make-data`"
        )
    data = _read(path)
    try:
        record = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path}: expected the settings of make-data, found {error}") from error
    if not isinstance(record, dict) or record.get("answers") != FORMAT:
        found = record.get("answers") if isinstance(record, dict) else record
        raise ValueError(f"{path}: expected answers of format {FORMAT}, found {found!r}")
    if not isinstance(record.get("settings"), dict):
        raise ValueError(f'{path}: expected an object under "settings", found {record.get("settings")!r}')
    settings: dict[str, Any] = record["settings"]
    return settings


def _shards(manifest: Path, data: bytes) -> list[dict[str, Any]]:
    """Lines of a manifest, every one whole."""
    shards = []
    for i, line in enumerate(data.split(b"\n")[:-1]):
        try:
            shard = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{manifest}, line {i + 1}: expected a JSON object, found {error}") from error
        if not isinstance(shard, dict) or set(shard) != _SHARD_KEYS or shard["file"] != _name(i):
            raise ValueError(
                f"{manifest}, line {i + 1}: expected {_name(i)} with {sorted(_SHARD_KEYS)}, found {line[:80]!r}"
            )
        shards.append(shard)
    return shards


def _rows(folder: Path, shard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a shard whose bytes are those that the manifest lists."""
    path = folder / shard["file"]
    data = _read(path)
    found = hashlib.sha256(data).hexdigest()
    if found != shard["sha256"]:
        raise ValueError(
            f"{path}: expected sha256 {shard['sha256']} as {_MANIFEST} says, found {found}; the file was changed "
            "after it was written: restore it, or make the data again in another folder"
        )
    rows = [json.loads(line) for line in data.split(b"\n")[:-1]]
    tokens = sum(len(row["output_ids"]) for row in rows)
    if (len(rows), tokens) != (shard["rows"], shard["tokens"]) or any(set(r) != set(ROW_KEYS) for r in rows):
        raise ValueError(
            f"{path}: expected {shard['rows']} rows of {shard['tokens']} tokens with keys {sorted(ROW_KEYS)}, "
            f"found {len(rows)} rows of {tokens} tokens"
        )
    return rows


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file of a make-data folder, found {error.strerror or error}"
        ) from error


def _name(number: int) -> str:
    return f"{number:05d}.jsonl"


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"
