"""A drafter's folder: finding it, what its formats share when they are read, and writing one whole or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from blockpilot import bundled
from blockpilot.drafters.draft_vocabulary import DRAFT_VOCABULARY
from blockpilot.policies.atomic import replacing
from blockpilot.targets import hub
from blockpilot.targets.stored import WEIGHTS, CheckpointError, StoredTensor, read_json

CONFIG = "config.json"
FILES = frozenset({CONFIG, WEIGHTS, DRAFT_VOCABULARY})  # of a drafter's folder, as it is written here
_DTYPES = {
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.int64": "I64",
    "torch.bool": "BOOL",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_drafter(source: str | Path) -> Path:
    """The folder behind "bundled", a local folder or a hub id.

    Raises:
        ValueError: nothing there, and it does not look like a hub id.
    """
    if source == "bundled":
        return bundled.drafter_path()
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if not path.exists() and isinstance(source, str) and _HUB_ID.fullmatch(source):
        return hub.download(source)
    raise ValueError(
        f"no drafter at {str(source)!r}: expected 'bundled', a folder with {CONFIG} and safetensors, or a hub "
        "id such as 'z-lab/Qwen3-4B-DFlash-b16', each also with '+lookup' behind it, or 'lookup'"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        CheckpointError: none there, or not a JSON object.
    """
    path = folder / CONFIG
    if not path.is_file():
        names = sorted(p.name for p in folder.iterdir())
        raise CheckpointError(f"{folder}: expected {CONFIG}, found {names or 'an empty folder'}")
    return read_json(path)


def refuse_extra(extra: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that the config does not account for.

    Raises:
        CheckpointError: naming the first.
    """
    for name in sorted(extra)[:1]:
        raise CheckpointError(
            f"{extra[name].file}: tensor {name}: expected nothing by {CONFIG}, found "
            f"{list(extra[name].shape)} ({len(extra)} such tensors); config and weights disagree"
        )


def as_stored(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, StoredTensor]:
    """How tensors would be found in the folder once they are written there."""
    return {
        n: StoredTensor(folder / WEIGHTS, _DTYPES.get(str(t.dtype), str(t.dtype)), tuple(t.shape))
        for n, t in tensors.items()
    }


@contextmanager
def whole_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Path]:
    """A temporary folder with config and weights, which becomes `folder` where the block ends without an error.

    A drafter that is there is replaced; a folder that holds anything else is left alone.

    Raises:
        ValueError: a folder that holds other files.
    """
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        kept = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
        with replacing(temporary / WEIGHTS) as path:
            save_file(kept, path, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            _sync(temporary / name)
        yield temporary
        _put_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _put_folder(new: Path, folder: Path) -> None:
    """Move `new` to `folder`. A drafter already there steps aside first, so old and new files never mix."""
    if not folder.exists():
        os.replace(new, folder)
        return
    if other := sorted({p.name for p in folder.iterdir()} - FILES):
        raise ValueError(f"{folder}: expected at most a drafter's {sorted(FILES)}, found {other[:5]} too")
    aside = new.with_name(f"{new.name}.old")
    os.replace(folder, aside)
    try:
        os.replace(new, folder)
    except OSError:
        os.replace(aside, folder)
        raise
    shutil.rmtree(aside)
