"""The chosen id of a row: greedy and drawn, against a slow model and at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from blockpilot_kernels import choose, dispatch
from tests.kernels.backends import Backend, Params, counting, reference_ids, rows_of, run
from tests.kernels.conftest import missing

INF, NAN = float("inf"), float("nan")


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
        expected = reference_ids(logits, drawn, params)
        ids, finite = backend.choose(logits, drawn, params)
        assert finite.tolist() == [r not in (3, 4, 5) for r in range(rows)]
        assert ids.tolist() == expected
        assert ids[3:6].tolist() == [0, 0, 0]


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
