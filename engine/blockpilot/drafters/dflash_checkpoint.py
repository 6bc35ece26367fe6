"""Reading and writing DFlash drafters in z-lab's published format: `config.json` and safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.drafters.draft_vocabulary import DRAFT_VOCABULARY, read_ids, write_ids
from blockpilot.drafters.folder import CONFIG, as_stored, read_config, refuse_extra, whole_folder
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.stored import (
    CheckpointError,
    StoredTensor,
    check_stored,
    fingerprint,
    read_tensor,
    stored_tensors,
)

_DFLASH2_TENSOR = re.compile(r"attention_conv|mlp_conv|candidate_selector")


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


def load_dflash(folder: Path) -> DFlashCheckpoint:
    """Read a drafter folder; every tensor is checked by name, shape and dtype.

    Raises:
        CheckpointError (a ValueError): DFlash 2, pickled weights, truncated files, missing shards; a missing,
            unexpected or misshapen tensor; a missing, impossible or contradicted config value; a draft
            vocabulary that is not rising ids of the vocabulary.
    """
    config = _parse(read_config(folder), folder / CONFIG)
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
    _check_stored(parsed, as_stored(tensors, folder), folder)
    with whole_folder(folder, config, tensors) as temporary:
        if vocabulary is not None:
            write_ids(temporary / DRAFT_VOCABULARY, vocabulary, parsed.model.vocab_size)


def write_draft_vocabulary(folder: Path, ids: Tensor | Sequence[int]) -> None:
    """Let the drafter in `folder` draft only these ids, int64, rising; the file appears whole or not at all.

    Raises:
        CheckpointError (a ValueError): no config.json, or ids that would not load.
    """
    config = _parse(read_config(folder), folder / CONFIG)
    write_ids(folder / DRAFT_VOCABULARY, ids, config.model.vocab_size)


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
    refuse_extra({n: s for n, s in stored.items() if n not in wanted})


def _fingerprint(config: DFlashConfig, tensors: Mapping[str, Tensor], vocabulary: Tensor | None) -> str:
    meaning = {k: v for k, v in vars(config).items() if k not in ("model", "source")}
    text = json.dumps(meaning, sort_keys=True) + fingerprint(config.model, tensors)
    if vocabulary is not None:
        text += json.dumps(vocabulary.tolist())
    return hashlib.sha256(text.encode()).hexdigest()
