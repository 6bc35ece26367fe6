"""What a target says it needs, against what it takes; and that it says so before a weight is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

import blockpilot.memory
from blockpilot import LLM
from blockpilot.errors import MemoryLimitError
from blockpilot.targets import checkpoint as checkpoint_module
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.cpp_target import CppTarget, packed_bytes
from blockpilot.targets.torch_target import TorchTarget
from blockpilot_kernels.dispatch import forced
from tests.engine.pair import tiny_folder
from tests.targets.gguf_files import hf_weights, write_gguf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimate_covers_what_is_held_and_not_much_more(dtype):
    checkpoint = load_checkpoint(tiny_folder())
    size = packed_bytes(checkpoint, "dense", dtype)
    target = CppTarget(checkpoint, 4, 128, dtype, "dense")
    held = len(target.blob) + sum(t.nbytes for t in (target.cache.k, target.cache.v))
    room = CppTarget.memory_bytes(checkpoint.config, 4, 128, dtype, size) - size
    assert size <= len(target.blob) <= 2 * size
    assert held <= size + room
    assert sum(t.nbytes for t in (target.cache.k, target.cache.v)) == target.cache.bytes_needed(
        2, 4, 2, 128, 8, dtype
    )


def test_the_reference_holds_no_more_than_it_says():
    checkpoint = load_checkpoint(tiny_folder())
    target = TorchTarget(checkpoint, 4, 128)
    linears = [target.head, *(p for x in target.layers for p in (x.qkv, x.out, x.gate_up, x.down))]
    held = (
        sum(p.bytes for p in linears)
        + target.embedding.nbytes
        + target.cache.k.nbytes
        + target.cache.v.nbytes
    )
    assert held <= TorchTarget.memory_bytes(checkpoint.config, 4, 128, torch.float32)


def test_a_kernel_that_needs_less_for_long_contexts_is_believed():
    pytest.importorskip("triton")
    config = load_checkpoint(tiny_folder()).config
    sizes = {}
    for backend in ("reference", "triton"):
        with forced(backend):
            sizes[backend] = TorchTarget.memory_bytes(config, 4, 2**20, torch.float32)
    assert sizes["triton"] < sizes["reference"] / 4


def test_no_weight_is_read_when_they_would_not_fit(monkeypatch):
    def read(*arguments):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(blockpilot.memory, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(checkpoint_module, "read_tensor", read)
    with pytest.raises(MemoryLimitError, match=r"needs \d+ MiB \(target"):
        LLM(tiny_folder(), max_length=64)


READ = """
import re, sys
from pathlib import Path
import torch
from blockpilot.targets.checkpoint import load_checkpoint

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

blocks = load_checkpoint(sys.argv[1]).blocks
before = resident()
size = blocks["model.embed_tokens.weight"].data.nbytes
torch.ones(size // 8, dtype=torch.float32)
print(size, resident() - before)
"""


def test_a_large_matrix_that_was_read_leaves_nothing_behind(tmp_path):
    """Nor does malloc keep what is taken and given back after it."""
    if not Path("/proc/self/status").exists():
        pytest.skip("resident memory: no /proc")
    weights = hf_weights("llama", tie_word_embeddings=True, vocab_size=1 << 17)
    file = write_gguf(tmp_path / "m.gguf", weights, kind=Type.Q8_0)
    done = subprocess.run([sys.executable, "-c", READ, str(file)], capture_output=True, text=True, check=True)
    size, left = map(int, done.stdout.split())
    assert size == (1 << 17) * 68 and left < size // 4
