"""Reading and writing drafters with a head of their own, EAGLE-3 and SpecBlock: `config.json` and safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters.draft_vocabulary import check_ids
from blockpilot.drafters.folder import CONFIG, as_stored, read_config, refuse_extra, whole_folder
from blockpilot.drafters.headed_config import HeadedConfig, default_states
from blockpilot.targets.checkpoint import HARMLESS
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.stored import (
    CheckpointError,
    StoredTensor,
    check_stored,
    fingerprint,
    read_tensor,
    stored_tensors,
)

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_TO_TARGET, _OF_TARGET = "d2t", "t2d"


@dataclass(frozen=True)
class Format:
    """A published format.

    Attributes:
        parse: JSON → config, or ValueError. renamed: prefix in a file → prefix in `expected_tensors`.
    """

    parse: Callable[[Mapping[str, Any]], HeadedConfig]
    renamed: Mapping[str, str]


@dataclass(frozen=True)
class HeadedCheckpoint:
    """A loaded drafter.

    Attributes:
        config: a `HeadedConfig`. path: the folder.
        tensors: name → tensor in its stored dtype, as `expected_tensors` names them, and the embedding where it has one
            of its own.
        fingerprint: hex SHA-256 of what the config means, of a sample of every tensor's bytes and of `vocabulary`.
        vocabulary: [V'] int64, the ids it drafts, rising; None: all of them.
    """

    config: Any
    tensors: dict[str, Tensor]
    path: Path
    fingerprint: str
    vocabulary: Tensor | None

    def hidden_states(self, target: ModelConfig) -> tuple[int, ...]:
        """The target's hidden states that it reads (HF convention).

        Raises:
            ValueError: a drafter that was made for another target, naming both sides and what differs.
        """
        c = self.config
        states = default_states(target.num_layers) if c.hidden_states is None else c.hidden_states
        pairs = {
            "hidden size": (c.target_hidden_size, target.hidden_size),
            "vocabulary size": (c.model.vocab_size, target.vocab_size),
        }
        wrong = [
            f"{what} {ours} against {theirs}" for what, (ours, theirs) in pairs.items() if ours != theirs
        ]
        if beyond := [k for k in states if not 0 <= k <= target.num_layers]:
            wrong.append(f"hidden states {beyond} against 0..{target.num_layers}")
        if wrong:
            raise ValueError(
                f"drafter {self.path} was made for another target: {', '.join(wrong)} of this {target.family} "
                f"target with {target.num_layers} layers. Use the drafter trained for it"
            )
        return states


def load_headed(folder: Path, form: Format) -> HeadedCheckpoint:
    """Read a drafter folder; every tensor is checked by name, shape and dtype.

    Raises:
        CheckpointError (a ValueError): pickled weights, truncated files, missing shards; a missing, unexpected or
            misshapen tensor; a missing, impossible or unsupported config value; vocabulary maps that disagree.
    """
    config = _parse(form, read_config(folder), folder / CONFIG)
    stored = _renamed(form, stored_tensors(folder), folder)
    _check_stored(config, stored, folder)
    tensors = {name: read_tensor(*found) for name, found in stored.items()}
    maps = {name: tensors.pop(name) for name in (_TO_TARGET, _OF_TARGET) if name in tensors}
    ids = _draft_ids(config, maps, folder)
    return HeadedCheckpoint(config, tensors, folder, _fingerprint(config, tensors, ids), ids)


def save_headed(
    folder: Path,
    form: Format,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Tensor | None,
) -> None:
    """Write a drafter folder that appears whole or not at all, and loads back bit for bit.

    An existing drafter is replaced; a folder that holds anything else is left alone.

    Args:
        config: the JSON, as in `HeadedConfig.source`. tensors: float ones, bf16, fp16 or fp32.
        ids: the ids it drafts, [V'] int64, rising; None for all.

    Raises:
        ValueError: a config, tensors or ids that would not load, or a folder that holds other files.
    """
    parsed, tensors = _parse(form, config, folder / CONFIG), dict(tensors)
    if ids is not None:
        listed = torch.zeros(parsed.model.vocab_size, dtype=torch.bool)
        check_ids(ids, len(listed), folder)
        listed[ids] = True
        tensors |= {_TO_TARGET: ids - torch.arange(len(ids)), _OF_TARGET: listed}
    _check_stored(parsed, {n: (s, n) for n, s in as_stored(tensors, folder).items()}, folder)
    _draft_ids(parsed, tensors, folder)
    with whole_folder(folder, config, tensors):
        pass


def _parse(form: Format, source: Mapping[str, Any], path: Path) -> HeadedConfig:
    try:
        return form.parse(source)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


Named = tuple[StoredTensor, str]  # a tensor and its name in the file


def _renamed(form: Format, stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, Named]:
    """Tensors by the names of `expected_tensors`."""
    found: dict[str, Named] = {}
    for stored_name, tensor in stored.items():
        if stored_name.endswith(HARMLESS):
            continue
        name = stored_name.removeprefix("model.")
        for prefix, ours in form.renamed.items():
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
        if name in found:
            raise CheckpointError(
                f"{folder}: tensor {name}: expected once, found {found[name][1]} and {stored_name}"
            )
        found[name] = tensor, stored_name
    return found


def _check_stored(config: HeadedConfig, stored: Mapping[str, Named], folder: Path) -> None:
    wanted, places = config.expected_tensors(), {n: s for n, (s, _) in stored.items()}
    maps = {
        _TO_TARGET: ("I64", (config.draft_vocab_size,)),
        _OF_TARGET: ("BOOL", (config.model.vocab_size,)),
    }
    if EMBEDDING in stored or config.target_hidden_size != config.model.hidden_size:
        wanted[EMBEDDING] = (config.model.vocab_size, config.model.hidden_size)
    check_stored(wanted, places, folder)
    for name, (dtype, shape) in maps.items():
        found = places.get(name)
        if found is not None and (found.dtype, found.shape) != (dtype, shape):
            raise CheckpointError(
                f"{found.file}: tensor {name}: expected {dtype} {list(shape)}, found {found.dtype} "
                f"{list(found.shape)}"
            )
    refuse_extra({n: s for n, s in places.items() if n not in wanted and n not in maps})


def _draft_ids(config: HeadedConfig, maps: Mapping[str, Tensor], folder: Path) -> Tensor | None:
    """The target ids of the head's rows, None where row and id are the same."""
    vocab, size = config.model.vocab_size, config.draft_vocab_size
    if _TO_TARGET not in maps:
        if size == vocab and _OF_TARGET not in maps:
            return None
        raise CheckpointError(
            f"{folder}: tensor {_TO_TARGET}: expected [{size}], the ids of a head of {size} of {vocab} rows, "
            "found nothing"
        )
    ids = maps[_TO_TARGET] + torch.arange(size)
    check_ids(ids, vocab, folder)
    if _OF_TARGET in maps and not torch.equal(maps[_OF_TARGET].nonzero()[:, 0], ids):
        raise CheckpointError(
            f"{folder}: tensors {_TO_TARGET} and {_OF_TARGET}: expected the same ids, found others; the vocabulary "
            "maps are of two drafters"
        )
    return None if size == vocab else ids


def _fingerprint(config: HeadedConfig, tensors: Mapping[str, Tensor], ids: Tensor | None) -> str:
    meaning = {k: v for k, v in vars(config).items() if k not in ("model", "source")} | {
        "kind": type(config).__name__
    }
    text = json.dumps(meaning, sort_keys=True) + fingerprint(config.model, tensors)
    if ids is not None:
        text += json.dumps(ids.tolist())
    return hashlib.sha256(text.encode()).hexdigest()
