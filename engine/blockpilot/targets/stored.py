"""Tensors in safetensors files: every header is checked before any weight is read, and weights are read on demand."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from blockpilot.errors import BlockPilotError

if TYPE_CHECKING:
    from blockpilot.targets.config import ModelConfig

Item = TypeVar("Item")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_HEADER_LIMIT = 100_000_000
_SAMPLES, _SAMPLE_BYTES = 16, 32


class CheckpointError(BlockPilotError, ValueError):
    """A model file is missing, damaged, or does not fit its configuration."""


FileState = tuple[int, int, int]


def file_state(path: Path) -> FileState | None:
    """Size, time and identity of a file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a safetensors header: where its data begin, and the state in which the file was read."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    state: FileState | None = None


class OnDemand(Mapping[str, Item]):
    """A mapping whose values are made anew on each access and never kept."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Item]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> Item:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Sample:
    """What a fingerprint looks at: shape, dtype, size in bytes, and a reader of byte ranges."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, tensor: Tensor) -> Sample:
        """A tensor in memory."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return cls(tuple(tensor.shape), tensor.dtype, len(data), lambda a, b: data[a:b].tobytes())


def fingerprint(config: ModelConfig, tensors: Mapping[str, Tensor | Sample]) -> str:
    """Hex SHA-256 of the config and of each tensor's name, shape, dtype and 16 spread runs of 32 bytes."""
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for name in sorted(tensors):
        found = tensors[name]
        sample = Sample.of(found) if isinstance(found, Tensor) else found
        last = max(sample.size - _SAMPLE_BYTES, 0)
        digest.update(f"{name} {sample.shape} {sample.dtype}".encode())
        for start in (last * i // (_SAMPLES - 1) for i in range(_SAMPLES)):
            digest.update(sample.read(start, min(start + _SAMPLE_BYTES, sample.size)))
    return digest.hexdigest()


def check_stored(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor], folder: Path
) -> None:
    """Refuse a folder that lacks a wanted tensor or has it in another shape or a type that is not a float.

    Raises:
        CheckpointError: naming file, tensor, what was expected and what was found.
    """
    for name, shape in wanted.items():
        found = stored.get(name)
        if found is None:
            raise CheckpointError(f"{folder}: tensor {name}: expected {list(shape)}, found nothing")
        where = f"{found.file}: tensor {name}"
        if found.shape != shape:
            raise CheckpointError(f"{where}: expected {list(shape)}, found {list(found.shape)}")
        if found.dtype not in FLOAT_TYPES:
            raise CheckpointError(f"{where}: expected {', '.join(FLOAT_TYPES)}, found {found.dtype}")


def read_tensor(stored: StoredTensor, name: str) -> Tensor:
    """One tensor in its stored dtype.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    _check_state(stored)
    try:
        with safe_open(stored.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
    except Exception as error:  # safetensors raises its own error type, straight from Rust
        raise CheckpointError(f"{stored.file}: {error}") from error
    return tensor


def _check_state(stored: StoredTensor) -> None:
    if stored.state is not None and file_state(stored.file) != stored.state:
        raise CheckpointError(f"{stored.file}: changed while it was being loaded; load it again")


def sample_of(stored: StoredTensor) -> Sample:
    """What a fingerprint looks at, straight from the file."""

    def read(start: int, stop: int) -> bytes:
        _check_state(stored)
        with stored.file.open("rb") as file:
            file.seek(stored.start + start)
            return file.read(stop - start)

    size = math.prod(stored.shape) * _ITEM_BYTES[stored.dtype]
    return Sample(stored.shape, FLOAT_TYPES[stored.dtype], size, read)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: not JSON, or not an object.
    """
    return _object(path, path.read_bytes())


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON object, but it cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Where every tensor of a folder is stored, from the index or the single file; no weights are read.

    Raises:
        CheckpointError: no safetensors, missing shards, or damaged files.
    """
    if (folder / INDEX).is_file():
        return _indexed_tensors(folder)
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    names = sorted(p.name for p in folder.iterdir())
    if any(name.endswith(PICKLES) for name in names):
        raise CheckpointError(
            f"{folder}: pickle checkpoints are not loaded (opening one can run code); expected {WEIGHTS} or "
            f"{INDEX}, found {names}. Save the model again with safetensors; a file that you trust is converted by "
            f"safetensors.torch.save_file(torch.load(FILE, weights_only=True), '{WEIGHTS}')"
        )
    raise CheckpointError(f"{folder}: expected {WEIGHTS} or {INDEX}, found {names or 'an empty folder'}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Names, dtypes and shapes in a safetensors file, with every size checked against the file's.

    Raises:
        CheckpointError: truncated or damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise CheckpointError(f"{path}: expected a header of {length} bytes, found {size} bytes in all")
        header = _object(path, file.read(length))
    entries = {name: _entry(path, name, value) for name, value in header.items() if name != "__metadata__"}
    end = 8 + length + max((stop for _, stop in entries.values()), default=0)
    if end != size:
        raise CheckpointError(f"{path}: truncated or damaged: the header says {end} bytes, found {size}")
    state = file_state(path)
    return {name: replace(s, start=8 + length + s.start, state=state) for name, (s, _) in entries.items()}


def _entry(path: Path, name: str, value: Any) -> tuple[StoredTensor, int]:
    try:
        dtype, shape, (start, stop) = str(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name}: bad header entry {value!r}") from error
    bytes_needed = math.prod(shape) * _ITEM_BYTES[dtype] if whole and dtype in _ITEM_BYTES else None
    if not whole or (bytes_needed is not None and stop - start != bytes_needed):
        raise CheckpointError(
            f"{path}: tensor {name}: expected {bytes_needed} bytes for {dtype} {list(shape)}, found offsets "
            f"{value['data_offsets']}"
        )
    return StoredTensor(path, dtype, shape, start), stop


def _indexed_tensors(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    placed = read_json(index).get("weight_map")
    names = placed.values() if isinstance(placed, dict) else [None]
    if any(not isinstance(name, str) or name != Path(name).name for name in names):
        raise CheckpointError(f"{index}: expected weight_map to name a file in this folder for every tensor")
    assert isinstance(placed, dict)  # for the type checker
    files = sorted(set(placed.values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder}: missing shards {missing}: expected {files} from {INDEX}; download them again"
        )
    headers = {name: read_header(folder / name) for name in files}
    if absent := [tensor for tensor, name in placed.items() if tensor not in headers[name]]:
        first = absent[0]
        raise CheckpointError(
            f"{folder / placed[first]}: tensor {first}: expected in this shard by {INDEX}, found nothing "
            f"({len(absent)} such tensors)"
        )
    return {tensor: headers[name][tensor] for tensor, name in placed.items()}
