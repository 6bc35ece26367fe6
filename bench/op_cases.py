"""The kernel ops and shapes that are measured: what they are called with, and whose results must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from blockpilot_kernels import accept_commit, choose, dispatch, gumbel_noise, philox
from blockpilot_kernels.block_attention import AttentionTiles, block_attention
from blockpilot_kernels.draft_tree import draft_tree, largest
from blockpilot_kernels.head_choice import head_choice
from blockpilot_kernels.kv_compact import kv_compact
from blockpilot_kernels.norm_rope import residual_norm, rms_norm, swiglu
from blockpilot_kernels.prompt_lookup import prompt_lookup
from blockpilot_kernels.qk_rope_append import qk_rope_append
from blockpilot_kernels.tiled_linear import PackedLinear

VOCAB = 49152

Call = Callable[[], Tensor]
# Within its passes over a whole model the extension has these too, but no call of their own.
NOT_CPP = ("reference", "triton")


@dataclass(frozen=True)
class Case:
    """An op on one shape. `make(device)` returns the call to time; `backends`, those that have an implementation of
    their own, must agree on its result."""

    op: str
    shape: str
    make: Callable[[str], Call]
    backends: tuple[str, ...] = dispatch.BACKENDS


def _full(rows: int, value: float, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full((rows,), value, dtype=dtype, device=device)


def _noise(op: Callable[[Tensor, Tensor, int], Tensor], name: str, rows: int) -> Case:
    def make(device: str) -> Call:
        row = torch.arange(rows, device=device)
        return partial(op, row * 0x9E3779B9, row, VOCAB)

    return Case(name, f"{rows}x{VOCAB}", make)


def _choose(rows: int, kind: str) -> Case:
    filtered, sampled = kind == "filtered", kind != "greedy"

    def make(device: str) -> Call:
        generator = torch.Generator().manual_seed(rows)
        logits = (torch.randn(rows, VOCAB, generator=generator) * 4).to(device)
        noise = -torch.log(torch.empty(rows, VOCAB).exponential_(generator=generator)).to(device)
        settings = (
            _full(rows, 0.8 if sampled else 0.0, torch.float32, device),
            _full(rows, 50 if filtered else 0, torch.int64, device),
            _full(rows, 0.9 if filtered else 1.0, torch.float32, device),
            _full(rows, 0.0, torch.float32, device),
        )

        def call() -> Tensor:
            return choose(logits, noise if sampled else None, *settings, None, filtered=filtered)[0]

        return call

    return Case("choose", f"{rows}x{VOCAB} {kind}", make)


def _accept(slots: int, width: int) -> Case:
    def make(device: str) -> Call:
        generator = torch.Generator().manual_seed(slots)
        block = torch.randint(0, 3, (slots, width), generator=generator).to(device)
        choice = torch.randint(0, 3, (slots, width), generator=generator).to(device)
        finite = torch.ones(slots, width, dtype=torch.bool, device=device)
        widths, limit = (_full(slots, value, torch.int64, device) for value in (width, 2048))
        stop_ids = torch.full((slots, 4), -1, device=device)
        tokens = torch.zeros(slots, 2048, dtype=torch.int64, device=device)
        start = _full(slots, 7, torch.int64, device)
        finish, accepted, count = (torch.zeros_like(start) for _ in range(3))

        def call() -> Tensor:
            length, done = start.clone(), torch.zeros_like(start, dtype=torch.bool)
            state = (tokens, length, done, finish, accepted, count)
            accept_commit(block, choice, finite, widths, stop_ids, limit, *state)
            return torch.stack([length, accepted, count])

        return call

    return Case("accept_commit", f"{slots} slots, width {width}", make)


def _attention(count: int, keys: int) -> Case:
    """A verified block of one request, with SmolLM2's heads."""

    def make(device: str) -> Call:
        generator = torch.Generator().manual_seed(count)
        q, k, v = (
            torch.randn(shape, generator=generator).to(device)
            for shape in ((16, 9, 64), (1, 3, keys, 64), (1, 3, keys, 64))
        )
        bad = torch.zeros(1, keys, dtype=torch.bool, device=device)
        tiles = AttentionTiles.build((0,), (count,), 16, 3).to(torch.device(device))
        position = torch.arange(16, device=device) + keys - 16
        extent = _full(1, keys, torch.int64, device)
        return partial(block_attention, q, k, v, bad, tiles, position, extent, keys, causal=True)

    return Case("block_attention", f"{count} rows, {keys} keys", make, NOT_CPP)


def _random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(device)


def _append(rows: int) -> Case:
    """SmolLM2's heads of a block into the cache of one request."""

    def make(device: str) -> Call:
        x = torch.randn(rows, 15, 64, generator=torch.Generator().manual_seed(rows)).to(device)
        angle = torch.arange(rows, device=device)[:, None] * torch.ones(32, device=device)
        k, v = torch.zeros(2, 2, 3, 512, 64, device=device)
        bad = torch.zeros(2, 512, dtype=torch.bool, device=device)
        to = torch.arange(rows, device=device) + 100
        return partial(qk_rope_append, x, None, None, angle.cos(), angle.sin(), to, k, v, bad, 1e-5)

    return Case("qk_rope_append", f"{rows}x15x64", make, NOT_CPP)


def _rms_norm(rows: int, width: int) -> Case:
    def make(device: str) -> Call:
        return partial(rms_norm, _random(device, rows, width), torch.ones(width, device=device), 1e-5)

    return Case("rms_norm", f"{rows}x{width}", make, NOT_CPP)


def _residual_norm(rows: int, width: int) -> Case:
    def make(device: str) -> Call:
        x, y = _random(device, 2, rows, width)
        return lambda: residual_norm(x, y, torch.ones(width, device=device), 1e-5)[1]

    return Case("residual_norm", f"{rows}x{width}", make, NOT_CPP)


def _swiglu(rows: int, width: int) -> Case:
    return Case("swiglu", f"{rows}x{width}", lambda d: partial(swiglu, _random(d, rows, 2 * width)), NOT_CPP)


def _linear(rows: int, outputs: int, inputs: int) -> Case:
    def make(device: str) -> Call:
        return partial(PackedLinear(_random(device, outputs, inputs)), _random(device, rows, inputs))

    return Case("PackedLinear", f"{rows} rows, {outputs}x{inputs}", make, ("reference",))


def _tree(slots: int, depth: int, candidates: int, nodes: int) -> Case:
    def make(device: str) -> Call:
        score = -_random(device, slots, depth, candidates).abs().sort(-1).values
        deepest, budget = (_full(slots, value, torch.int64, device) for value in (depth, nodes))
        cost = _full(nodes, 1.0, torch.float32, device)  # all nodes are kept, but the rule is asked
        return lambda: torch.stack(draft_tree(score, deepest, budget, nodes, cost)[:3])

    return Case("draft_tree", f"{slots} slots, {nodes} nodes", make)


def _largest(rows: int, count: int) -> Case:
    def make(device: str) -> Call:
        return partial(largest, _random(device, rows, VOCAB), count)

    return Case("largest", f"{count} of {rows}x{VOCAB}", make, ("reference", "cpp"))


def _compact(slots: int, nodes: int) -> Case:
    """What trees of one step leave behind, over all of SmolLM2's layers."""

    def make(device: str) -> Call:
        k, v = (_random(device, 30, slots, 3, 512, 64) for _ in range(2))
        bad = torch.zeros(30, slots, 512, dtype=torch.bool, device=device)
        begin, count = (_full(slots, n, torch.int64, device) for n in (128, 4))
        source = torch.arange(nodes, device=device).mul(2).clamp(max=nodes - 1).expand(slots, -1).contiguous()

        def call() -> Tensor:
            kv_compact(k, v, bad, begin, source, count)
            return k[:, :, :, 128:132]

        return call

    return Case("kv_compact", f"{slots} slots, {nodes} nodes", make, NOT_CPP)


def _head(rows: int, ids: int) -> Case:
    """A drafter's head over the ids that it drafts, and the best of them in each row."""

    def make(device: str) -> Call:
        head, x = PackedLinear(_random(device, ids, 576)), _random(device, rows, 576)
        source, greedy = torch.arange(rows, device=device), _full(rows, 0.0, torch.float32, device)
        return lambda: head_choice(x, head, 1.0, None, None, source, greedy, None)[0]

    return Case("head_choice", f"{rows}x{ids}", make, NOT_CPP)


def _lookup(slots: int, columns: int) -> Case:
    def make(device: str) -> Call:
        known = torch.arange(slots * columns, device=device).view(slots, columns)
        length, drafts = (_full(slots, columns, torch.int64, device), known[:, :7].contiguous())
        return partial(prompt_lookup, known, length, drafts, 3, 8)

    return Case("prompt_lookup", f"{slots} of {columns}", make)


CASES = (
    _noise(philox, "philox", 16),
    *(_noise(gumbel_noise, "gumbel_noise", rows) for rows in (1, 16)),
    *(_choose(rows, kind) for kind in ("greedy", "sampled", "filtered") for rows in (1, 16)),
    *(_accept(slots, 8) for slots in (1, 8)),
    *(_attention(count, 512) for count in (1, 8)),
    _append(16),
    _rms_norm(16, 576),
    _residual_norm(16, 576),
    _swiglu(16, 1536),
    _linear(16, 1536, 576),
    _tree(8, 5, 16, 16),
    _largest(16, 16),
    _compact(8, 8),
    _head(16, 8192),
    _lookup(8, 1024),
)
