"""Keys and values as the C++ decoder reads them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

CHUNK = 16  # positions side by side in the key cache


class CppCache:
    """Static keys and values of `slots` slots plus a dump slot; its pointers never change.

    Keys [layer, slot, kv head, C / 16, D, 16], values [layer, slot, kv head, C, D padded to 16]: both are read
    along their last axis.
    """

    def __init__(
        self, layers: int, slots: int, heads: int, capacity: int, dim: int, dtype: torch.dtype
    ) -> None:
        chunks = -(-capacity // CHUNK)
        self.k = _zeros((layers, slots + 1, heads, chunks, dim, CHUNK), dtype)
        self.v = _zeros((layers, slots + 1, heads, chunks * CHUNK, -(-dim // CHUNK) * CHUNK), dtype)
        self.dump, self.dim = slots, dim

    @staticmethod
    def bytes_needed(layers: int, slots: int, heads: int, capacity: int, dim: int, dtype: torch.dtype) -> int:
        """Bytes of such a cache."""
        per_position = dim + -(-dim // CHUNK) * CHUNK
        return layers * (slots + 1) * heads * -(-capacity // CHUNK) * CHUNK * per_position * dtype.itemsize

    def canonical(self) -> tuple[Tensor, Tensor]:
        """Copies of keys and values as [layer, slot, kv head, position, D]."""
        return self.k.transpose(-1, -2).flatten(3, 4), self.v[..., : self.dim].clone()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in pages that the system hands out when they are first touched.

    `torch.zeros` writes them all, which takes longer than the rest of a start from packed weights; `numpy.zeros` asks
    for huge pages, of which a single request touches a few hundred megabytes.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
