"""A row's choice depends on nothing but the row: not on neighbours, their number, alignment or threads.

Ids alone would hide a changed bit, so the rows here are built to show it: every score z + g of a row is equal
but for rounding, and the winner is decided by the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.backends import Backend, Params, counting

PARAMS = {
    "plain": Params(0.83),
    "filters": Params(0.83, top_k=60, top_p=0.97, min_p=1e-4),
    "top_p": Params(0.83, top_p=0.9),
}


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def close_row(vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """[V] logits and [V] noise whose scores at temperature 0.83 differ by rounding errors only."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    z = (logits.double() - logits.double().max()) / 0.83
    return logits, (4.0 - z).float()


def test_close_rows_are_decided_by_the_last_bits() -> None:
    """The construction works: a relative error of 2⁻²³ in z moves the winner."""
    moved = 0
    for seed in range(20):
        logits, noise = close_row(97, seed)
        z = (logits - logits.max()) / 0.83
        moved += (z + noise).argmax() != (z * (1 + 2.0**-23) + noise).argmax()
    assert moved >= 10


def check_neighbours(backend: Backend, vocab: int, params: Params, counts: range | tuple[int, ...]) -> None:
    logits, noise = close_row(vocab, 1)
    alone, _ = backend.choose(logits[None], noise[None], params)
    for n in counts:
        for others in (torch.randn(n, vocab), torch.full((n, vocab), float("nan"))):
            rows, drawn = others.clone(), backend.noise(counting(n), counting(n), vocab)
            at = n // 3
            rows[at], drawn[at] = logits, noise
            ids, finite = backend.choose(rows, drawn, params)
            assert ids[at] == alone[0]
            assert finite[at]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("vocab", [1, 2, 3, 97, 1000])
def test_neighbours_do_not_matter(quick_backend: Backend, vocab: int, name: str) -> None:
    check_neighbours(quick_backend, vocab, PARAMS[name], range(2, 21))


@pytest.mark.parametrize(
    ("vocab", "name", "count"), [(1, "plain", 2), (300, "plain", 70), (97, "filters", 3)]
)
def test_neighbours_do_not_matter_across_tiles(backend: Backend, vocab: int, name: str, count: int) -> None:
    check_neighbours(backend, vocab, PARAMS[name], (count,))


@pytest.mark.parametrize("vocab", [97, 1000])
def test_alignment_does_not_matter(quick_backend: Backend, vocab: int) -> None:
    for seed in range(5):
        logits, noise = close_row(vocab, seed)
        wanted = quick_backend.choose(logits[None], noise[None], PARAMS["filters"])[0]
        for shift in range(1, 9):
            memory = torch.empty(2, vocab + 8)
            memory[0, shift : shift + vocab], memory[1, shift : shift + vocab] = logits, noise
            rows = memory[:, shift : shift + vocab]
            assert torch.equal(quick_backend.choose(rows[:1], rows[1:], PARAMS["filters"])[0], wanted)


@pytest.mark.parametrize("vocab", [97, 40_000])
def test_threads_do_not_matter(quick_backend: Backend, vocab: int, restore_threads: None) -> None:
    rows = 7
    made = [close_row(vocab, seed) for seed in range(rows)]
    logits, noise = (torch.stack(part) for part in zip(*made, strict=True))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        drawn = quick_backend.noise(counting(rows), counting(rows), vocab)
        results.append(
            (drawn, *(quick_backend.choose(logits, noise, params)[0] for params in PARAMS.values()))
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
