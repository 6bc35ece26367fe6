"""Label files: append-only JSONL that survives a kill.

Line 1 is {"labels": 2, "settings": {...}}. Every further line is one prompt: id, family, dataset (or null),
prompt_hash, prompt_tokens, window, tau, steps and committed per width, halves per width ([[committed, steps] of
the first half, of the second], `label_rows.halves`), kept and offered per width and offset, tokens,
finish_reason, input (base64 of H little-endian float32, or null), logits ({"file", "row"} or null: a row of a
safetensors shard in the folder named like the file with suffix ".logits").

Format 1 lacks dataset and halves, which are read as null; a file of format 1 is continued in format 1.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.policies.atomic import replacing

FORMAT = 2
_STARTS = {number: f'{{"labels": {number}, "settings": '.encode() for number in (1, FORMAT)}
_ADDED = {"dataset", "halves"}  # by format 2
_ROW_KEYS = _ADDED | {
    "id", "family", "prompt_hash", "prompt_tokens", "window", "tau", "steps", "committed", "kept", "offered",
    "tokens", "finish_reason", "input", "logits",
}  # fmt: skip


class LabelStore:
    """A label file open for appending; a torn last line of an earlier run is dropped.

    Raises:
        ValueError: the file is no label file, or was made with other settings.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(settings))
        self.format, self.rows = _resume(self.path, settings) if self.path.exists() else (FORMAT, [])
        self._file = self.path.open("ab")
        if self._file.tell() == 0:
            self._write({"labels": self.format, "settings": settings})

    @property
    def shards(self) -> Path:
        """Folder of the raw logits."""
        return shard_folder(self.path)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds finished prompts, each line flushed, the batch synced."""
        for row in rows:
            if set(row) != _ROW_KEYS:
                raise ValueError(f"label row: expected keys {sorted(_ROW_KEYS)}, got {sorted(row)}")
            self._write({k: v for k, v in row.items() if k in _keys(self.format)})
            self.rows.append(row)
        os.fsync(self._file.fileno())

    def save_logits(self, logits: Tensor) -> str:
        """Writes a shard [N, V] float32 before the rows that name it; returns its file name."""
        name = f"{len(self.rows):06d}.safetensors"  # a shard left by a killed run has no rows and is replaced
        with replacing(self.shards / name) as temporary:
            save_file({"logits": logits.contiguous()}, temporary)
        return name

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> LabelStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()


def _keys(number: int) -> set[str]:
    """The row keys of a format."""
    return _ROW_KEYS if number == FORMAT else _ROW_KEYS - _ADDED


def _resume(path: Path, settings: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Format and rows of an unfinished file, cut after its last whole line."""
    data = path.read_bytes()
    if not any(data.startswith(start) or start.startswith(data) for start in _STARTS.values()):
        raise ValueError(
            f"{path}: expected a label file of format {FORMAT} to continue, found another file; move it away"
        )
    whole = data.rfind(b"\n") + 1
    found, rows = _parse(path, data[:whole]) if whole else (settings, [])
    differing = [k for k in sorted({*settings, *found}) if settings.get(k) != found.get(k)]
    if differing:
        changes = "; ".join(f"{k}: expected {found.get(k)!r}, got {settings.get(k)!r}" for k in differing)
        raise ValueError(
            f"{path}: the labels there were made with other settings ({changes}); use another output file"
        )
    if whole < len(data):
        with path.open("rb+") as file:
            file.truncate(whole)
    return (_format(data) if whole else FORMAT), rows


def _format(data: bytes) -> int:
    return next((number for number, start in _STARTS.items() if data.startswith(start)), FORMAT)


def read_labels(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(settings, rows) of a label file; a torn last line is left out."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable label file, got {error.strerror or error}") from error
    if not data.startswith(tuple(_STARTS.values())) or b"\n" not in data:
        raise ValueError(f"{path}: expected a label file of format 1 to {FORMAT}, found something else")
    return _parse(path, data[: data.rfind(b"\n") + 1])


def _parse(path: Path, data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    of_row = _keys(_format(data))
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = json.loads(line, parse_constant=_refuse)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object, found {error}") from error
        keys = {"labels", "settings"} if number == 1 else of_row
        if not isinstance(record, dict) or set(record) != keys:
            raise ValueError(
                f"{path}, line {number}: expected an object with keys {sorted(keys)}, found {line[:80]!r}"
            )
        records.append(record)
    rows: list[dict[str, Any]] = [{**dict.fromkeys(_ADDED), **record} for record in records[1:]]
    ids = [r["id"] for r in rows]
    if len(set(ids)) != len(ids):
        raise ValueError(
            f"{path}: expected every id once, found {sorted({i for i in ids if ids.count(i) > 1})[:5]} twice"
        )
    return records[0]["settings"], rows


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant}, which is no JSON number")


def shard_folder(path: Path) -> Path:
    """Folder of the raw logits of a label file."""
    return path.with_suffix(".logits")


def encode_input(row: Tensor) -> str:
    """[H] float32 → base64 of its little-endian bytes."""
    values = row.float().tolist()
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def decode_input(text: str, size: int) -> Tensor:
    """base64 → [size] float32; ValueError when it holds another number of values or a non-finite one."""
    data = base64.b64decode(text, validate=True)
    if len(data) != 4 * size:
        raise ValueError(f"input: expected {size} float32 values, found {len(data)} bytes")
    row = torch.tensor(struct.unpack(f"<{size}f", data), dtype=torch.float32)
    if not torch.isfinite(row).all():
        raise ValueError("input: expected finite values, found NaN or infinity")
    return row


def read_logits(path: Path, row: dict[str, Any], vocabulary: int) -> Tensor:
    """A prompt's raw logits [V] float32 from its shard."""
    where = row["logits"]
    if where is None:
        raise ValueError(
            f"{path}: {row['id']} has no raw logits; label again with raw logits for a full predictor"
        )
    shard = shard_folder(path) / Path(where["file"]).name
    try:
        with safe_open(shard, "pt") as file:
            part = file.get_slice("logits")
            shape = part.get_shape()
            if len(shape) != 2 or shape[1] != vocabulary or not 0 <= where["row"] < shape[0]:
                raise ValueError(
                    f"{shard}: expected row {where['row']} of [N, {vocabulary}], found shape {shape}"
                )
            row_logits: Tensor = part[where["row"]]
            return row_logits.float()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{shard}: expected a whole safetensors shard, found {error}") from error
