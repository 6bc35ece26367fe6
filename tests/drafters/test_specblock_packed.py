"""SpecBlock on the C++ decoder: one call drafts what its passes do, on every instruction set; and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.drafters import load_drafter
from blockpilot.drafters.specblock import SpecBlockDrafter
from blockpilot.drafters.specblock_cpp import CppSpecBlockDrafter
from blockpilot.targets import packed_cache
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.cpp_target import CppTarget
from blockpilot_kernels import dispatch
from blockpilot_kernels.packed_decoder import quantise_q8_0
from tests.drafters.pair_rounds import DTYPES, run
from tests.drafters.rounds import NAN, Rounds, in_blocks, load_pair, spoil
from tests.drafters.test_specblock import VARIANTS, Watched
from tests.eagle3 import IDS
from tests.implementations import build, require
from tests.kernels.packed import instruction_sets, same, threads
from tests.specblock import Reference, save_specblock_drafter
from tests.tiny import save_target

if dispatch.extension_error() is not None:
    require("cpp")
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)


def requests(slots: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Ragged widths up to two blocks' of so many slots, greedy and sampled, and one that may not stop yet."""
    return [
        ([5, *range(6, 20)], {"width": 2 * slots + 1, "temperature": 0.0}),
        ([8, 9], {"width": 2, "temperature": 1.0, "seed": 5}),
        ([7], {"width": slots + 2, "temperature": 0.7, "seed": 2}),
        ([6, 7, 9], {"width": slots + 1, "temperature": 0.9, "seed": 3, "stops": (3,), "free_from": 12}),
        ([4] * 9, {"width": 1, "temperature": 0.0}),
    ]


def three_ways(folders: Any, slots: int, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> list[Any]:
    """What a batch drafts and commits: in one call a step, pass by pass, and on PyTorch's ops.

    One call leaves the keys and values of the passes, but for what it need not compute.
    """
    results, kept = [], []
    for implementation, chains in (("cpp", None), ("cpp", SpecBlockDrafter._draft_chains), ("torch", None)):
        with monkeypatch.context() as patched:
            if chains:
                patched.setattr(CppSpecBlockDrafter, "_draft_chains", chains)
            pair = load_pair(*folders, slots=5, dtype=dtype, implementation=implementation)
            rounds = run(pair, requests(slots), 30)
        results.append((rounds.blocks, rounds.counts, rounds.drafter.passes, int(rounds.drafter.non_finite)))
        kept.append((rounds.drafter.cache.k, rounds.drafter.cache.v))
    for one, passes in zip(*kept[:2], strict=True):
        assert torch.equal(one, torch.where(one == 0, 0, passes))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_drafts_what_its_passes_do(specblock_for, monkeypatch, variant, dtype):
    """And PyTorch's ops draft the same in float32."""
    slots = VARIANTS[variant].get("diffspec_draft_token_num", 4)
    one, passes, plain = three_ways(specblock_for("llama", **VARIANTS[variant]), slots, monkeypatch, dtype)
    assert one == passes
    assert dtype == torch.bfloat16 or one[:2] == plain[:2]
    assert max(len(b) for b in one[0][0]) == 2 * slots + 1
    assert any(count > 1 for counts in one[1].values() for count in counts)


@pytest.mark.parametrize("isa", instruction_sets()[0])
def test_on_every_instruction_set_at_odd_sizes(tmp_path, monkeypatch, isa):
    """No size here is a multiple of 32."""
    monkeypatch.setenv("BLOCKPILOT_ISA", isa)
    target = save_target(tmp_path / "target", hidden=40, kv_heads=1, head_dim=6)
    folder = save_specblock_drafter(tmp_path / "drafter", target, diffspec_draft_token_num=3)
    one, passes, plain = three_ways((target, folder), 3, monkeypatch, torch.float32)
    assert one == passes
    assert one[:2] == plain[:2]


def dequantised(name: str, tensor: Tensor, hidden: int) -> Tensor:
    """A tensor as Q8_0 keeps it; of `fuse` the part that meets the queries is never rounded."""
    if tensor.ndim < 2 or tensor.shape[1] % 32 or "queries" in name:
        return tensor
    rounded = quantise_q8_0(tensor).dequantise()
    if "fuse" in name:
        rounded[:, 2 * hidden :] = tensor[:, 2 * hidden :]
    return rounded


def test_logits_beside_stored_blocks(specblock_for, reference_path):
    """Those of the dequantised weights, in both blocks."""
    folders = specblock_for("llama")
    exact = Reference.of(*folders)
    hidden = exact.embedding.shape[1]
    tensors = {n: dequantised(n, t, hidden) for n, t in exact.tensors.items()}
    reference = Reference(exact.config, tensors, quantise_q8_0(exact.embedding).dequantise())
    target = build("cpp", in_blocks(load_checkpoint(folders[0])), 1, 128, weights="stored")
    drafter = load_drafter(folders[1], target, 1)
    target.use_features(drafter.feature_layers)
    rounds = Watched(target, drafter)
    rounds.start(0, [5, 6, 20, 9], width=9, budget=24)
    seconds = 0
    while not rounds.state.done[0]:
        tokens, features = rounds.tokens(0), torch.cat(rounds.features)
        rounds.step()
        found = [reference.draft(features, tokens)]
        block = rounds.blocks[0][-1]
        if len(block) > 5:
            found.append(reference.go_on(features, tokens, 3, block[4]))
            seconds += 1
        for said, h in zip(rounds.said, found, strict=False):
            assert (said - reference.logits(h)).abs().max() < 3e-4
    assert seconds > 2


Given = tuple[Tensor, Tensor, Tensor, Tensor]  # of [B] blocks: slot, number of the pair, id said, features


def run_blocks(drafter: CppSpecBlockDrafter, given: Given, chosen: list[int]) -> list[Tensor]:
    """What the blocks `chosen` say, [chosen, K, …] each, in one pass."""
    k = drafter.config.slots
    slot, number, said, features = (x[chosen].repeat_interleave(k, 0) for x in given)
    rows = SimpleNamespace(slot=slot, every=torch.arange(len(slot)))
    extent = torch.full((drafter.cache.k.shape[1],), (int(number.max()) + 1) * k)
    exists = torch.ones(len(slot), dtype=torch.bool)
    where = (number * k, number, exists, extent, 0, rows.every)
    made = drafter.run(rows, said, features, *where, features=True)
    return [x.view(len(chosen), k, -1) for x in made]


@pytest.mark.parametrize("isa", instruction_sets()[0])
@pytest.mark.parametrize("weights", ["dense", "stored-int8"])
def test_a_block_s_bits_are_its_own(specblock_for, monkeypatch, isa, weights):
    """Alone or in a crowd, beside blocks that are not finite, at any number of threads."""
    monkeypatch.setenv("BLOCKPILOT_ISA", isa)
    folders = specblock_for("llama")
    results = []
    for chunk in (1, 3, 12):
        checkpoint = load_checkpoint(folders[0])
        blocks = checkpoint if weights == "dense" else in_blocks(checkpoint)
        target = build("cpp", blocks, 3, 128, weights=weights)
        drafter = load_drafter(folders[1], target, 3)
        assert drafter.cache.k.dtype == (torch.float32 if weights == "dense" else torch.bfloat16)
        for slot in range(4):
            spoil(drafter.cache, slot, 0)
        gen = torch.Generator().manual_seed(1)
        # Slots 0 and 2 in turn; one of them says nothing finite.
        slot, number = torch.tensor([0, 2] * 6), torch.arange(6).repeat_interleave(2)
        features = torch.randn(12, drafter.config.feature_size, generator=gen)
        features[1::2] = NAN
        given = (slot, number, torch.arange(12) + 3, features)
        with threads(3 if chunk == 3 else 1):
            found = [run_blocks(drafter, given, list(range(i, i + chunk))) for i in range(0, 12, chunk)]
        results.append([torch.cat(parts) for parts in zip(*found, strict=True)])
        assert torch.isfinite(results[-1][2][::2]).all() and not torch.isfinite(results[-1][2][1::2]).any()
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("isa", instruction_sets()[0])
@pytest.mark.parametrize("head_dim", [6, 8, 10])
def test_a_prompt_leaves_the_keys_and_values_of_blocks_that_are_asked(tmp_path, monkeypatch, isa, head_dim):
    """Queries end before, at and behind a unit of 32 outputs: the last layer leaves them out."""
    monkeypatch.setenv("BLOCKPILOT_ISA", isa)
    folder = save_target(tmp_path / "target", hidden=40, head_dim=head_dim)
    target = build("cpp", load_checkpoint(folder), 1, 64)
    drafter = load_drafter(save_specblock_drafter(tmp_path / "drafter", folder), target, 1)
    gen = torch.Generator().manual_seed(2)
    features, said = torch.randn(9, drafter.config.feature_size, generator=gen), torch.arange(9) + 3
    kept = []
    for fill in (
        lambda: drafter._remember(0, 0, features, said),
        lambda: run_blocks(
            drafter, (torch.zeros_like(said), torch.arange(9), said, features), list(range(9))
        ),
    ):
        spoil(drafter.cache, 0, 0)
        fill()
        kept.append((drafter.cache.k.clone(), drafter.cache.v.clone()))
    assert all(same(one, other) for one, other in zip(*kept, strict=True))
    assert torch.isfinite(kept[0][1][:, 0, :, : 9 * drafter.config.slots, :head_dim]).all()


def test_what_is_not_finite_drafts_the_first_id(specblock_for):
    rounds = Rounds(*load_pair(*specblock_for("llama", tuple(IDS[6:])), implementation="cpp"))
    rounds.start(0, [5, 6, 7], width=8, budget=9)
    spoil(rounds.drafter.cache, 0, 0)
    rounds.step()
    assert rounds.blocks[0][0][1:] == [IDS[6]] * 7
    assert int(rounds.drafter.non_finite) == 7


def test_bad_operands_are_refused_by_the_ops(specblock_for):
    """Sizes that do not fit end in an error, not outside of their memory."""
    rounds = Rounds(*load_pair(*specblock_for("llama"), implementation="cpp"), widest=16)
    rounds.start(0, [5, 6, 7], width=4, budget=9)
    drafter, state = rounds.drafter, rounds.state
    cos, sin = drafter._rope
    for tree in (0, 16):
        rounds.trees[0] = tree
        for name, value, message in (
            ("_plan", drafter._plan[:-1], "plan"),
            ("_plan", torch.cat([drafter._plan, drafter._plan[:1]]), "plan"),
            ("_rope", (cos[:3].contiguous(), sin[:3].contiguous()), "pair: expected a rotation of 0 … -1"),
            ("_weights", (drafter._weights[0][:4096], drafter._weights[1]), "plan"),
        ):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(drafter, name, value)
                with pytest.raises(ValueError, match=message):
                    rounds.step()
    rounds.trees[0] = 0
    for name, value, message in (
        ("_pending", drafter._pending[:, :3].contiguous(), "pending"),
        ("_pending", drafter._pending[..., :5].contiguous(), "pending"),
        ("_rules", (torch.tensor(IDS[::-1]), 1.0), "draft_ids"),
    ):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(drafter, name, value)
            with pytest.raises(ValueError, match=message):
                rounds.step()
    for count in (0, 4, 99):
        state.count[0] = count
        with pytest.raises(ValueError, match=r"count: expected 1 … 3"):
            rounds.step()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, -1, "slot: expected 0 … 1, got -1"),
        (0, 2, "slot: expected 0 … 1, got 2"),
        (1, -4, "place: expected 0 … 500 and none before its position, got 0 of -4"),
        (1, 4, "place: expected .* got 0 of 4"),
        (2, 504, "place: expected .* got 504 of 0"),
        (2, 1 << 62, "place: expected"),
        (3, -1, "pair: expected 0"),
        (3, 1 << 40, "pair: expected"),
    ],
)
def test_places_outside_of_the_cache_are_refused(specblock_for, at, value, message):
    _, drafter = load_pair(*specblock_for("llama"), implementation="cpp")
    before = drafter.cache.k.clone()
    where = [torch.zeros(1, dtype=torch.long) for _ in range(4)]
    where[at][0] = value
    slot, place, own, number = (x.repeat_interleave(4) for x in where)
    rows = SimpleNamespace(slot=slot, every=torch.arange(4))
    said, x = torch.full((4,), 5), torch.zeros(4, drafter.config.feature_size)
    path = torch.stack([place - 1, own], 1)
    given = (place, number, torch.ones(4, dtype=torch.bool), torch.tensor([504, 504]), 0, rows.every)
    with pytest.raises(ValueError, match=message):
        drafter.run(rows, said, x, *given, path, features=True)
    with pytest.raises(ValueError, match="tokens: expected 0 … 31, got 32"):
        rows.slot = rows.slot * 0
        zeros = torch.zeros(4, dtype=torch.long)
        drafter.run(rows, said + 27, x, zeros, zeros, *given[2:], features=True)
    assert torch.equal(drafter.cache.k, before)


def test_a_second_start_packs_nothing(specblock_for, tmp_path, monkeypatch):
    monkeypatch.setenv(packed_cache.ENVIRONMENT, str(tmp_path / "cache"))
    target, folder = specblock_for("llama")
    packed, real = [], CppSpecBlockDrafter._pack
    monkeypatch.setattr(CppSpecBlockDrafter, "_pack", lambda *a: packed.append(real(*a)) or packed[-1])
    blocks = []
    for _ in range(2):
        beside = CppTarget(load_checkpoint(target), 5, 128, torch.float32, "dense", keep=True)
        drafter = load_drafter(folder, beside, 5)
        beside.use_features(drafter.feature_layers)
        blocks.append(run((beside, drafter), [(p, {**a, "tree": 9}) for p, a in requests(4)], 20).blocks)
    assert len(packed) == 1
    assert blocks[0] == blocks[1]
