"""Memory for packed weights in large pages, where the system has them."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LARGE = 2 << 20


def large_pages(size: int) -> Tensor:
    """[size] uint8 on the CPU, at a multiple of 2 MB and in pages of that size where Linux grants them.

    A pass reads all weights once: in pages of 4 KB it would wait for an address 24 000 times for every 96 MB, and the
    processor fetches nothing ahead from beyond a page. Other systems, and sizes that would not fill a page, get plain
    memory. Pages that nothing writes to take no room.
    """
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    room = mmap.mmap(-1, size + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    start = -whole.data_ptr() % _LARGE
    with suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE, start, size // _LARGE * _LARGE)
    return whole[start : start + size]
