"""Plans: where a decoder's packed matrices and norms lie, as the int64 words that csrc/cpu/decoder.cpp reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockpilot_kernels.packed_decoder.formats import FORMATS, Matrix, pack
from blockpilot_kernels.packed_decoder.large_pages import large_pages

_ALIGN = 64
Record = tuple[int, int, int, int, int, int]
ROUNDINGS = {"none": 0, "bfloat16": 1, "int8": 2, "int16": 3}


@dataclass
class Weights:
    """One byte tensor that grows while matrices and norms are added to it.

    Attributes:
        dtype: how float matrices are stored. room: bytes to set aside at first; more are found when needed, at
            the price of a copy. formats: bytes by format name.
    """

    dtype: torch.dtype
    room: int = 1 << 20
    formats: dict[str, int] = field(default_factory=dict)
    _size: int = 0

    def __post_init__(self) -> None:
        self._bytes = large_pages(self.room)

    def linear(self, matrix: Matrix, bias: Tensor | None = None) -> Record:
        """Add [N, K] and an optional bias [N]; returns its record: blob, format, N, K, offset, bias offset."""
        name, size, pieces = pack(matrix, self.dtype)
        self.formats[name] = self.formats.get(name, 0) + size
        rows, columns = matrix.shape
        at = self._add(size, pieces)
        return 0, FORMATS.index(name), rows, columns, at, self.vector(bias)

    def vector(self, values: Tensor | None) -> int:
        """Add a float32 vector; returns its offset, −1 for None."""
        if values is None:
            return -1
        data = values.float().contiguous().view(torch.uint8).flatten()
        return self._add(data.numel(), [data])

    def blob(self) -> Tensor:
        """All bytes in one tensor; nothing may be added afterwards."""
        return self._bytes[: self._size]

    def _add(self, size: int, pieces: Iterable[Tensor]) -> int:
        at, end = self._size, self._size + size
        self._size = -(-end // _ALIGN) * _ALIGN
        if self._size > len(self._bytes):
            larger = large_pages(self._size + self._size // 2)
            larger[:at] = self._bytes[:at]
            self._bytes = larger
        to = at
        for piece in pieces:
            self._bytes[to : to + piece.numel()] = piece
            to += piece.numel()
        assert to == end
        self._bytes[end : self._size] = 0
        return at


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder; `intermediate` is padded to a multiple of 16. rounding: a key of `ROUNDINGS`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    rounding: str

    def words(self) -> list[int]:
        sizes = (self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate, self.layers)
        return [*sizes, ROUNDINGS[self.rounding], 0]


@dataclass(frozen=True)
class LayerPlan:
    """Records of one layer; norms are offsets, −1 where absent; window 0 means none."""

    qkv: Record
    out: Record
    gate_up: Record
    down: Record
    input_norm: int
    post_norm: int
    query_norm: int
    key_norm: int
    window: int
    causal: bool

    def words(self) -> list[int]:
        norms = (self.input_norm, self.post_norm, self.query_norm, self.key_norm)
        return [*self.qkv, *self.out, *self.gate_up, *self.down, *norms, self.window, int(self.causal)]


def records_of(words: Sequence[int]) -> list[Record]:
    """Records from their words, six each."""
    each = [iter(words)] * 6
    return list(zip(*each, strict=True))


def head_of(plan: Tensor) -> Record:
    """The head's record in the words of `decoder_plan`."""
    return records_of(plan[14:20].tolist())[0]


def overwrite(blob: Tensor, record: Record, matrix: Matrix, dtype: torch.dtype) -> None:
    """Put another matrix where that of a record lies; dtype: as in `Weights`.

    Raises:
        ValueError: another shape or format.
    """
    name, _, pieces = pack(matrix, dtype)
    found, wanted = (name, *matrix.shape), (FORMATS[record[1]], *record[2:4])
    if found != wanted:
        raise ValueError(f"matrix: expected {wanted}, got {found}")
    at = record[4]
    for piece in pieces:
        blob[at : at + piece.numel()] = piece
        at += piece.numel()


def borrowed(record: Record, blob: int) -> Record:
    """The record of a matrix that lies in another tensor of the weights list."""
    return (blob, *record[1:])


def decoder_plan(
    geometry: Geometry, embedding: Record, head: Record, final_norm: int, layers: list[LayerPlan]
) -> Tensor:
    """The words of `decoder_forward`; a head may have fewer rows than the embedding."""
    words = [*geometry.words(), *embedding, *head, final_norm]
    return torch.tensor(words + [w for layer in layers for w in layer.words()], device="cpu")


def context_plan(
    geometry: Geometry, fc: Record, project: Record, hidden_norm: int, key_norms: list[int]
) -> Tensor:
    """The words of `context_append`."""
    return torch.tensor([*geometry.words(), *fc, *project, hidden_norm, *key_norms], device="cpu")


def eagle3_plan(decoder: Tensor, fc: Record, hidden_norm: int, *, norm_before_residual: bool) -> Tensor:
    """The words of `eagle_forward`; `decoder` those of its one layer, whose input is twice as wide."""
    return torch.cat([decoder, torch.tensor([*fc, hidden_norm, int(norm_before_residual)], device="cpu")])


def specblock_plan(
    decoder: Tensor,
    slots: int,
    condition: Record,
    fuse: Record,
    vectors: Sequence[int],
    shifts: Sequence[Record],
) -> Tensor:
    """The words of `specblock_forward`; `decoder` those of its layers.

    Args:
        slots: K. condition: features to hidden. fuse: [normed condition; normed embedding] to hidden.
        vectors: offsets of both norms' weights [H] and of what each slot's query adds to that product [K, H].
        shifts: of every layer but the first, or none.
    """
    words = [slots, *condition, *fuse, *vectors, int(bool(shifts)), *(w for record in shifts for w in record)]
    return torch.cat([decoder, torch.tensor(words, device="cpu")])
