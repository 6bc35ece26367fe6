"""A round of EAGLE-3 drafting reads no device value on the host, moves no buffer and fits its estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot_kernels.dispatch import forced
from tests.eagle3 import save_eagle3_drafter
from tests.engine.pair import VOCAB, write_tokenizer
from tests.tiny import save_target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_it_holds(load, implementation, eagle3_for, dtype):
    """The estimate covers what is allocated, and not much more than a few times that."""
    folders = eagle3_for("llama", None, hidden_size=64, target_hidden_size=32)
    _, drafter = load(*folders, slots=3, capacity=128, dtype=dtype)
    held = drafter.cache.k.nbytes + drafter.cache.v.nbytes + drafter._pending.nbytes
    if implementation == "cpp":
        held += len(drafter._weights[0])
    else:
        layer = drafter.layer
        held += sum(
            x.bytes for x in (layer.qkv, layer.out, layer.gate_up, layer.down, drafter.fc, drafter._head)
        )
        held += drafter._embedding.nbytes
    estimate = drafter.memory_bytes(drafter.config, 3, 128, dtype)
    assert held <= estimate <= 4 * held


def test_the_library_serves_it(implementation, tmp_path):
    """`LLM.generate` over chains, trees, modes and stops in one batch: every answer is plain decoding's."""
    target = save_target(tmp_path / "target", vocab=VOCAB)
    write_tokenizer(target)
    folder = save_eagle3_drafter(tmp_path / "drafter", target, range(0, VOCAB, 1))
    prompts = [[5 + i, *range(7, 7 + 5 * i)] for i in range(9)]
    plain = [
        SamplingParams(
            max_new_tokens=12 + 3 * i,
            temperature=(0.0, 2.0, 0.9)[i % 3],
            top_k=(0, 0, 12)[i % 3],
            seed=i,
            ignore_eos=i % 2 == 0,
            logprobs=1 if i == 4 else None,
        )
        for i in range(9)
    ]
    shapes = [{"width": 2 + i % 6, "tree": 8 + i if i % 3 == 1 else None} for i in range(9)]
    with forced("cpp" if implementation == "cpp" else "reference"):
        llm = LLM(target, drafter=folder, max_requests=4, max_length=128)
        assert llm.drafter.kind == "eagle3"
        expected = llm.generate(prompts, [replace(p, width=1) for p in plain])
        outputs = llm.generate(prompts, [replace(p, **s) for p, s in zip(plain, shapes, strict=True)])
    for output, alone in zip(outputs, expected, strict=True):
        assert output.token_ids == alone.token_ids
        assert output.logprobs == alone.logprobs
        assert output.finish_reason == alone.finish_reason
    assert sum(o.stats.steps for o in outputs) < sum(o.stats.steps for o in expected)
