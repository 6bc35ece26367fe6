"""Weights written over a drafter's own are those of a drafter loaded with them, and nothing else is written to."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.adapt import Adapt
from blockpilot.drafters import load_drafter
from blockpilot.drafters.eagle3_checkpoint import load_eagle3
from blockpilot.drafters.headed_checkpoint import HEAD
from blockpilot.drafters.specblock_checkpoint import load_specblock
from blockpilot.targets import packed_cache
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot_kernels import dispatch
from blockpilot_kernels.tiled_linear import PackedLinear
from tests.drafters.rounds import in_blocks
from tests.implementations import build, require
from tests.tiny import read_drafter, write_drafter


def other_tensors(folder: Path, names: set[str] | None = None) -> dict[str, torch.Tensor]:
    """The drafter's float tensors, changed: all, or those of `names`."""
    generator = torch.Generator().manual_seed(5)
    config = read_drafter(folder)[0]
    tensors = (load_specblock if "rank_classes" in config else load_eagle3)(folder).tensors
    return {
        n: t + 0.1 * torch.randn(t.shape, generator=generator) if names is None or n in names else t
        for n, t in tensors.items()
    }


def everything(drafter) -> list[torch.Tensor]:
    """All weights, as they lie."""
    if hasattr(drafter, "_plan"):
        return [drafter._weights[0]]
    if drafter.kind == "eagle3":
        layers, linears, vectors = [drafter.layer], [drafter.fc], [drafter.hidden_norm]
    else:
        layers, linears = drafter.layers, [drafter._condition, drafter._fuse, *drafter._shift]
        linears += drafter._ranks.values()
        vectors = [drafter._condition_norm, drafter._token_norm, drafter._queries]
    linears += [drafter._head, *(x for y in layers for x in (y.qkv, y.out, y.gate_up, y.down))]
    vectors += [drafter.norm, *(x for y in layers for x in (y.input_norm, y.post_norm))]
    return [*(x.matrix for x in linears), *vectors]


@pytest.mark.parametrize("part", ["head", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["dense", "stored-int8"])
@pytest.mark.parametrize("config", [{}, {"hidden_size": 64, "target_hidden_size": 32}, "specblock"])
def test_they_are_those_of_a_drafter_loaded_with_them(
    implementation, eagle3_for, specblock_for, tmp_path, part, dtype, weights, config
):
    folders = specblock_for("llama") if config == "specblock" else eagle3_for("llama", **config)
    checkpoint = load_checkpoint(folders[0])
    if weights != "dense":
        if implementation == "torch":
            pytest.skip("blocks are the C++ decoder's")
        checkpoint = in_blocks(checkpoint)
    names = {HEAD} if part == "head" else None
    tensors = other_tensors(folders[1], names)
    config, stored = read_drafter(folders[1])
    write_drafter(tmp_path / "other", config, {**stored, **tensors})
    made = []
    for folder in (folders[1], tmp_path / "other"):
        target = build(implementation, checkpoint, 2, 64, dtype, weights)
        made.append(load_drafter(folder, target, 2))
    ours, theirs = made
    before = [t.clone() for t in everything(ours)]
    assert not all(torch.equal(a, b) for a, b in zip(before, everything(theirs), strict=True))
    ours.own()
    places = [t.data_ptr() for t in everything(ours)] if implementation == "cpp" else []
    ours.replace({n: t for n, t in tensors.items() if names is None or n in names}, target)
    assert all(torch.equal(a, b) for a, b in zip(everything(ours), everything(theirs), strict=True))
    assert not places or places == [t.data_ptr() for t in everything(ours)]


def test_a_loaded_checkpoint_is_not_written_to(implementation, pair_for):
    folders = pair_for("llama")
    target = build(implementation, load_checkpoint(folders[0]), 1, 64)
    made = type(load_drafter(folders[1], target, 1))
    checkpoint = made.loader(folders[1])
    kept = {n: t.clone() for n, t in checkpoint.tensors.items()}
    drafter = made(checkpoint, target, 1)
    drafter.own()
    drafter.replace(other_tensors(folders[1]), target)
    assert all(torch.equal(checkpoint.tensors[n], t) for n, t in kept.items())


@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
def test_the_cache_of_packed_weights_is_not_written_to(kind, tmp_path, monkeypatch, learning):
    """Nor is what another engine has mapped of it."""
    require("cpp")
    if dispatch.backend_of("cpu") != "cpp":
        pytest.skip("only the C++ decoder packs weights")
    monkeypatch.setenv(packed_cache.ENVIRONMENT, str(tmp_path / "cache"))
    learning.use(kind)
    pair = learning.pair
    LLM(pair[0], drafter=pair[1], max_length=96).close()
    files = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "cache").iterdir()}
    assert len(files) == 2
    neighbour = LLM(pair[0], drafter=pair[1], max_length=96)
    held = everything(neighbour.drafter)[0].clone()
    llm = LLM(pair[0], drafter=pair[1], max_length=96, max_requests=2, adapt=Adapt())
    learning.force(llm, "head", "full")
    llm.generate(learning.prompts(20), SamplingParams(max_new_tokens=40, ignore_eos=True, width=4))
    report = llm.adapter.report()
    assert report["kept"] > 1
    assert not torch.equal(everything(llm.drafter)[0], held)
    if kind == "specblock":
        assert llm.drafter.rank._first.keywords["weights"] is everything(llm.drafter)[0]
    assert torch.equal(everything(neighbour.drafter)[0], held)
    assert files == {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "cache").iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_another_weight(dtype):
    first, second = torch.randn(37, 20), torch.randn(37, 20)
    x, bias = torch.randn(16, 20), torch.randn(37)
    linear = PackedLinear(first, bias, dtype)
    linear.replace(second)
    assert torch.equal(linear(x), PackedLinear(second, bias, dtype)(x))
