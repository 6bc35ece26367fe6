"""A node of a tree has the bits that plain decoding of its path has, wherever in the cache its ancestors lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.plan import StepPlan
from blockpilot.rows import kv_bound, make_rows
from blockpilot.state import State
from blockpilot.targets import Target
from blockpilot.targets.checkpoint import Checkpoint, load_checkpoint
from blockpilot.targets.cpp_cache import CppCache
from blockpilot.tree import plant
from blockpilot_kernels import dispatch
from tests.implementations import IMPLEMENTATIONS, build, require
from tests.kernels.packed import instruction_sets
from tests.targets.gguf_files import hf_weights, write_gguf
from tests.tiny import save_target

NODES, WIDTH, SLOTS, CAPACITY = 16, 6, 3, 112
# Lengths around the ends of chunks of 16 and 64 positions, where the order of sums could change.
LENGTHS = (1, 14, 16, 31, 60, 63, 64)
FAMILIES = {"llama": {}, "qwen3": {"head_dim": 16}}
NAN = float("nan")


def save(folder: Path, family: str) -> Path:
    return save_target(folder / "target", family, favourites=0, **FAMILIES[family])


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 32, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_tree(seed: int, nodes: int = NODES, width: int = WIDTH) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents (−1: the anchor) and depths of the drafted nodes; siblings differ."""
    gen = torch.Generator().manual_seed(seed)
    tokens, parent, depth = [], [], []
    for _ in range(nodes - 1):
        open_ones = [-1, *(i for i, d in enumerate(depth) if d < width - 1)]
        above = open_ones[int(torch.randint(len(open_ones), (), generator=gen))]
        used = {t for t, p in zip(tokens, parent, strict=True) if p == above}
        tokens.append(next(t + 3 for t in torch.randperm(29, generator=gen).tolist() if t + 3 not in used))
        parent.append(above)
        depth.append(1 if above < 0 else depth[above] + 1)
    return tokens, parent, depth


def path_of(node: int, parent: list[int]) -> list[int]:
    """Drafted nodes from the anchor's child down to `node`, none of them for the anchor itself (−1)."""
    return [] if node < 0 else [*path_of(parent[node], parent), node]


def spoil(target: Target) -> None:
    """NaN in everything; a reference's marks say so."""
    for name in ("k", "v", "bad"):
        if (held := getattr(target.cache, name, None)) is not None:
            held.fill_(True if held.dtype == torch.bool else NAN)


def proposal(trees: dict[int, tuple[list[int], list[int], list[int]]]) -> Proposal:
    """Trees by slot; the dump slot and the others have none."""
    shape = (SLOTS + 1, NODES - 1)
    found = [torch.full(shape, -1), torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)]
    nodes = torch.zeros(SLOTS + 1, dtype=torch.long)
    for slot, parts in trees.items():
        nodes[slot] = len(parts[0]) + 1
        for tensor, values in zip(found, parts, strict=True):
            tensor[slot, : len(values)] = torch.tensor(values, dtype=torch.long)
    return Proposal(*found, nodes)


class Verified:
    """Prompts in slots of a spoilt cache, one tree behind each, verified together."""

    def __init__(self, target: Target, prompts: dict[int, list[int]], trees: dict[int, tuple]) -> None:
        self.target, self.state = target, State.allocate(SLOTS, CAPACITY, NODES, 1, "cpu")
        s, slots = self.state, tuple(prompts)
        spoil(target)
        for slot, prompt in prompts.items():
            s.length[slot], s.done[slot] = len(prompt) + 1, False
            target.prefill(slot, prompt)
        plan = StepPlan(slots, (WIDTH,) * len(slots), SLOTS, CAPACITY // 64 * 64 + 64, torch.device("cpu"),
                        tile=target.row_tile, trees=(NODES,) * len(slots))  # fmt: skip
        drafted = proposal(trees)
        s.block[:, 0], s.block[:, 1:] = 4, drafted.tokens
        self.plan, self.tree = plan, plant(s, plan, drafted)
        rows, t = plan.rows, self.tree
        position = s.length[rows.slot] + t.row_depth - 1
        bound = min(plan.bound, kv_bound(CAPACITY))
        given = (
            rows,
            s.block[rows.slot, rows.column].clamp(min=0),
            position,
            t.exists,
            t.extent,
            bound,
            t.path,
        )
        self.logits, self.features = target.verify(*given)


@torch.inference_mode()
def one(target: Target, slot: int, token: int, at: int) -> tuple[Tensor, Tensor]:
    """Logits [V] and features of one token at position `at`."""
    rows = make_rows((slot,), (1,), target.cache.dump, target.device, target.row_tile)
    tokens = torch.full((rows.padded,), token)
    extent = torch.full((target.cache.dump + 1,), at + 1)
    exists = rows.slot != target.cache.dump
    position = torch.full_like(tokens, at)
    logits, features = target.verify(rows, tokens, position, exists, extent, kv_bound(at + 1))
    return logits[0], features[0]


@torch.inference_mode()
def check_nodes(target: Target, length: int, seed: int) -> None:
    """Every node of the trees of two slots against its own path, one token a pass.

    Paths come in an order in which what lies before a node was left there by its own ancestors.
    """
    target.use_features((0, 1, target.config.num_layers))
    prompts = {0: ids(length, seed), 2: ids(5 + seed % 7, seed + 1)}
    trees = {0: random_tree(seed), 2: random_tree(seed + 50, 9)}
    found = Verified(target, prompts, trees)
    for i, slot in enumerate(prompts):
        tokens, parent, depth = trees[slot]
        target.prefill(1, prompts[slot])
        for node in sorted(range(-1, len(tokens)), key=lambda n: path_of(n, parent)):
            token, at = (4, 0) if node < 0 else (tokens[node], depth[node])
            logits, features = one(target, 1, token, len(prompts[slot]) + at)
            row = found.plan.rows.starts[i] + node + 1
            assert torch.equal(found.logits[row], logits), (slot, node)
            assert torch.equal(found.features[row], features), (slot, node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_node_is_plain_decoding_of_its_path(tmp_path, implementation, family, dtype):
    require(implementation)
    checkpoint = load_checkpoint(save(tmp_path, family))
    target = build(implementation, checkpoint, SLOTS, CAPACITY, dtype)
    for seed, length in enumerate(LENGTHS):
        check_nodes(target, length, seed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_windows_begin_inside_a_tree(tmp_path, implementation):
    """A window shorter than a tree is deep leaves out the prefix, and ancestors too."""
    require(implementation)
    checkpoint = load_checkpoint(save(tmp_path, "llama"))
    config = replace(checkpoint.config, sliding_window=(2, None, 9, 4))
    target = build(implementation, replace(checkpoint, config=config), SLOTS, CAPACITY)
    for seed, length in enumerate(LENGTHS):
        check_nodes(target, length, seed)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A file of Q4_1 blocks; three query heads share a key."""
    weights = {n: t * 0.15 + (t.dim() == 1) for n, t in hf_weights("llama").items()}
    return load_checkpoint(write_gguf(tmp_path_factory.mktemp("q") / "m.gguf", weights, "llama", Type.Q4_1))


@pytest.mark.parametrize("weights", ["stored", "stored-int16", "stored-int8", "dense"])
@pytest.mark.parametrize("isa", instruction_sets()[0] if dispatch.extension_error() is None else [])
def test_every_instruction_set_and_format(stored, monkeypatch, isa, weights):
    monkeypatch.setenv("BLOCKPILOT_ISA", isa)
    for dtype in (torch.float32, torch.bfloat16):
        target = build("cpp", stored, SLOTS, CAPACITY, dtype, weights)
        for seed, length in enumerate((15, 33, 64)):
            check_nodes(target, length, seed)


def canonical(target: Target, slot: int, end: int) -> Tensor:
    cache = target.cache
    kept = cache.canonical() if isinstance(cache, CppCache) else (cache.k, cache.v)
    return torch.stack([t[:, slot, :, :end] for t in kept])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.inference_mode()
def test_the_committed_path_lies_side_by_side(tmp_path, implementation):
    """The target's choices are written so that every node in turn is the last that is kept."""
    require(implementation)
    target = build(implementation, load_checkpoint(save(tmp_path, "qwen3")), SLOTS, CAPACITY)
    target.use_features((1, 3))
    for node in range(-1, NODES - 1):
        prompt, (tokens, parent, depth) = ids(13, 1), random_tree(node + 3)
        found = Verified(target, {1: prompt}, {1: (tokens, parent, depth)})
        s, path = found.state, path_of(node, parent)
        s.choice.fill_(-9)
        s.finite.fill_(True)
        for above, child in zip([-1, *path], path, strict=False):
            s.choice[1, above + 1] = tokens[child]
        walk = found.tree.follow(s)
        kept = [4, *(tokens[n] for n in path)]
        assert s.block[1, : len(path) + 2].tolist() == [*kept, -1][:NODES]
        s.count[1] = len(kept)
        s.length[1] += len(kept)
        rows = walk.gather(s, target)[: len(kept)]
        assert rows.tolist() == [0, *(n + 1 for n in path)]
        _, features = target.prefill(2, prompt + kept)
        end = len(prompt) + len(kept)
        assert torch.equal(found.features[rows], features[len(prompt) :])
        assert torch.equal(canonical(target, 1, end), canonical(target, 2, end))
