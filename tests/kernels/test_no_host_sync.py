"""No op reads a device value on the host; and the two proofs of that can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import accept_commit, choose, dispatch, gumbel_noise, philox
from blockpilot_kernels.block_attention import AttentionTiles, block_attention
from blockpilot_kernels.draft_tree import draft_tree, largest
from blockpilot_kernels.head_choice import head_choice
from blockpilot_kernels.kv_compact import kv_compact
from blockpilot_kernels.norm_rope import block_input, residual_norm, rms_norm, swiglu
from blockpilot_kernels.qk_rope_append import context_append, qk_rope_append
from blockpilot_kernels.tiled_linear import PackedLinear
from tests.kernels.backends import Backend, Params, counting
from tests.kernels.test_accept_commit import Case, build
from tests.no_host_sync import NoHostSync


def run_every_op(device: torch.device | str) -> None:
    rows, vocab = 4, 9
    seed, logits = counting(rows).to(device), torch.zeros(rows, vocab, device=device)
    philox(seed, seed, vocab)
    noise = gumbel_noise(seed, seed, vocab)
    params = [t.to(device) for t in Params(0.8, 2, 0.9, 0.1, [1, -1]).tensors(rows) if t is not None]
    choose(logits, noise, *params, filtered=True)
    choose(logits, noise, *params[:4], None, filtered=False)
    choose(logits, None, *params, filtered=False)
    accept_commit(*[t.to(device) for t in build([Case(4, 2), Case(4, 3, stop_at=1)], 4).tensors()])
    run_layer_ops(layer_inputs(device))


def layer_inputs(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, AttentionTiles]:
    """Queries of two slots, a cache of more keys than one program takes, the slots' keys, tiles."""
    tiles = AttentionTiles.build((1, 0), (3, 2), 16, 2, apart=True).to(torch.device(device))
    extent = torch.tensor([2, 600], device=device)
    return torch.zeros(16, 2, 8, device=device), torch.zeros(2, 1, 640, 8, device=device), extent, tiles


def run_layer_ops(given: tuple[Tensor, Tensor, Tensor, AttentionTiles]) -> None:
    q, cache, extent, tiles = given
    rows = q.flatten(1)
    table = rows[:, :4]
    bad, position = torch.zeros_like(cache[:, 0, :, 0], dtype=torch.bool), torch.zeros_like(rows[:, 0]).long()
    qkv, norm = q.repeat(1, 2, 1), cache[0, 0, 0]
    q = qk_rope_append(qkv, norm, norm, table, table, position - 1, cache, cache.clone(), bad, 1e-6)
    held = (cache[None].clone(), cache[None].clone(), bad[None])
    context_append(q[:, None, :, None], norm[None], table, table, position - 1, *held, 1e-6)
    path = position[:, None].expand(-1, 3)
    block_attention(q, cache, cache, bad, tiles, position, extent, 640, causal=True, path=path)
    swiglu(residual_norm(rows, rms_norm(rows, rows[0], 1e-6), rows[0], 1e-6)[1])
    block_input(position, rows, 2.0, rows[0], 1e-6)
    held = cache.new_zeros(3, *cache.shape)
    kv_compact(held, held.clone(), held[..., 0, :, 0] > 0, extent, path[:2], extent.clamp(max=3))
    draft_tree(rows.view(4, 8, 8) - 1, path[:4, 0], path[:4, 0] + 3, 4)
    largest(rows, 2)
    head = PackedLinear(cache[0, 0, :40].repeat(1, 2))
    chosen = (path[0].new_zeros(40), rows.new_zeros(3, 9), position, rows[:, 0], position[:, None])
    head_choice(rows, head, 1.0, *chosen)
    head(rows)


def test_under_the_mode(backend: Backend) -> None:
    run_every_op(backend.device)  # what happens once (compilation, probing) is not part of a step
    arguments = build([Case(4, 2)], 4)
    moved = [t.to(backend.device) for t in arguments.tensors()]
    seed = counting(3).to(backend.device)
    logits = torch.zeros(3, 9, device=backend.device)
    params = [t.to(backend.device) for t in Params(0.8, 2, 0.9, 0.1, [1, -1]).tensors(3) if t is not None]
    layer = layer_inputs(backend.device)
    with torch.inference_mode(), NoHostSync():
        run_layer_ops(layer)
        noise = gumbel_noise(seed, seed, 9)
        choose(logits, noise, *params, filtered=True)
        choose(logits, None, *params, filtered=False)
        accept_commit(*moved)


def test_on_meta_tensors() -> None:
    with dispatch.forced("reference"):
        run_every_op("meta")


def read_item(x: Tensor) -> object:
    return x.sum().item()


def read_bool(x: Tensor) -> object:
    return 1 if (x > 0).any() else 2


def read_list(x: Tensor) -> object:
    return x.tolist()


def select_by_mask(x: Tensor) -> object:
    return x[x > 0]


def write_by_mask(x: Tensor) -> object:
    x[x > 0] = 1.0
    return x


def find_nonzero(x: Tensor) -> object:
    return x.nonzero()


def slice_by_value(x: Tensor) -> object:
    return x[: int(x.argmax())]


def find_unique(x: Tensor) -> object:
    return x.unique()


BAD = [
    read_item, read_bool, read_list, select_by_mask, write_by_mask, find_nonzero, slice_by_value, find_unique,
]  # fmt: skip


# PyTorch hands a CPU tensor's tolist to no mode: only meta sees it.
@pytest.mark.parametrize("bad", [f for f in BAD if f is not read_list])
def test_the_mode_sees_a_sync(bad: Callable[[Tensor], object]) -> None:
    bad(torch.arange(4.0))
    with pytest.raises(RuntimeError, match="host"), NoHostSync():
        bad(torch.arange(4.0))


@pytest.mark.parametrize("bad", [f for f in BAD if f is not write_by_mask])
def test_meta_sees_a_sync(bad: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        bad(torch.arange(4.0, device="meta"))


def test_the_mode_sees_a_copy_between_devices() -> None:
    with pytest.raises(RuntimeError, match="a copy between cpu and meta"), NoHostSync():
        torch.zeros(2).to("meta")


def test_the_mode_lets_indexing_by_integers_pass() -> None:
    x, i = torch.arange(4.0), torch.tensor([0, 2])
    with NoHostSync():
        x[i] = x[i] + 1
        x.index_copy_(0, i, x[i]).to(torch.float64)
    assert x.tolist() == [1.0, 1.0, 3.0, 3.0]
