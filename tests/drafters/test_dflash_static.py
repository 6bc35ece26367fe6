"""A round of drafting reads no device value on the host, moves no buffer and fits its estimate; blocks of bytes."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_checkpoint import DFlashCheckpoint, load_dflash, write_draft_vocabulary
from blockpilot.drafters.dflash_cpp import CppDFlashDrafter
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot.step import StepClock, run_step
from blockpilot.targets import Target
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.cpp_cache import CppCache
from blockpilot_kernels.dispatch import forced
from blockpilot_kernels.packed_decoder import quantise_q8_0
from tests.drafters.rounds import SLIDING, Rounds, in_blocks, load_pair
from tests.implementations import build, require
from tests.no_host_sync import NoHostSync


def one_step(folders, device: str, implementation: str = "torch") -> State:
    target, drafter = load_pair(*folders, slots=3, capacity=64, device=device, implementation=implementation)
    state = State.allocate(3, 64, 6, 4, device)
    state.done[:3] = False
    for name, value in {"limit": 60, "length": 7, "width": 6, "temperature": 0.7, "free_from": 9}.items():
        getattr(state, name).fill_(value)
    wants = {"sampled": True, "bans": True, "tile": target.row_tile}
    plan = StepPlan((0, 1, 2), (6, 1, 3), 3, 64, torch.device(device), **wants)
    if implementation == "torch":
        for rows, layer in ((plan.rows, target.layers[0]), (plan.draft_rows, drafter.layers[0])):
            rows.tiles(layer.shape.groups)  # laid out on the host, between steps
    with torch.inference_mode(), NoHostSync():
        run_step(state, plan, target, drafter, StepClock())
    return state


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_a_round_reads_nothing_on_the_host(drafter_for, backend, implementation, tmp_path):
    """The C++ decoder reads CPU memory itself; what stands around it is PyTorch and must not."""
    require(backend)
    with forced(backend):
        state = one_step(drafter_for("llama", **SLIDING), "cpu", implementation)
        assert (state.count[:3] >= 1).all()
        state = one_step(few_ids(drafter_for("llama", **SLIDING), tmp_path), "cpu", implementation)
        assert (state.count[:3] >= 1).all()


def test_a_round_runs_on_meta(drafter_for, tmp_path):
    """No data at all: any branch on a value would raise."""
    assert one_step(drafter_for("llama", **SLIDING), "meta").count.is_meta
    assert one_step(few_ids(drafter_for("llama", **SLIDING), tmp_path), "meta").count.is_meta


def few_ids(folders, place):
    """The same pair with a draft head over every third id."""
    shutil.copytree(folders[1], place / "few")
    write_draft_vocabulary(place / "few", range(0, 32, 3))
    return folders[0], place / "few"


def test_pointers_never_change(load, drafter_for):
    rounds = Rounds(*load(*drafter_for("llama"), slots=2))
    cache = rounds.drafter.cache

    def pointers() -> list[int]:
        marks = [] if isinstance(cache, CppCache) else [cache.bad]
        return [t.data_ptr() for t in (cache.k, cache.v, rounds.drafter._tokens, *marks)]

    before = pointers()
    rounds.start(0, [5, 6], width=4, budget=20)
    rounds.start(1, [7], width=2, budget=20, temperature=1.0)
    rounds.finish()
    assert pointers() == before


def test_memory_is_what_it_holds(drafter_for):
    """The estimate covers what is allocated, and not much more than twice that."""
    _, drafter = load_pair(*drafter_for("llama"), slots=3, capacity=128)
    linears = [drafter.fc, drafter.context_kv]
    for layer in drafter.layers:
        linears += [layer.qkv, layer.out, layer.gate_up, layer.down]
    cache = drafter.cache.k.nbytes + drafter.cache.v.nbytes
    held = cache + sum(linear.bytes for linear in linears)
    estimate = drafter.memory_bytes(drafter.config, 3, 128, torch.float32)
    assert held <= estimate <= 2 * held


@pytest.mark.parametrize("weights", ["dense", "stored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_packed_drafters_memory_is_what_it_holds(drafter_for, dtype, weights):
    """The estimate takes every matrix for floats; padding to 32 rows and columns is small beside that."""
    folders = drafter_for("llama")
    require("cpp")
    target = build("cpp", in_blocks(load_checkpoint(folders[0])), 3, 128, dtype, weights)
    drafter = CppDFlashDrafter(load_dflash(folders[1]), target, 3)
    held = drafter.cache.k.nbytes + drafter.cache.v.nbytes + len(drafter._weights[0])
    estimate = drafter.memory_bytes(drafter.config, 3, 128, dtype)
    assert held <= estimate <= (2 if weights == "dense" else 4) * held


def in_bytes(checkpoint: DFlashCheckpoint) -> DFlashCheckpoint:
    """A drafter's matrices rounded to Q8_0."""
    tensors = {n: quantise_q8_0(t).dequantise() if t.dim() == 2 else t for n, t in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def drafts(target: Target, drafter: DFlashDrafter) -> Rounds:
    """A finished request."""
    target.use_features(drafter.feature_layers)
    rounds = Rounds(target, drafter)
    rounds.start(0, [5, *range(6, 30)], width=6, budget=20)
    rounds.finish()
    return rounds


def off_by(a: Rounds, b: Rounds) -> float:
    """The largest difference of first draft logits, in their standard deviations."""
    assert a.blocks[0][0][0] == b.blocks[0][0][0]
    x, y = a.logits[0][0], b.logits[0][0]
    return float((x - y).abs().max() / y.std())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_beside_blocks_the_drafter_is_rounded_to_bytes(drafter_for, name):
    """With a target in Q8_0 blocks: the drafts of the reference on matrices rounded so, and of no others."""
    require("cpp")
    folders = drafter_for(name, attention_bias=True, **SLIDING)
    checkpoint, published = in_blocks(load_checkpoint(folders[0])), load_dflash(folders[1])
    reference = build("torch", checkpoint, 1, 128)
    expected = drafts(reference, DFlashDrafter(in_bytes(published), reference, 1))
    unrounded = drafts(reference, DFlashDrafter(published, reference, 1))
    formats = ("stored", "stored-int8", "stored-int16")
    stored, *others = (build("cpp", checkpoint, 1, 128, weights=w) for w in formats)
    ours = drafts(stored, CppDFlashDrafter(published, stored, 1))
    assert ours.tokens(0) == expected.tokens(0) and ours.counts[0] == expected.counts[0]
    found, wanted = torch.cat(ours.logits[0]), torch.cat(expected.logits[0])
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()  # the head's favourites are dozens high
    assert off_by(ours, unrounded) > 1e-3
    for rounded in others:
        assert 1e-3 < off_by(drafts(rounded, CppDFlashDrafter(published, rounded, 1)), expected) < 0.5
