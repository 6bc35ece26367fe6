"""The packed target against the reference on the same weights: blocks as stored, bfloat16, cache, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from blockpilot.rows import kv_bound, make_rows
from blockpilot.targets import Target, cpp_target
from blockpilot.targets.checkpoint import Checkpoint, load_checkpoint
from blockpilot.targets.cpp_target import CppTarget, packed_bytes
from blockpilot_kernels.tiled_linear import PackedLinear
from tests.implementations import build, require
from tests.kernels.packed import rounded
from tests.targets.gguf_files import hf_weights, write_gguf

KINDS = ("Q8_0", "Q4_0", "Q4_1")
MODES = ("dense", "stored", "stored-int16", "stored-int8")
DTYPES = (torch.float32, torch.bfloat16)
MIXED = {"attn_k": Type.Q4_0, "attn_v": Type.F32, "ffn_up": Type.Q4_1, "ffn_down": Type.F16}
ARCHITECTURES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.fixture(autouse=True)
def extension() -> None:
    require("cpp")


def save(folder: Path, kind: str, architecture: str = "llama", kinds: dict[str, Type] | None = None) -> Path:
    """A tiny file whose logits are a few units wide."""
    family, over = ARCHITECTURES[architecture]
    weights = {n: t * 0.15 + (t.dim() == 1) for n, t in hf_weights(family, **over).items()}
    return write_gguf(folder / "m.gguf", weights, family, Type[kind], kinds=kinds)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """One file of each kind of block, and "mixed": several within a layer's joined matrices."""
    made = {kind: load_checkpoint(save(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS}
    return {**made, "mixed": load_checkpoint(save(tmp_path_factory.mktemp("mixed"), "Q8_0", kinds=MIXED))}


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 48, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def verify(target: Target, slot: int, tokens: list[int], start: int) -> tuple[Tensor, Tensor]:
    """Logits and features of a block at `start`, without padding."""
    n = len(tokens)
    rows = make_rows((slot,), (n,), target.cache.dump, target.device, target.row_tile)
    padded = torch.zeros(rows.padded, dtype=torch.long)
    padded[:n] = torch.tensor(tokens)
    extent = torch.full((target.cache.dump + 1,), start + n)
    exists = rows.slot != target.cache.dump
    logits, features = target.verify(rows, padded, rows.column + start, exists, extent, kv_bound(start + n))
    return logits[:n], features[:n]


@torch.inference_mode()
def answers(target: Target) -> tuple[Tensor, Tensor]:
    """Logits [37, V] and every hidden state of a prompt over a chunk's end and a block behind it."""
    target.use_features(range(target.config.num_layers + 1))
    first, states = target.prefill(1, ids(90))
    logits, more = verify(target, 1, ids(16, 1), 90)
    return torch.cat([first[None], logits]), torch.cat([states, more])


def compare(a: Target, b: Target, limit: float) -> float:
    """The largest difference, relative to the size of what is compared."""
    worst = 0.0
    for x, y in zip(answers(a), answers(b), strict=True):
        worst = max(worst, float((x - y).abs().max() / y.abs().max()))
    assert worst <= limit, worst
    return worst


def typical(a: Target, b: Target) -> float:
    """The mean difference of hidden states, in their standard deviations."""
    (_, x), (_, y) = answers(a), answers(b)
    return float((x - y).abs().mean() / y.std())


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_blocks_as_stored_are_the_dequantised_tensors(checkpoints, kind):
    reference, ours = (build(i, checkpoints[kind], 2, 128, weights="stored") for i in ("torch", "cpp"))
    compare(ours, reference, 1e-5)
    logits, _ = answers(ours)
    assert 1 < logits.std() < 2
    assert torch.equal(logits.argmax(-1), answers(reference)[0].argmax(-1))
    expected = {"Q8_0", "F32"} if kind == "mixed" else {kind}
    assert set(ours.formats) == expected
    assert set(build("cpp", checkpoints[kind], 1, 32).formats) == {"F32"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_of_every_architecture(tmp_path, architecture):
    checkpoint = load_checkpoint(save(tmp_path, "Q8_0", architecture))
    reference = build("torch", checkpoint, 2, 128)
    for weights in ("stored", "dense"):
        compare(build("cpp", checkpoint, 2, 128, weights=weights), reference, 1e-5)


class InBytes:
    """A product of the reference with its input rounded to bytes."""

    def __init__(self, linear: PackedLinear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(rounded(x, "int8", True).float())


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_in_bytes(checkpoints, kind):
    """As the reference with every product's input rounded so; a byte may round to its other neighbour."""
    ours = build("cpp", checkpoints[kind], 2, 128, weights="stored-int8")
    reference = build("torch", checkpoints[kind], 2, 128)
    assert compare(ours, reference, 0.05) > 1e-3
    for layer in reference.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(layer, name, InBytes(getattr(layer, name)))
    reference.head = InBytes(reference.head)
    compare(ours, reference, 0.01)
    assert typical(ours, reference) < 3e-4


def test_floats_beside_blocks_take_their_inputs_unrounded(checkpoints):
    reference = build("torch", checkpoints["mixed"], 2, 128)
    assert compare(build("cpp", checkpoints["mixed"], 2, 128, weights="stored-int8"), reference, 0.05) > 1e-3


@pytest.mark.parametrize(("weights", "limit"), [("dense", 0.015), ("stored", 0.05)])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_the_references(checkpoints, kind, weights, limit):
    """The reference rounds the same things, but sums in another order: an input of a product may then round to
    the other neighbour, 2^-8 away. Blocks as stored are not rounded at all, so there each weight differs by up
    to 2^-9 as well. Neither is further from float32 than a few such roundings.
    """
    checkpoint = checkpoints[kind]
    ours, reference = (build(i, checkpoint, 2, 128, torch.bfloat16, weights) for i in ("cpp", "torch"))
    native = reference.head.dtype == torch.bfloat16  # then products come out rounded too
    compare(ours, reference, 0.05 if native else limit)
    if weights == "dense" and not native:
        assert typical(ours, reference) < 3e-4  # few inputs round otherwise; one unrounded product makes 1e-3
    assert compare(ours, build("torch", checkpoint, 2, 128), 0.05) > 1e-3
    assert ours.cache.k.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("window", [None, 9])
def test_rows_of_a_block_are_single_steps(checkpoints, kind, weights, dtype, window):
    checkpoint = checkpoints[kind]
    if window:
        config = replace(checkpoint.config, sliding_window=(None, window))
        checkpoint = replace(checkpoint, config=config)
    target = build("cpp", checkpoint, 2, 64, dtype, weights)
    target.use_features((0, 1, 2))
    prompt, block = ids(21), ids(12, 1)
    target.prefill(0, prompt)
    logits, features = verify(target, 0, block, 21)
    keys, values = target.cache.canonical()
    target.cache.k.zero_()
    target.cache.v.zero_()
    target.prefill(0, prompt)
    single = [verify(target, 0, [token], 21 + i) for i, token in enumerate(block)]
    assert torch.equal(logits, torch.cat([x for x, _ in single]))
    assert torch.equal(features, torch.cat([x for _, x in single]))
    assert all(map(torch.equal, (keys, values), target.cache.canonical()))
    whole = target.prefill(1, prompt + block)
    assert torch.equal(whole[0], logits[-1]) and torch.equal(whole[1][21:], features)


def test_a_window_hides_what_is_outside(checkpoints):
    """As in the reference; and the window matters."""
    checkpoint = checkpoints["Q4_0"]
    config = replace(checkpoint.config, sliding_window=(9, 4))
    narrow = replace(checkpoint, config=config)
    ours = build("cpp", narrow, 2, 128, weights="stored")
    compare(ours, build("torch", narrow, 2, 128), 1e-5)
    with pytest.raises(AssertionError):
        compare(ours, build("torch", checkpoint, 2, 128), 1e-2)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prefill_chunks_leave_no_trace(checkpoints, monkeypatch, chunk):
    results = []
    for rows in (128, chunk):
        monkeypatch.setattr(cpp_target, "PREFILL_ROWS", rows)
        target = build("cpp", checkpoints["Q4_1"], 1, 80, weights="stored")
        target.use_features((0, 2))
        results.append((*target.prefill(0, ids(65)), *target.cache.canonical()))
    assert all(map(torch.equal, *results))


def test_the_cache_holds_what_the_references_holds(checkpoints):
    targets = [build(i, checkpoints["Q8_0"], 2, 70) for i in ("torch", "cpp")]
    for target in targets:
        target.prefill(1, ids(70))
    reference = targets[0].cache
    for ours, theirs in zip(targets[1].cache.canonical(), (reference.k, reference.v), strict=True):
        assert ours.shape[:3] == theirs.shape[:3] and ours.shape[3] == 80
        torch.testing.assert_close(ours[:, 1, :, :70], theirs[:, 1, :, :70], atol=1e-4, rtol=1e-4)
        assert ours[:, 1, :, :70].any() and not ours[:, [0, 2]].any() and not ours[:, 1, :, 70:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_mean_embeddings(checkpoints, kind):
    reference, ours = (build(i, checkpoints[kind], 1, 32, weights="stored") for i in ("torch", "cpp"))
    assert tuple(ours.embedding.shape) == tuple(reference.embedding.shape)
    p = torch.softmax(torch.randn(3, 48, generator=torch.Generator().manual_seed(0)) * 3, -1)
    expected = p @ reference.embedding
    torch.testing.assert_close(ours.embedding.weighted_mean(p), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "mixed"])
@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_memory_estimate_covers_what_is_held(checkpoints, weights, dtype, kind):
    checkpoint = checkpoints[kind]
    target = build("cpp", checkpoint, 3, 100, dtype, weights)
    assert isinstance(target, CppTarget)
    stored = packed_bytes(checkpoint, weights, dtype)
    cache = target.cache.k.nbytes + target.cache.v.nbytes
    sizes = (checkpoint.config.num_layers, 3, checkpoint.config.num_kv_heads, 100, checkpoint.config.head_dim)
    assert cache == target.cache.bytes_needed(*sizes, dtype)
    assert stored <= len(target.blob) <= 1.2 * stored  # tables of 48 rows are padded to 64
    assert CppTarget.memory_bytes(checkpoint.config, 3, 100, dtype, stored) >= len(target.blob) + cache
