"""One call a pass: a row's bits are its own, and what is absent is not touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.packed_decoder import context_append, decoder_forward
from tests.kernels.packed import (
    CAPACITY,
    DIM,
    FEATURES,
    HIDDEN,
    LAYERS,
    ROWS,
    SLOTS,
    VOCAB,
    arguments,
    context_arguments,
    empty_cache,
    instruction_sets,
    rope,
    same,
    small_decoder,
    threads,
)

if dispatch.extension_error() is not None:
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)

N = ROWS
KINDS = [
    ("F32", "none", torch.float32),
    ("BF16", "bfloat16", torch.bfloat16),
    ("Q8_0", "none", torch.float32),
    ("Q4_0", "int8", torch.float32),
    ("Q4_1", "int16", torch.float32),
    ("Q4_1", "bfloat16", torch.bfloat16),
]
NAN = float("nan")


@pytest.fixture(params=instruction_sets()[0])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLOCKPILOT_ISA", request.param)
    return request.param


def op_arguments(given: dict[str, Any]) -> tuple[Any, ...]:
    """The same as the op itself takes them."""
    flat = {**given, "rope": None, "rows": None}
    order = ("weights", "plan", "scalars", "keys", "values", "rope", "tokens", "rows", "extent")
    parts = [given[name] if flat[name] is None else (flat[name],) for name in order]
    return (*(x for part in parts for x in part), list(given["feature_layers"]), given["head_rows"])


def run_rows(decoder: dict[str, Any], cache: tuple[Tensor, Tensor], chosen: list[int], tokens: Tensor) -> Any:
    """Logits and features of the rows (slot 1, position i) for i in `chosen`, in one pass."""
    n = len(chosen)
    position = torch.tensor(chosen)
    rows = (torch.ones(n, dtype=torch.long), position, torch.ones(n, dtype=torch.bool))
    extent = torch.full((SLOTS,), max(chosen) + 1)
    return decoder_forward(
        **decoder,
        keys=cache[0],
        values=cache[1],
        rope=rope(),
        tokens=tokens[position],
        rows=rows,
        extent=extent,
        feature_layers=(0, 1, LAYERS),
        head_rows=torch.arange(n),
    )


@pytest.mark.parametrize(("kind", "rounding", "dtype"), KINDS)
def test_a_pass_over_many_rows_is_many_passes(isa, kind, rounding, dtype):
    """Logits, features and the cache, in chunks of every size, at any number of threads."""
    decoder, tokens = small_decoder(kind, rounding), torch.arange(CAPACITY) * 5 % VOCAB
    alone = empty_cache(dtype)
    expected = [run_rows(decoder, alone, [i], tokens) for i in range(CAPACITY)]
    logits, features = (torch.cat(parts) for parts in zip(*expected, strict=True))
    assert torch.isfinite(logits).all()
    for chunk in (2, 3, 5, 9, 17, CAPACITY):
        for count in (1, 3):
            cache, found = empty_cache(dtype), []
            with threads(count):
                for start in range(0, CAPACITY, chunk):
                    at = list(range(start, min(start + chunk, CAPACITY)))
                    found.append(run_rows(decoder, cache, at, tokens))
            assert torch.equal(torch.cat([f[0] for f in found]), logits), (chunk, count)
            assert torch.equal(torch.cat([f[1] for f in found]), features), (chunk, count)
            assert same(cache[0], alone[0]) and same(cache[1], alone[1])


@pytest.mark.parametrize(("kind", "rounding", "dtype"), KINDS)
def test_other_slots_do_not_matter(isa, kind, rounding, dtype):
    """Rows among those of a slot whose keys and values are NaN, in mixed order."""
    decoder = small_decoder(kind, rounding)
    keys, values = empty_cache(dtype)
    whole = arguments(**decoder, keys=keys, values=values)
    logits, features = decoder_forward(**whole)
    mixed_keys, mixed_values = empty_cache(dtype)
    slot = torch.tensor([0, 1] * N)
    position = torch.stack([torch.arange(N) + 9, torch.arange(N)], 1).flatten()
    mixed = {
        **whole,
        "keys": mixed_keys,
        "values": mixed_values,
        "tokens": torch.stack([torch.arange(N), whole["tokens"]], 1).flatten(),
        "rows": (slot, position, torch.ones(2 * N, dtype=torch.bool)),
        "extent": torch.tensor([9 + N, N, 1]),
        "head_rows": torch.arange(2 * N),
    }
    both, states = decoder_forward(**mixed)
    assert torch.isfinite(logits).all() and not torch.isfinite(both[::2]).any()
    assert torch.equal(both[1::2], logits) and torch.equal(states[1::2], features)
    assert same(mixed_keys[:, 1], keys[:, 1]) and same(mixed_values[:, 1], values[:, 1])


def test_absent_rows_are_not_looked_at():
    """Zeros come back, nothing is written, and whatever their slot, position and token say is no error."""
    full = arguments()
    logits, features = decoder_forward(**full)
    exists = torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.bool)
    slot, position, tokens = (
        torch.ones(N, dtype=torch.long),
        torch.tensor([0, 99, 1, 2, -5, 3]),
        full["tokens"],
    )
    slot[4], tokens = 77, tokens[torch.tensor([0, 0, 1, 2, 0, 0])].clone()
    tokens[1] = -1
    extent = torch.full((SLOTS,), 3)
    some = arguments(rows=(slot, position, exists), tokens=tokens, extent=extent)
    got, states = decoder_forward(**some)
    assert not got[~exists].any() and not states[~exists].any()
    assert torch.equal(got[exists], logits[:3]) and torch.equal(states[exists], features[:3])
    for name in ("keys", "values"):
        written = torch.isfinite(some[name]).flatten(3).any(-1)
        assert written[:, 1].all() and not written[:, [0, 2]].any()
    assert not torch.isfinite(some["values"][:, 1, :, 3:, :DIM]).any()


def test_any_rows_of_the_head_and_any_features():
    logits, features = decoder_forward(**arguments())
    asked = torch.tensor([5, 0, 0, 3])
    some, states = decoder_forward(**arguments(head_rows=asked, feature_layers=(LAYERS, 0, LAYERS)))
    first, _, last = features.split(HIDDEN, -1)
    assert torch.equal(some, logits[asked]) and torch.equal(states, torch.cat([last, first, last], -1))
    none, states = decoder_forward(**arguments(head_rows=asked[:0], feature_layers=()))
    assert (none.shape, states.shape) == ((0, VOCAB), (N, 0))


def test_scalars():
    decoder = small_decoder()
    logits, features = decoder_forward(**arguments())
    doubled, _ = decoder_forward(**arguments(scalars=[1e-5, 1.0, 2.0]))
    _, scaled = decoder_forward(**arguments(scalars=[1e-5, 0.5, 1.0]))
    assert torch.equal(doubled, 2 * logits)
    assert torch.equal(scaled[:, :HIDDEN], features[:, :HIDDEN] / 2)
    assert not torch.equal(decoder_forward(**arguments(scalars=[0.5, 1.0, 1.0]))[0], logits)
    assert decoder["scalars"] == [1e-5, 1.0, 1.0]


def test_context_rows_are_their_own(isa):
    """All at once, one by one, beside NaN, at any number of threads; absent ones write nothing."""
    whole = context_arguments()
    context_append(**whole)
    assert int(torch.isfinite(whole["values"][..., :DIM]).all(-1).sum()) == LAYERS * 2 * N
    slot, position, _ = whole["rows"]
    for count in (1, 3):
        single = context_arguments()
        with threads(count):
            for i in range(N):
                features = torch.full((N, FEATURES), NAN)
                features[2] = whole["features"][i]
                place = torch.where(torch.arange(N) == 2, position[i], 99)
                only = {"features": features, "rows": (slot, place, torch.arange(N) == 2)}
                context_append(**{**single, **only})
        assert same(single["keys"], whole["keys"]) and same(single["values"], whole["values"])


def test_opcheck():
    ops, given, context = torch.ops.blockpilot, arguments(), context_arguments()
    torch.library.opcheck(ops.decoder_forward.default, op_arguments(given))
    parts = (context["weights"], context["plan"], context["eps"], context["keys"], context["values"])
    rest = (*context["rope"], context["features"], *context["rows"])
    torch.library.opcheck(ops.context_append.default, (*parts, *rest))
