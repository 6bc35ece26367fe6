"""A draft head over part of the vocabulary, as EAGLE-3 has it (arXiv 2503.01840).

The head's weights are most of what a draft reads, and a few thousand ids are nearly all that is ever said. The target
verifies over every id, so an id that is missing here costs an accepted token at most. The ids lie in a file of their
own beside a checkpoint, which the published format's readers never open.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.policies.atomic import replacing
from blockpilot.targets.stored import CheckpointError, read_header, read_tensor

DRAFT_VOCABULARY = "draft_vocabulary.safetensors"
_NAME = "ids"


class DraftVocabulary:
    """Target ids by column of a draft head, on its device; where there is no list, column and id are the same.

    Args:
        ids: [V'] int64, as `read_ids` returns them, or None. vocab_size: V of the target.

    Attributes:
        listed: the ids, or None.
    """

    def __init__(self, ids: Tensor | None, vocab_size: int, device: torch.device) -> None:
        self.listed = None if ids is None else ids.to(device)
        if ids is not None:
            columns = torch.full((vocab_size + 1,), -1)  # the last is that of ids outside 0 … V − 1
            columns[ids] = torch.arange(len(ids))
            self._columns = columns.to(device)

    def noise(self, noise: Tensor, rows: Tensor) -> Tensor:
        """[N, V] by target id, rows [M] → [M, V'] by column."""
        # Not noise[rows]: indexing wakes OpenMP's threads, which then spin on the cores of the next pass.
        shared = noise.index_select(0, rows)
        return shared if self.listed is None else shared.index_select(1, self.listed)

    def columns(self, ids: Tensor) -> Tensor:
        """Target ids of any shape → columns, −1 for those without one."""
        if self.listed is None:
            return ids
        last = len(self._columns) - 1
        return self._columns[torch.where((ids >= 0) & (ids < last), ids, last)]

    def ids(self, columns: Tensor) -> Tensor:
        """Columns of any shape → target ids."""
        return columns if self.listed is None else self.listed[columns]


def read_ids(path: Path, vocab_size: int) -> Tensor:
    """The ids [V'] int64 in a file, rising, each 0 … `vocab_size` − 1.

    Raises:
        CheckpointError (a ValueError): a damaged file, other tensors, or ids that are not so.
    """
    stored = read_header(path)
    if list(stored) != [_NAME]:
        raise CheckpointError(f"{path}: expected one tensor, {_NAME}, found {sorted(stored)}; write it again")
    found = stored[_NAME]
    if found.dtype != "I64" or len(found.shape) != 1:
        raise CheckpointError(
            f"{path}: tensor {_NAME}: expected I64 of one dimension, found {found.dtype} {list(found.shape)}"
        )
    ids = read_tensor(found, _NAME)
    check_ids(ids, vocab_size, path)
    return ids


def write_ids(path: Path, ids: Tensor | Sequence[int], vocab_size: int) -> None:
    """Write ids that `read_ids` returns again; the file appears whole or not at all.

    Raises:
        CheckpointError (a ValueError): ids that would not be read.
    """
    tensor = torch.as_tensor(ids).cpu()
    if tensor.dtype != torch.int64 or tensor.ndim != 1:
        raise CheckpointError(
            f"{path}: ids: expected torch.int64 of one dimension, got {tensor.dtype} {list(tensor.shape)}"
        )
    check_ids(tensor, vocab_size, path)
    with replacing(path) as temporary:
        save_file({_NAME: tensor.clone().contiguous()}, temporary)


def most_frequent(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The `size` most frequent ids [V'] int64, sorted; the lower of equals first.

    Args:
        counts: [V] how often each id occurs. always: ids that are among them whatever their count, even if there
            are more than `size` of these.
    """
    kept = sorted({i for i in always if 0 <= i < len(counts)})
    weighed = counts.double().clone()
    weighed[kept] = torch.inf
    order = weighed.argsort(descending=True, stable=True)
    return order[: max(size, len(kept))].sort().values


def check_ids(ids: Tensor, vocab_size: int, path: Path) -> None:
    """Refuse ids [V'] that are not rising ones of 0 … `vocab_size` − 1.

    Raises:
        CheckpointError (a ValueError): naming `path` and what they are.
    """
    if not 1 <= len(ids) <= vocab_size:
        raise CheckpointError(f"{path}: expected 1 to {vocab_size} ids, got {len(ids)}")
    if not bool((ids[1:] > ids[:-1]).all()):
        raise CheckpointError(
            f"{path}: expected sorted ids, none of them twice; pass them through torch.unique"
        )
    low, high = int(ids[0]), int(ids[-1])
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"{path}: expected ids of 0 to {vocab_size - 1}, got {low if low < 0 else high}; take those of the "
            "drafter's own target"
        )
