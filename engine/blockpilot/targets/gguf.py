"""Reading GGUF files: a bounds-checked header, tensors dequantised to float32 under HF names.

The header is parsed here and not by `gguf.GGUFReader`, which trusts counts and offsets and takes seconds over
a vocabulary; the block sizes come from the `gguf` package. Memory stays in proportion to the file: every
count is checked against the bytes that are left, and tensors may not overlap.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from blockpilot.targets.stored import CheckpointError

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1")
SUPPORTED_TYPES = ("F32", "F16", "BF16", *BLOCK_TYPES)
MAX_DIMS = 4
# Metadata types by number: u8, i8, u16, i16, u32, i32, f32, bool, string, array, u64, i64, f64.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), (f"<{c}" for c in "BbHhIif?Qqd"), strict=True))
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: shape in PyTorch order, absolute byte offset."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A checked GGUF header. `data` is the file, memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: Bytes


class _Cursor:
    """Little-endian reads that never leave the file."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self.view, self.at = path, data.data, 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged GGUF header at byte {self.at}: {message}")

    def take(self, count: int) -> memoryview:
        left = len(self.view) - self.at
        if count > left:
            raise self.fail(f"expected {count} more bytes, found {left}")
        self.at += count
        return self.view[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def count(self, what: str, smallest: int) -> int:
        """A 64-bit count of items that take at least `smallest` bytes each."""
        number = int(self.scalar("<Q"))
        left = len(self.view) - self.at
        if number > left // smallest:
            raise self.fail(f"{number} {what} cannot fit into the remaining {left} bytes")
        return number

    def string(self) -> str:
        try:
            return str(self.take(self.count("characters", 1)), "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"expected UTF-8 text: {error}") from error

    def strings(self) -> list[str]:
        """An array of strings; a vocabulary has 10^5 of them, so the loop is inlined."""
        found, view, end = [], self.view, len(self.view)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(self.count("strings", 8)):
            at = self.at
            length = length_at(view, at)[0] if at + 8 <= end else end
            if length > end - at - 8:
                raise self.fail(f"a string of {length} bytes cannot fit into the remaining {end - at} bytes")
            self.at = at + 8 + length
            try:
                found.append(str(view[at + 8 : self.at], "utf-8"))
            except UnicodeDecodeError as error:
                raise self.fail(f"expected UTF-8 text: {error}") from error
        return found

    def value(self) -> Any:
        kind = self.scalar("<I")
        if kind == _STRING:
            return self.string()
        if kind == _FLOAT32:  # its shortest decimal, so that 1e-5 reads as 1e-5
            return float(str(np.float32(self.scalar("<f"))))
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.fail(f"unknown metadata type {kind}")
        item = self.scalar("<I")
        if item == _STRING:
            return self.strings()
        if item not in _SCALARS:
            raise self.fail(f"arrays of type {item} are not supported")
        code = _SCALARS[item]
        size = struct.calcsize(code)
        return np.frombuffer(self.take(size * self.count("array items", size)), code).tolist()


def read_gguf(path: Path) -> GGUFFile:
    """Parse and check a header; no tensor data is read.

    Raises:
        CheckpointError: not a little-endian GGUF file of version 2 or 3, or truncated, damaged or crafted.
    """
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path}: expected a GGUF file, found {path.stat().st_size} bytes")
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    cursor = _Cursor(path, data)
    if (magic := bytes(cursor.take(4))) != b"GGUF":
        raise CheckpointError(f"{path}: expected the magic b'GGUF', found {magic!r}")
    if (version := cursor.scalar("<I")) not in (2, 3):
        raise CheckpointError(f"{path}: expected little-endian GGUF version 2 or 3, found {version:#x}")
    tensor_count = cursor.count("tensors", 32)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("metadata entries", 13)):
        if (key := cursor.string()) in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value()
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(tensor_count):
        name, tensor = _tensor_info(cursor)
        if name in tensors:
            raise cursor.fail(f"tensor {name} appears twice")
        tensors[name] = tensor
    return GGUFFile(path, metadata, _placed(cursor, metadata.get("general.alignment", 32), tensors), data)


def _tensor_info(cursor: _Cursor) -> tuple[str, GGUFTensor]:
    name, dims = cursor.string(), cursor.scalar("<I")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name}: expected 1 to {MAX_DIMS} dimensions, found {dims}")
    extents = struct.unpack(f"<{dims}Q", cursor.take(8 * dims))
    number, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    try:
        kind = GGMLQuantizationType(number)
        block, width = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise cursor.fail(f"tensor {name}: unknown type {number}") from error
    items = math.prod(extents)  # Python integers: a product cannot wrap
    if items == 0 or extents[0] % block:
        raise cursor.fail(f"tensor {name}: extents {list(extents)} do not fit {kind.name} blocks of {block}")
    return name, GGUFTensor(tuple(reversed(extents)), kind, offset, items // block * width)


def _placed(cursor: _Cursor, alignment: Any, tensors: dict[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """The tensors with absolute offsets: aligned, inside the file, none over another."""
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"expected general.alignment to be a power of two, found {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    end = start
    placed: dict[str, GGUFTensor] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        offset = start + tensor.offset
        if tensor.offset % alignment or offset < end or offset + tensor.nbytes > len(cursor.view):
            raise CheckpointError(
                f"{cursor.path}: tensor {name}: expected {tensor.nbytes} bytes at a multiple of {alignment} "
                f"after byte {end}, found offset {offset} in a file of {len(cursor.view)} bytes"
            )
        end = offset + tensor.nbytes
        placed[name] = replace(tensor, offset=offset)
    return placed


def find_tensor(file: GGUFFile, name: str, shape: tuple[int, ...]) -> GGUFTensor:
    """Where a tensor of the expected shape lies.

    Raises:
        CheckpointError: absent, of another shape, or of an unsupported type.
    """
    where, found = f"{file.path}: tensor {name}", file.tensors.get(name)
    if found is None:
        raise CheckpointError(f"{where}: expected {list(shape)}, found nothing")
    if found.shape != shape:
        raise CheckpointError(f"{where}: expected {list(shape)}, found {list(found.shape)}")
    if found.type.name not in SUPPORTED_TYPES:
        supported = ", ".join(SUPPORTED_TYPES)
        raise CheckpointError(f"{where}: expected one of {supported}, found {found.type.name}")
    return found


def read_tensor(file: GGUFFile, name: str, shape: tuple[int, ...]) -> Tensor:
    """One tensor as contiguous float32 of the expected shape; errors as `find_tensor`."""
    found = find_tensor(file, name, shape)
    raw = file.data[found.offset : found.offset + found.nbytes]
    return torch.from_numpy(dequantize(raw, found.type.name).reshape(shape))


def dequantize(raw: Bytes, kind: str) -> Floats:
    """Stored bytes of one of `SUPPORTED_TYPES`, uint8 [n] → a new float32 [items].

    A block of 32 items is a float16 scale, a float16 offset (Q4_1 only), then signed bytes (Q8_0) or 16 bytes
    whose low halves are items 0 … 15 and whose high halves are items 16 … 31. NumPy, because one thread
    does not stall on cores that others use too.
    """
    if kind in ("F32", "F16"):
        return raw.view(np.float32 if kind == "F32" else np.float16).astype(np.float32)
    if kind == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    block, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = raw.reshape(-1, width)
    halves = blocks[:, :4].copy().view(np.float16).astype(np.float32)  # [blocks, 2], the second only in Q4_1
    scale = halves[:, :1]
    values: Floats = np.empty((len(blocks), block), np.float32)
    if kind == "Q8_0":
        np.multiply(blocks[:, 2:].view(np.int8), scale, out=values)
        return values.reshape(-1)
    codes, middle = blocks[:, width - block // 2 :], block // 2
    for half, code in ((values[:, :middle], codes & 15), (values[:, middle:], codes >> 4)):
        np.multiply(code if kind == "Q4_1" else code.astype(np.int8) - 8, scale, out=half)
    if kind == "Q4_1":
        values += halves[:, 1:]
    return values.reshape(-1)
