"""Head and choice in one: what the logits say, whatever the rows beside them and whichever part of the ids there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blockpilot_kernels.head_choice import head_choice
from blockpilot_kernels.tiled_linear import PackedLinear
from tests.kernels.backends import Backend
from tests.kernels.conftest import forced_backend

VOCAB = 150


@pytest.fixture(params=["reference", "triton"])
def op(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that has the op by itself."""
    yield from forced_backend(request.param)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(
    op: Backend,
    hidden: Tensor,
    weight: Tensor,
    noise: Tensor | None = None,
    temperature: Tensor | None = None,
    *,
    ids: Tensor | None = None,
    source: Tensor | None = None,
    banned: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[int], list[bool]]:
    rows = len(hidden)
    source = torch.arange(rows) % 7 if source is None else source
    temperature = torch.zeros(rows) if temperature is None else temperature
    head = PackedLinear(op.put(weight), None, dtype)
    given = [op.put(t) for t in (ids, noise, source, temperature, banned)]
    chosen, finite = head_choice(op.put(hidden), head, scale, *given)
    assert chosen.dtype == torch.int64 and finite.dtype == torch.bool
    return chosen.tolist(), finite.tolist()


def best(
    hidden: Tensor, weight: Tensor, ids: Tensor, noise, source, temperature, banned, scale: float
) -> list[int]:
    """float64, row by row."""
    found = []
    for m, row in enumerate(hidden.double()):
        score = weight.double() @ row * scale
        if noise is not None and temperature[m] > 0:
            score = score / float(temperature[m]) + noise[source[m]][ids].double()
        for i in [] if banned is None else banned[m].tolist():
            score[ids == i] = -torch.inf
        found.append(int(ids[score.argmax()]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(16, 9), (80, 70)])
def test_matches_float64(op, rows, size, sampled, listed, dtype, poisoned):
    if dtype == torch.bfloat16 and op.name == "reference":
        pytest.skip("reference: PyTorch's product in bfloat16 rounds what it returns, so that logits tie")
    ids = torch.arange(1, VOCAB, 2) if listed else torch.arange(VOCAB)
    hidden, weight = (drawn(n, size, seed=n).to(dtype).float() for n in (rows, len(ids)))
    noise = drawn(7, VOCAB, seed=5) * 3 if sampled else None
    temperature = torch.tensor([0.0, 0.7, 2.0, 1e-5]).repeat(rows // 4)
    source = torch.randint(0, 7, (rows,), generator=torch.Generator().manual_seed(1))
    banned = torch.randint(-1, VOCAB, (rows, 3), generator=torch.Generator().manual_seed(2))
    banned[:, 1] = torch.tensor(best(hidden, weight, ids, noise, source, temperature, None, 0.5))
    for bans in (None, banned):
        expected = best(hidden, weight, ids, noise, source, temperature, bans, 0.5)
        options = {"ids": ids if listed else None, "source": source, "banned": bans, "scale": 0.5}
        got = call(op, hidden, weight, noise, temperature, dtype=dtype, **options)
        assert got == (expected, [True] * rows)


@pytest.mark.parametrize("listed", [False, True])
def test_the_lowest_id_wins_a_tie(op, listed):
    """In one tile and across tiles; −0 and 0 are equal."""
    weight = torch.zeros(VOCAB, 4)
    weight[[70, 9, 140]] = 1.0
    ids = torch.arange(VOCAB) * 2 if listed else None
    hidden = torch.ones(16, 4)
    hidden[1], hidden[2] = -1.0, 0.0
    chosen, _ = call(op, hidden, weight, ids=ids)
    assert chosen[:3] == ([18, 0, 0] if listed else [9, 0, 0])
    banned = torch.full((16, 1), 18 if listed else 9)
    assert call(op, hidden, weight, ids=ids, banned=banned)[0][0] == (140 if listed else 70)


def test_a_row_that_is_not_finite_is_marked_and_harms_no_other(op):
    hidden, weight = drawn(16, 8), drawn(VOCAB, 8, seed=1)
    clean, _ = call(op, hidden, weight)
    hidden[3, 2], hidden[5, 1] = float("nan"), float("inf")
    for ids in (None, torch.arange(VOCAB) + 7):
        chosen, finite = call(op, hidden, weight, ids=ids)
        first = 0 if ids is None else 7
        assert [i for i, ok in enumerate(finite) if not ok] == [3, 5]
        assert chosen == [first if i in (3, 5) else first + c for i, c in enumerate(clean)]


def test_row_is_independent_of_place_and_neighbours(op):
    """By the choice between two scores that differ by one rounding."""
    row, weight = drawn(1, 70), drawn(VOCAB, 70, seed=1)
    alone, _ = call(op, row.expand(16, -1).contiguous(), weight)
    for rows, i in ((16, 3), (80, 79), (80, 64)):
        hidden = torch.full((rows, 70), float("nan"))
        hidden[i] = row[0]
        chosen, finite = call(op, hidden, weight)
        assert chosen[i] == alone[0] and finite == [j == i for j in range(rows)]


def test_refusals_name_what_came(op):
    hidden, weight = drawn(16, 8), drawn(VOCAB, 8, seed=1)
    with pytest.raises(ValueError, match=r"hidden: expected float32 \[16, 8\].*got float32 \[9, 8\]"):
        call(op, hidden[:9], weight)
    with pytest.raises(ValueError, match=r"noise: expected float32 \[7, 150\].*got float32 \[7, 149\]"):
        call(op, hidden, weight, drawn(7, VOCAB - 1))
    with pytest.raises(ValueError, match=r"ids: expected int64 \[150\].*got int64 \[149\]"):
        call(op, hidden, weight, ids=torch.arange(VOCAB - 1))
    with pytest.raises(ValueError, match=r"banned: expected int64 \[16, 1\].*got int64 \[4, 1\]"):
        call(op, hidden, weight, banned=torch.zeros(4, 1, dtype=torch.long))
