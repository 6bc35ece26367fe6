"""Reading and writing DFlash drafters in z-lab's published format: `config.json` and safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from blockpilot import bundled
from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.drafters.draft_vocabulary import DRAFT_VOCABULARY, read_ids, write_ids
from blockpilot.policies.atomic import replacing
from blockpilot.targets import hub
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.stored import (
    WEIGHTS,
    CheckpointError,
    StoredTensor,
    check_stored,
    fingerprint,
    read_json,
    read_tensor,
    stored_tensors,
)

CONFIG = "config.json"
FILES = frozenset({CONFIG, WEIGHTS, DRAFT_VOCABULARY})  # of a drafter's folder, as it is written here
_DFLASH2_TENSOR = re.compile(r"attention_conv|mlp_conv|candidate_selector")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class DFlashCheckpoint:
    """A loaded drafter.

    Attributes:
        tensors: published name → tensor in its stored dtype. path: the folder.
        fingerprint: hex SHA-256 of what the config means, of a sample of every tensor's bytes and of `vocabulary`.
        vocabulary: [V'] int64, the ids it drafts, rising; None: all of them.
    """

    config: DFlashConfig
    tensors: dict[str, Tensor]
    path: Path
    fingerprint: str
    vocabulary: Tensor | None = None


def find_dflash(source: str | Path) -> Path:
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
        f"no drafter at {str(source)!r}: expected 'bundled', a folder with {CONFIG} and safetensors, or a "
        "hub id such as 'z-lab/Qwen3-4B-DFlash-b16'"
    )


def load_dflash(folder: Path) -> DFlashCheckpoint:
    """Read a drafter folder; every tensor is checked by name, shape and dtype.

    Raises:
        CheckpointError (a ValueError): DFlash 2, pickled weights, truncated files, missing shards; a missing,
            unexpected or misshapen tensor; a missing, impossible or contradicted config value; a draft
            vocabulary that is not rising ids of the vocabulary.
    """
    path = folder / CONFIG
    if not path.is_file():
        names = sorted(p.name for p in folder.iterdir())
        raise CheckpointError(f"{folder}: expected {CONFIG}, found {names or 'an empty folder'}")
    config = _parse(read_json(path), path)
    stored = stored_tensors(folder)
    _check_stored(config, stored, folder)
    tensors = {name: read_tensor(found, name) for name, found in stored.items()}
    listed = folder / DRAFT_VOCABULARY
    vocabulary = read_ids(listed, config.model.vocab_size) if os.path.lexists(listed) else None
    return DFlashCheckpoint(config, tensors, folder, _fingerprint(config, tensors, vocabulary), vocabulary)


def save_dflash(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vocabulary: Tensor | None = None,
) -> None:
    """Write a drafter folder that appears whole or not at all, and loads back bit for bit.

    An existing drafter is replaced; a folder that holds anything else is left alone.

    Args:
        config: the JSON, as in `DFlashConfig.source`. tensors: under published names, bf16, fp16 or fp32.
        vocabulary: the ids it drafts, [V'] int64, rising; None for all.

    Raises:
        ValueError: a config, tensors or ids that would not load, or a folder that holds other files.
    """
    parsed = _parse(config, folder / CONFIG)
    names = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
    stored = {
        n: StoredTensor(folder / WEIGHTS, names.get(str(t.dtype), str(t.dtype)), tuple(t.shape))
        for n, t in tensors.items()
    }
    _check_stored(parsed, stored, folder)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        kept = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
        with replacing(temporary / WEIGHTS) as path:
            save_file(kept, path, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            _sync(temporary / name)
        if vocabulary is not None:
            write_ids(temporary / DRAFT_VOCABULARY, vocabulary, parsed.model.vocab_size)
        _put_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_draft_vocabulary(folder: Path, ids: Tensor | Sequence[int]) -> None:
    """Let the drafter in `folder` draft only these ids, int64, rising; the file appears whole or not at all.

    Raises:
        CheckpointError (a ValueError): no config.json, or ids that would not load.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: expected a drafter's folder with {CONFIG}, found none")
    write_ids(folder / DRAFT_VOCABULARY, ids, _parse(read_json(path), path).model.vocab_size)


def check_pair(checkpoint: DFlashCheckpoint, target: ModelConfig) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        ValueError: naming both sides and what differs.
    """
    c = checkpoint.config
    pairs = {
        "hidden size": (c.model.hidden_size, target.hidden_size),
        "vocabulary size": (c.model.vocab_size, target.vocab_size),
        "number of target layers": (c.num_target_layers, target.num_layers),
    }
    wrong = [f"{what} {ours} against {theirs}" for what, (ours, theirs) in pairs.items() if ours != theirs]
    if wrong:
        beyond = [i for i in c.target_layer_ids if i >= target.num_layers]
        reads = f"; it reads target layers {beyond}, which do not exist" if beyond else ""
        raise ValueError(
            f"drafter {checkpoint.path} was made for another target: {', '.join(wrong)} of this "
            f"{target.family} target with {target.num_layers} layers{reads}. Use the drafter trained for it"
        )


def _parse(source: Mapping[str, Any], path: Path) -> DFlashConfig:
    try:
        return DFlashConfig.from_json(source)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_stored(config: DFlashConfig, stored: Mapping[str, StoredTensor], folder: Path) -> None:
    if second := sorted(n for n in stored if _DFLASH2_TENSOR.search(n)):
        raise CheckpointError(
            f"{folder}: DFlash 2 drafters are not supported (found tensor {second[0]}); use a DFlash drafter"
        )
    wanted = config.expected_tensors()
    check_stored(wanted, stored, folder)
    if extra := sorted(stored.keys() - wanted.keys()):
        raise CheckpointError(
            f"{stored[extra[0]].file}: tensor {extra[0]}: expected nothing by {CONFIG}, found "
            f"{list(stored[extra[0]].shape)} ({len(extra)} such tensors); config and weights disagree"
        )


def _fingerprint(config: DFlashConfig, tensors: Mapping[str, Tensor], vocabulary: Tensor | None) -> str:
    meaning = {k: v for k, v in vars(config).items() if k not in ("model", "source")}
    text = json.dumps(meaning, sort_keys=True) + fingerprint(config.model, tensors)
    if vocabulary is not None:
        text += json.dumps(vocabulary.tolist())
    return hashlib.sha256(text.encode()).hexdigest()


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
