"""The chosen id of a row: greedy, drawn and filtered, against a slow model and at the edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from blockpilot_kernels import choose, dispatch
from tests.kernels.backends import Backend, Params, counting, rows_of
from tests.kernels.conftest import missing

INF, NAN = float("inf"), float("nan")
KEPT_NOISE = 50.0  # lifts an id above every other if, and only if, the filters keep it


@dataclass(frozen=True)
class Row:
    """One row with its parameters."""

    logits: list[float]
    noise: list[float] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    banned: tuple[int, ...] = ()


def kept_ids(row: Row) -> tuple[list[int], float]:
    """What the filters keep, by sorting in float64, and how far the nearest decision was from turning."""
    x = np.array(row.logits, dtype=np.float64)
    allowed = [i for i in range(len(x)) if i not in row.banned]
    best = max(x[i] for i in allowed)
    relative = np.exp((x - best) / np.float64(np.float32(row.temperature)))
    order = sorted(allowed, key=lambda i: (-x[i], i))
    if row.top_k > 0:
        order = order[: row.top_k]
    margin = 1.0
    if row.top_p < 1.0:
        share = np.cumsum(relative[order]) / relative[order].sum()
        before = np.concatenate([[0.0], share[:-1]])
        margin = min(margin, np.abs(before[1:] - row.top_p).min(initial=1.0))
        order = [i for i, mass in zip(order, before, strict=True) if mass < row.top_p]
    if row.min_p > 0.0:
        margin = min(margin, min(abs(relative[i] - row.min_p) for i in order))
        order = [i for i in order if relative[i] >= row.min_p]
    return sorted(order), margin


def kept_by(backend: Backend, row: Row) -> list[int]:
    """The ids that a backend keeps, found by lifting each of them in turn with noise."""
    vocab = len(row.logits)
    params = Params(row.temperature, row.top_k, row.top_p, row.min_p, list(row.banned))
    z = (np.array(row.logits) - max(row.logits)) / row.temperature
    lift = torch.eye(vocab) * (KEPT_NOISE - float(z.min()))
    ids, finite = backend.choose(rows_of(row.logits, vocab), lift, params)
    assert finite.all()
    return [i for i in range(vocab) if ids[i] == i]


def run(
    backend: Backend, logits: Tensor, noise: Tensor | None, params: Params, filtered: bool = True
) -> list[int]:
    return backend.choose(logits, noise, params, filtered)[0].tolist()


logits_lists = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=24)


@given(
    logits=logits_lists,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 26),
    top_p=st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.29, 0.6]),
    banned=st.lists(st.integers(0, 23), max_size=3),
)
@pytest.mark.parametrize("name", ["reference", "cpp"])
def test_filters_keep_what_sorting_keeps(name, logits, temperature, top_k, top_p, min_p, banned) -> None:
    if missing(name):
        pytest.skip(f"{name}: {missing(name)}")
    row = Row(logits, None, temperature, top_k, top_p, min_p, tuple(banned))
    assume(any(i not in banned for i in range(len(logits))))
    kept, margin = kept_ids(row)
    assume(margin > 1e-5)
    with dispatch.forced(name):
        assert kept_by(Backend(name, torch.device("cpu")), row) == kept


ROWS = [
    Row([0.5, 0.25, 2.0, 2.0, -1.0, 2.0, 1.0], top_k=2),
    Row([0.5, 0.25, 2.0, 2.0, -1.0, 2.0, 1.0], top_p=0.5),
    Row([0.5, 0.25, 2.0, 2.0, -1.0, 2.0, 1.0], top_k=4, top_p=0.7, min_p=0.3, banned=(3,)),
    Row([1.0] * 9, top_p=0.5),
    Row([1.0] * 9, top_k=5, banned=(0, 4)),
    Row([-0.0, 0.0, -0.0, 0.0], top_k=3),
    Row([3.0, 1.0], top_k=40, top_p=0.1),
    Row([3.0e38, -3.0e38, 2.9e38], temperature=1e-5, top_p=0.9),
    Row([-1e-30, -2e-30, 1e-30, 5e-31], top_k=3),
]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_filters_keep_what_sorting_keeps_at_the_edges(backend: Backend, row: Row) -> None:
    if row.temperature == 1e-5:  # no noise can lift the others: only the first is kept or drawn
        noise = torch.zeros(1, 3)
        params = Params(row.temperature, row.top_k, row.top_p, row.min_p)
        assert run(backend, rows_of(row.logits, 1), noise, params) == [0]
        return
    assert kept_by(backend, row) == kept_ids(row)[0]


@given(data=st.data(), vocab=st.integers(1, 40), temperature=st.sampled_from([1e-5, 0.3, 1.0, 5.0]))
@pytest.mark.parametrize("name", ["reference", "cpp"])
def test_draw_is_the_argmax_of_scaled_logits_plus_noise(name, data, vocab, temperature) -> None:
    if missing(name):
        pytest.skip(f"{name}: {missing(name)}")
    grid = st.integers(-80, 80).map(lambda n: n / 16)
    logits = data.draw(st.lists(grid, min_size=vocab, max_size=vocab))
    noise = data.draw(st.lists(grid, min_size=vocab, max_size=vocab))
    score = (np.array(logits) - max(logits)) / np.float64(np.float32(temperature)) + np.array(noise)
    near = np.flatnonzero(score >= score.max() - 1e-4)
    assume(len(near) == 1)
    with dispatch.forced(name):
        backend = Backend(name, torch.device("cpu"))
        params = Params(temperature)
        got = [run(backend, rows_of(logits, 1), torch.tensor([noise]), params, f)[0] for f in (False, True)]
    assert got == [near[0]] * 2


@pytest.mark.parametrize("vocab", [1, 2, 3, 97, 300, 1000])
def test_backends_agree(backend: Backend, vocab: int) -> None:
    """Rows with ties, every filter, greedy neighbours, banned ids, NaN and infinity: the same ids as the
    reference."""
    rows = 20
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 8).round() / 4
    logits[3, vocab // 2], logits[4, 0], logits[5, -1] = NAN, INF, -INF
    noise = backend.noise(counting(rows), counting(rows, 90), vocab)
    kind = torch.arange(rows)
    params = Params(
        torch.where(kind % 5 == 0, 0.0, 0.4 + kind / 20),
        torch.where(kind % 3 == 0, kind, 0),
        torch.where(kind % 2 == 0, 0.83, 1.0),
        torch.where(kind % 4 == 0, 0.04, 0.0),
        [-1, vocab // 3, vocab + 5],
    )
    for drawn in (None, noise):
        expected = choose_by_reference(logits, drawn, params)
        ids, finite = backend.choose(logits, drawn, params)
        assert finite.tolist() == [r not in (3, 4, 5) for r in range(rows)]
        assert ids.tolist() == expected
        assert ids[3:6].tolist() == [0, 0, 0]


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_large_vocabularies_agree(quick_backend: Backend, spread: float) -> None:
    """Flat and peaked rows with many ties, and filters that keep from one id to nearly all of them."""
    rows, vocab = 24, 20_001
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(8)) * spread
    logits = (logits * 64).round() / 64
    noise = quick_backend.noise(counting(rows), counting(rows), vocab)
    kind = torch.arange(rows)
    shares = torch.tensor([0.001, 0.3, 0.9, 0.999, 1.0, 1.0])
    for params in (
        Params(0.9, top_p=shares[kind % 6]),
        Params(0.9, top_k=torch.tensor([1, 50, 311, 5000, vocab - 1, vocab])[kind % 6], min_p=0.001),
        Params(
            0.9, top_k=torch.tensor([40, 3000, 0])[kind % 3], top_p=shares[kind % 6], banned=[0, vocab - 1]
        ),
    ):
        ids, _ = quick_backend.choose(logits, noise, params)
        assert ids.tolist() == choose_by_reference(logits, noise, params)


def choose_by_reference(logits: Tensor, noise: Tensor | None, params: Params) -> list[int]:
    with dispatch.forced("reference"):
        return choose(logits, noise, *params.tensors(logits.shape[0]), filtered=True)[0].tolist()


def test_ties_go_to_the_lowest_id(backend: Backend) -> None:
    for vocab in (2, 64, 97, 300):
        logits = torch.zeros(vocab, vocab).triu_()  # row r: id r and all above it share the maximum
        logits += torch.triu(torch.ones(vocab, vocab))
        every = list(range(vocab))
        assert run(backend, logits, None, Params(0.0), False) == every
        if vocab <= 97:
            assert run(backend, logits, torch.zeros(vocab, vocab), Params(0.5), False) == every


def test_minus_zero_equals_zero(backend: Backend) -> None:
    logits = torch.tensor([[-0.0, 0.0], [0.0, -0.0]])
    assert run(backend, logits, None, Params(0.0)) == [0, 0]
    assert run(backend, logits, torch.zeros(2, 2), Params(1.0, top_k=1)) == [0, 0]


def test_greedy_ignores_noise_and_filters(backend: Backend) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]]).repeat(2, 1)
    noise = torch.tensor([[900.0, 0.0, 0.0, 0.0]]).repeat(2, 1)
    params = Params([0.0, 1.0], [1, 0], [0.01, 1.0], [0.9, 0.0])
    assert run(backend, logits, noise, params) == [2, 0]
    assert run(backend, logits, None, Params(1.0)) == [2, 2]


def test_coldest_temperature_is_greedy_without_overflow(backend: Backend) -> None:
    logits = torch.tensor([[1e30, -1e30, 9e29], [0.0, 1e-3, -3.4e38], [3.4e38, -3.4e38, 0.0]])
    noise = backend.noise(counting(3), counting(3), 3)
    for params in (Params(1e-5), Params(1e-5, top_k=2, top_p=0.99, min_p=1e-6)):
        assert run(backend, logits, noise, params) == [0, 1, 0]


def test_rows_that_are_not_finite(backend: Backend) -> None:
    logits = torch.zeros(6, 97)
    logits[:, 50] = 4.0
    for row, (at, value) in enumerate([(0, NAN), (96, NAN), (50, INF), (3, -INF)]):
        logits[row, at] = value
    logits[4] = NAN
    noise = torch.zeros(6, 97)
    for drawn, params in ((None, Params(0.0)), (noise, Params()), (noise, Params(top_k=3, top_p=0.9))):
        ids, finite = backend.choose(logits, drawn, params)
        assert finite.tolist() == [False] * 5 + [True]
        assert ids.tolist() == [0] * 5 + [50]


def test_banned_ids_are_never_chosen_and_count_in_no_filter(backend: Backend) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 2.0]]).repeat(4, 1)
    banned = [[0, -1, -1], [0, 1, 0], [-7, 99, 5], [2, 3, 4]]
    assert run(backend, logits, None, Params(0.0, banned=banned)) == [1, 2, 0, 0]
    lift = torch.zeros(4, 5)
    lift[:, 0] = 100.0
    lift[:, 3] = 50.0
    # top_k = 2 of what is left: ids 1, 2 | 2, 3 | 0, 1 | 0, 1.
    assert run(backend, logits, lift, Params(top_k=2, banned=banned)) == [1, 3, 0, 0]
    # Once id 0 is banned, id 1 has 0.61 of the mass (e⁰ of e⁰ + e⁻¹ + 2e⁻²): enough for top_p = 0.6.
    assert run(backend, logits[:1], lift[:1], Params(top_p=0.6, banned=banned[:1])) == [1]
    assert run(backend, logits[:1], lift[:1], Params(min_p=0.5, banned=banned[:1])) == [1]


def test_a_ban_does_not_hide_that_a_row_is_not_finite(backend: Backend) -> None:
    _, finite = backend.choose(torch.tensor([[NAN, 1.0]]), None, Params(0.0, banned=[0]))
    assert finite.tolist() == [False]


def test_everything_banned_gives_id_zero(backend: Backend) -> None:
    logits, noise = torch.ones(1, 3), torch.zeros(1, 3)
    for drawn, params in (
        (None, Params(0.0, banned=[2, 1, 0])),
        (noise, Params(top_p=0.5, banned=[0, 1, 2])),
    ):
        ids, finite = backend.choose(logits, drawn, params)
        assert (ids.tolist(), finite.tolist()) == ([0], [True])


def test_at_least_one_id_survives_every_filter(backend: Backend) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    noise = torch.tensor([[90.0, 0.0, 90.0]])
    for params in (Params(top_p=0.0), Params(top_k=1), Params(min_p=1.0), Params(top_p=1e-9, min_p=2.0)):
        assert run(backend, logits, noise, params) == [1]


def test_unfiltered_equals_filters_that_are_off(backend: Backend) -> None:
    vocab, rows = 97, 8
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab, generator=generator)
    noise = backend.noise(counting(rows), counting(rows), vocab)
    for params in (Params(0.7), Params(0.7, top_k=vocab), Params(0.7, top_k=vocab + 9, top_p=1.0)):
        assert run(backend, logits, noise, params, True) == run(backend, logits, noise, Params(0.7), False)


def test_strided_inputs(backend: Backend) -> None:
    wide = torch.randn(4, 60, generator=torch.Generator().manual_seed(0))
    noise = backend.noise(counting(4), counting(4), 60)
    params = Params(0.8, top_k=5, top_p=0.9)
    dense = run(backend, wide[:, ::2].contiguous(), noise[:, ::2].contiguous(), params)
    assert run(backend, wide[:, ::2], noise[:, ::2], params) == dense


def test_no_rows(backend: Backend) -> None:
    ids, finite = backend.choose(torch.zeros(0, 5), torch.zeros(0, 5), Params())
    assert ids.shape == finite.shape == (0,)
    assert ids.dtype == torch.int64
    assert finite.dtype == torch.bool


def test_mistakes_are_named() -> None:
    logits, noise = torch.zeros(2, 5), torch.zeros(2, 5)
    good = Params(banned=[1]).tensors(2)

    def call(logits: Tensor = logits, noise: Tensor | None = noise, **changed: Tensor) -> None:
        names = ("temperature", "top_k", "top_p", "min_p", "banned")
        given = [changed.get(name, value) for name, value in zip(names, good, strict=True)]
        choose(logits, noise, *given, filtered=True)

    call()
    with pytest.raises(ValueError, match=r"logits: expected float32 .*got float64"):
        call(logits=logits.double())
    with pytest.raises(ValueError, match=r"logits: expected 2 dimensions"):
        call(logits=logits[0])
    with pytest.raises(ValueError, match=r"noise: expected float32 \[2, 5\].*got float32 \[2, 4\]"):
        call(noise=noise[:, :4])
    with pytest.raises(ValueError, match=r"top_k: expected int64 .*got float32"):
        call(top_k=torch.zeros(2))
    with pytest.raises(ValueError, match=r"banned: expected int64 \[2, 1\].*got int64 \[3, 1\]"):
        call(banned=torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="ids a row, got 0"):
        call(logits=torch.zeros(2, 0))
    with pytest.raises(ValueError, match=r"noise: expected .* on cpu, got .* on meta"):
        call(noise=noise.to("meta"))
