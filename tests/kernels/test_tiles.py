"""What AMX kernels leave behind on the calling thread."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from tests.kernels.packed import make_product

LOAD, STORE, END = b"\xc4\xe2\x78\x49\x07", b"\xc4\xe2\x79\x49\x07", b"\xc3"  # of [rdi]


def tile_config(code: bytes, config: bytes) -> bytes:
    """Run one instruction on the 64 bytes of a tile configuration."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code + END)
    buffer = ctypes.create_string_buffer(config, 64)
    entry = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)(ctypes.addressof(buffer))
    return buffer.raw


@pytest.mark.parametrize("rows", [0, 1, 16, 19])
@pytest.mark.parametrize(("kind", "rounding"), [("Q4_1", "int16"), ("BF16", "bfloat16")])
@pytest.mark.parametrize("theirs", [bytes(64), bytes([1, *[0] * 15, 64, *[0] * 31, 3, *[0] * 15])])
def test_the_caller_s_tiles_are_configured_as_before(
    theirs: bytes, kind: str, rounding: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another library may configure its tiles once per thread: llama.cpp does."""
    monkeypatch.setenv("BLOCKPILOT_ISA", "amx")
    try:
        torch.ops.blockpilot.isa()
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"no AMX here: {error}")
    product = make_product(kind, 64, 64)
    tile_config(LOAD, theirs)
    product(torch.randn(rows, 64), rounding)
    after = tile_config(STORE, bytes(64))
    tile_config(LOAD, bytes(64))
    assert after == theirs
