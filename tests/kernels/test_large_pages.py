"""Memory for weights: as large as asked for, aligned, and in large pages where the system has them."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from blockpilot_kernels.packed_decoder import large_pages

MB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 2 * MB - 1, 2 * MB, 5 * MB + 17])
def test_every_byte_can_be_written_and_read(size):
    memory = large_pages(size)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((size,), torch.uint8, True)
    memory.copy_(torch.arange(size) % 251)
    assert torch.equal(memory, (torch.arange(size) % 251).to(torch.uint8))


def test_a_large_one_begins_at_a_large_page():
    if not sys.platform.startswith("linux"):
        pytest.skip("large pages: Linux only")
    kept = [large_pages(2 * MB + i) for i in range(3)]
    assert all(m.data_ptr() % (2 * MB) == 0 for m in kept)


def test_it_goes_with_the_last_tensor_that_reads_it():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("resident memory: no /proc")

    def resident() -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
        assert found is not None
        return int(found[1])

    memory = large_pages(256 * MB)
    memory.zero_()
    part, held = memory[-7:], resident()
    del memory
    gc.collect()
    assert int(part.sum()) == 0
    assert resident() > held - 64 * 1024
    del part
    gc.collect()
    assert resident() < held - 192 * 1024
