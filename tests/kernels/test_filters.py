"""What top_k, top_p and min_p keep, against sorting in float64 and between backends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from blockpilot_kernels import dispatch
from tests.kernels.backends import Backend, Params, counting, reference_ids, rows_of, run
from tests.kernels.conftest import missing

KEPT_NOISE = 50.0  # lifts an id above every other if, and only if, the filters keep it

logits_lists = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=24)


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
    Row([-1e-30, -2e-30, 1e-30, 5e-31], top_k=3),
]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_filters_keep_what_sorting_keeps_at_the_edges(backend: Backend, row: Row) -> None:
    assert kept_by(backend, row) == kept_ids(row)[0]


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_large_vocabularies_agree(quick_backend: Backend, spread: float) -> None:
    """Flat and peaked rows with many ties, and filters that keep from one id to nearly all of them.

    The noise turns the order round, the highest id first among equals: the last id that is kept wins. Two
    backends' exp differ in the last bit, which may move the end of top_p by one id; and up to 4 neighbours share
    a float32 score, of which the first is taken.
    """
    rows, vocab = 24, 20_001
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(8)) * spread
    logits = (logits * 64).round() / 64
    z = (logits - logits.amax(-1, keepdim=True)) / 0.9
    noise = -2 * z + torch.arange(vocab) / vocab / 100
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
        expected = torch.tensor(reference_ids(logits, noise, params))
        place = logits.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        apart = place.gather(1, ids[:, None]) - place.gather(1, expected[:, None])
        assert apart.abs().max() <= (8 if isinstance(params.top_p, Tensor) else 0)


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
