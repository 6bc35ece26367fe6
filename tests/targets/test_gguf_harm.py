"""GGUF files made to do harm: clean errors, bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.gguf import read_gguf
from blockpilot.targets.stored import CheckpointError
from tests.targets.gguf_files import crafted, entry, hf_weights, tensor_info, text, write_gguf

UINT32, STRING, ARRAY = 4, 8, 9
BIG = 2**63
ONE = [tensor_info("a", (16,))]
HARM = {
    "empty": b"",
    "magic": crafted(magic=b"GGML"),
    "version 1": crafted(version=1),
    "big endian": crafted(version=0x03000000),
    "n_kv 2^63": crafted(n_kv=BIG),
    "n_kv beyond the file": crafted(n_kv=1000),
    "tensors 2^63": crafted(n_tensors=BIG),
    "key length 2^63": crafted([text("", BIG)], n_kv=1),
    "key length -1": crafted([text("", 2**64 - 1)], n_kv=1),
    "key not text": crafted([text(b"\xff\xfe") + struct.pack("<II", UINT32, 1)]),
    "unknown value": crafted([entry("k", 99, bytes(8))]),
    "string length": crafted([entry("k", STRING, text("ab", BIG))]),
    "array of 2^63": crafted([entry("k", ARRAY, struct.pack("<IQ", UINT32, BIG))]),
    "array of 2^63 words": crafted([entry("k", ARRAY, struct.pack("<IQ", STRING, BIG))]),
    "words beyond the file": crafted([entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, BIG))]),
    "nested array": crafted([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))]),
    "key twice": crafted([entry("k", UINT32, bytes(4))] * 2),
    "n_dims 1e6": crafted(tensors=[tensor_info("a", (1, 1), count=10**6)]),
    "n_dims 0": crafted(tensors=[tensor_info("a", ())]),
    "dims wrap": crafted(tensors=[tensor_info("a", (2**32, 2**32, 1, 16))]),
    "dims wrap to the right size": crafted(tensors=[tensor_info("a", (2**63, 2, 16, 1))]),
    "dim 0": crafted(tensors=[tensor_info("a", (0,))]),
    "tensor type": crafted(tensors=[tensor_info("a", (16,), kind=999)]),
    "partial block": crafted(tensors=[tensor_info("a", (16,), kind=Type.Q8_0)]),
    "offset past the end": crafted(tensors=[tensor_info("a", (16,), offset=2**40)]),
    "offset wraps": crafted(tensors=[tensor_info("a", (16,), offset=2**64 - 32)]),
    "offset unaligned": crafted(tensors=[tensor_info("a", (4,), offset=4)]),
    "overlap": crafted(tensors=[tensor_info("a", (16,)), tensor_info("b", (8,), offset=32)]),
    "one byte short": crafted(tensors=ONE, data=bytes(63)),
    "tensor twice": crafted(tensors=[tensor_info("a", (4,)), tensor_info("a", (4,), offset=32)]),
    "alignment 0": crafted([entry("general.alignment", UINT32, bytes(4))], ONE),
    "alignment 24": crafted([entry("general.alignment", UINT32, struct.pack("<I", 24))], ONE),
    "alignment text": crafted([entry("general.alignment", STRING, text("x"))], ONE),
}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return hf_weights("llama", tie_word_embeddings=True)


@pytest.mark.parametrize("name", HARM)
def test_crafted_headers_are_refused_in_bounded_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HARM[name])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_crafted_files_are_wrong_in_one_place_only(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(crafted([entry("general.alignment", UINT32, struct.pack("<I", 32))], ONE))
    file = read_gguf(path)
    assert file.metadata == {"general.alignment": 32} and file.tensors["a"].shape == (16,)


@pytest.mark.parametrize("layers", [0, 1000, 2**32 - 1])
def test_absurd_layer_counts_cost_nothing(
    layers: int, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    data = bytearray(write_gguf(tmp_path / "m.gguf", weights).read_bytes())
    at = data.index(b"llama.block_count") + len("llama.block_count") + 4
    data[at : at + 4] = struct.pack("<I", layers)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> bytes:
    folder = tmp_path_factory.mktemp("small")
    words = {"tokenizer.ggml.tokens": ["a", "b", "ab"], "llama.rope.scaling.type": "none"}
    return write_gguf(folder / "m.gguf", weights, kind=Type.Q4_0, metadata=words).read_bytes()


def test_truncation_anywhere_is_refused(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for cut in [*range(0, 2000, 5), len(small) // 2, len(small) - 1]:
        path.write_bytes(small[:cut])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 1999), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)
)
def test_mutated_headers_load_or_are_refused(
    small: bytes, tmp_path: Path, edits: list[tuple[int, bytes]]
) -> None:
    """Any bytes over the header: a clean error or a checkpoint, never another exception."""
    data = bytearray(small)
    for at, new in edits:
        data[at : at + len(new)] = new
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError:
        return
    assert checkpoint.tensors.keys() == {name for name in checkpoint.tensors if name.startswith("model.")}
