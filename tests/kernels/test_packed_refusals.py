"""Bad plans, shapes, ids and positions are refused, and a refused call has written nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.packed_decoder import context_append, decoder_forward
from tests.kernels.packed import (
    CAPACITY,
    FEATURES,
    LAYERS,
    ROWS,
    SLOTS,
    arguments,
    context_arguments,
    empty_cache,
    same,
)

if dispatch.extension_error() is not None:
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)

N = ROWS


def bad_rows(which: int, value: int) -> dict[str, Any]:
    rows = arguments()["rows"]
    rows[which][2] = value
    return {"rows": rows}


def bad_values() -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, changed arguments, message)."""
    a = arguments()
    keys, values = a["keys"], a["values"]
    cos, sin = a["rope"]
    slot, position, exists = a["rows"]
    yield "no weights", {"weights": []}, "weights: expected at least one"
    yield "float weights", {"weights": [torch.zeros(9)]}, "weights: expected Byte"
    yield "weights apart", {"weights": [a["weights"][0].repeat(2)[::2]]}, "weights: expected contiguous"
    yield "weights off by one", {"weights": [a["weights"][0].roll(1)[1:]]}, "weights: .* multiple of 4 bytes"
    yield "weights cut", {"weights": [a["weights"][0][:-64]]}, "plan: expected .* bytes"
    yield "plan of another dtype", {"plan": a["plan"].int()}, "plan: expected Long"
    yield "plan of two dimensions", {"plan": a["plan"][None]}, "plan: expected 1 dimension"
    yield "two scalars", {"scalars": [1.0, 1.0]}, "scalars: expected"
    yield "keys of values", {"keys": values}, "expected 6 and 5 dimensions"
    yield "float64 keys", {"keys": keys.double()}, "keys: expected float32 or bfloat16"
    yield "other values", {"values": values.bfloat16()}, "values: expected Float"
    yield "keys of one layer", {"keys": keys[:1].contiguous()}, "keys: expected shape"
    yield "short values", {"values": values[:, :, :, :16].contiguous()}, "values: expected shape"
    yield "strided values", {"values": values.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous"
    path = position[:, None]
    yield "flat path", {"path": position}, "path: expected .* depths"
    yield "path of another length", {"path": path[1:]}, "path: expected shape"
    yield "int32 path", {"path": path.int()}, "path: expected Long"
    yield (
        "path from behind",
        {"path": path + 1},
        "path: expected an anchor at most 0 before position 0, got 1",
    )
    yield "path too short", {"path": torch.zeros_like(path)}, "path: expected an anchor at most 0 before"
    deep = torch.zeros(N, N, dtype=torch.long)
    yield "path that stays", {"path": deep}, "path: expected rising places, got 0 before 0"
    yield (
        "path beyond the extent",
        {"path": deep + torch.arange(N) * 2},
        "path: expected places below the extent",
    )
    yield "flat cos", {"rope": (cos.flatten(), sin)}, "cos: expected shape"
    yield "wide sin", {"rope": (cos, torch.cat([sin, sin], -1))}, "sin: expected shape"
    yield "float64 cos", {"rope": (cos.double(), sin)}, "cos: expected Float"
    yield "few tokens", {"tokens": a["tokens"][:-1]}, "tokens: expected shape"
    yield "int32 tokens", {"tokens": a["tokens"].int()}, "tokens: expected Long"
    yield "token below", {"tokens": a["tokens"] - 4}, "tokens: expected 0 … 48, got -1"
    yield "token above", {"tokens": a["tokens"] + 11}, "tokens: expected 0 … 48, got 49"
    yield "few positions", {"rows": (slot, position[:-1], exists)}, "position: expected shape"
    yield "int exists", {"rows": (slot, position, exists.long())}, "exists: expected Bool"
    yield "int32 slots", {"rows": (slot.int(), position, exists)}, "slot: expected Long"
    yield "slot below", bad_rows(0, -1), "slot: expected 0 … 2, got -1"
    yield "slot above", bad_rows(0, SLOTS), "slot: expected 0 … 2, got 3"
    yield "position below", bad_rows(1, -1), "position: expected 0 … 31, got -1"
    yield "position above", bad_rows(1, CAPACITY), "position: expected 0 … 31, got 32"
    yield "beyond the rope", {"rope": (cos[:5], sin[:5])}, "position: expected 0 … 4, got 5"
    yield "extent below", {"extent": torch.full((SLOTS,), N - 1)}, "extent: expected 6 … 32, got 5"
    yield "extent above", {"extent": torch.full((SLOTS,), CAPACITY + 1)}, "extent: expected 1 … 32, got 33"
    yield "extent of rows", {"extent": torch.full((N,), N)}, "extent: expected shape"
    yield "head row below", {"head_rows": torch.tensor([0, -1])}, "head_rows: expected 0 … 5, got -1"
    yield "head row above", {"head_rows": torch.tensor([N])}, "head_rows: expected 0 … 5, got 6"
    yield "float head rows", {"head_rows": torch.zeros(1)}, "head_rows: expected Long"
    yield "feature below", {"feature_layers": (-1,)}, "feature_layers: expected 0 … 2, got -1"
    yield "feature above", {"feature_layers": (0, LAYERS + 1)}, "feature_layers: expected 0 … 2, got 3"


REFUSED = list(bad_values())


@pytest.mark.parametrize(("name", "over", "message"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_bad_arguments_are_refused(name, over, message):
    given = arguments(**over)
    before = given["keys"].clone(), given["values"].clone()
    with pytest.raises(ValueError, match=message):
        decoder_forward(**given)
    if given["keys"].dtype == torch.float32:
        assert same(given["keys"], before[0]) and same(given["values"], before[1])


def test_every_word_of_a_plan_is_checked():
    """Cut anywhere, one word too long, or any word out of range: refused before anything is written."""
    for name, call, given in (
        ("decoder", decoder_forward, arguments()),
        ("context", context_append, context_arguments()),
    ):
        plan, before = given["plan"], given["keys"].clone()
        plans = [plan[:n] for n in range(len(plan))] + [torch.cat([plan, plan[:1]])]
        for at in range(len(plan)):
            for value in (-2, 1 << 62):
                if value > 0 and name == "decoder" and at in windows(plan):
                    continue  # a window may be as wide as it likes
                plans.append(torch.where(torch.arange(len(plan)) == at, value, plan))
        for changed in plans:
            with pytest.raises(ValueError, match="plan: "):
                call(**{**given, "plan": changed})
        assert same(given["keys"], before)
        call(**given)


def windows(plan: Tensor) -> list[int]:
    """Where a decoder's plan holds its layers' windows: before `causal`, which ends a layer."""
    layer = 4 * 6 + 4 + 2
    return [len(plan) - layer * i - 2 for i in range(LAYERS)]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"features": torch.zeros(N, FEATURES - 1)}, "features: expected shape"),
        ({"features": torch.zeros(N - 1, FEATURES)}, "features: expected shape"),
        ({"features": torch.zeros(N, FEATURES).double()}, "features: expected Float"),
        (bad_rows(0, SLOTS), "slot: expected 0 … 2, got 3"),
        (bad_rows(1, CAPACITY), "position: expected 0 … 31, got 32"),
        ({"values": empty_cache(torch.bfloat16)[1]}, "values: expected Float"),
    ],
)
def test_bad_context_is_refused(over, message):
    with pytest.raises(ValueError, match=message):
        context_append(**context_arguments(**over))
