"""Philox integers and Gumbel noise: known answers, one meaning in every backend, distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockpilot_kernels import dispatch, gumbel_noise, philox
from blockpilot_kernels.gumbel_noise import reference
from tests.kernels import checks
from tests.kernels.backends import Backend, counting
from tests.kernels.transforms import transform_of

ONES, MASK = 0xFFFFFFFF, 0xFFFFFFFF

# Known answers of philox4x32-10 from the Random123 distribution: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def numpy_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """philox4x32-10 of one counter in unsigned 64-bit NumPy, written apart from the package."""
    c, k = [np.uint64(word) for word in counter], [np.uint64(word) for word in key]
    low, high = np.uint64(MASK), np.uint64(32)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> high) ^ c[1] ^ k[0], b & low, (a >> high) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return tuple(int(word) for word in c)


def numpy_integers(seed: int, position: int, vocab: int) -> list[int]:
    key = (seed & MASK, seed >> 32 & MASK)
    words = [numpy_philox((c, position & MASK, 0, 0), key) for c in range((vocab + 3) // 4)]
    return [word for four in words for word in four][:vocab]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result) -> None:
    assert numpy_philox(counter, key) == result
    words = reference.philox_4x32(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key)
    )
    assert tuple(int(word) for word in words) == result


def test_known_answer_of_the_op(backend: Backend) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    assert backend.integers(zero, zero, 4)[0].tolist() == list(KNOWN[0][2])


@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    position=st.integers(0, 2**32 + 5),
    vocab=st.integers(1, 150),
)
def test_reference_integers_are_philox(seeds: list[int], position: int, vocab: int) -> None:
    positions = torch.tensor([position + n for n in range(len(seeds))])
    got = reference.philox(torch.tensor(seeds), positions, vocab)
    expected = [numpy_integers(s, p, vocab) for s, p in zip(seeds, positions.tolist(), strict=True)]
    assert got.tolist() == expected


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 97, 128, 1000])
def test_same_integers_in_every_backend(backend: Backend, vocab: int) -> None:
    seed = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32, 12345678901])
    position = torch.tensor([0, 1, 2, 2**31, 2**32 - 1, 2047, 131071])
    expected = reference.philox(seed, position, vocab)
    assert torch.equal(backend.integers(seed, position, vocab), expected)
    assert expected.min() >= 0
    assert expected.max() <= MASK


def test_noise_is_the_transform_of_the_integers(backend: Backend) -> None:
    seed, position = counting(5), counting(5, 40)
    drawn = backend.noise(seed, position, 97)
    assert drawn.dtype == torch.float32
    u = (backend.integers(seed, position, 97).double() + 0.5) * 2.0**-32
    assert (drawn.double() + torch.log(-torch.log1p(-u))).abs().max() < 2e-5


def test_distribution(backend: Backend) -> None:
    checks.check_gumbel(backend.noise)


def test_independence(backend: Backend) -> None:
    checks.check_independent_positions(backend.noise)
    checks.check_independent_seeds(backend.noise)
    checks.check_high_seed_bits(backend.noise)
    checks.check_independent_ids(backend.noise)


def test_every_integer_gives_finite_noise(backend: Backend) -> None:
    checks.check_transform(transform_of(backend))


@pytest.mark.parametrize("vocab", [1, 2, 3, 97, 1000])
def test_row_depends_on_nothing_but_its_seed_and_position(backend: Backend, vocab: int) -> None:
    seed, position = torch.tensor([77]), torch.tensor([512])
    alone = backend.noise(seed, position, vocab)
    for n in (2, 7, 20):
        seeds, positions = counting(n, 1000), counting(n, 3)
        seeds[n // 2], positions[n // 2] = 77, 512
        assert torch.equal(backend.noise(seeds, positions, vocab)[n // 2], alone[0])
    wider = backend.noise(seed, position, vocab + 3)
    assert torch.equal(wider[:, :vocab], alone)


def test_no_rows(backend: Backend) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert backend.noise(nothing, nothing, 5).shape == (0, 5)
    assert backend.integers(nothing, nothing, 5).shape == (0, 5)


@pytest.mark.parametrize("op", [gumbel_noise, philox])
def test_mistakes_are_named(op) -> None:
    seed = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"position: expected int64 \[2\].*got int64 \[3\]"):
        op(seed, torch.zeros(3, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match=r"seed: expected int64 \[2\].*got int32"):
        op(seed.int(), seed, 4)
    with pytest.raises(ValueError, match="vocab: expected 1"):
        op(seed, seed, 0)
    with pytest.raises(ValueError, match="seed: expected 1 dimension"):
        op(seed[None], seed[None], 4)


def test_meta_tensors_get_shapes() -> None:
    seed = torch.zeros(3, dtype=torch.int64, device="meta")
    before = dispatch.calls["gumbel_noise", "reference"]
    assert gumbel_noise(seed, seed, 9).shape == (3, 9)
    assert philox(seed, seed, 9).dtype == torch.int64
    assert dispatch.calls["gumbel_noise", "reference"] == before + 1


def test_many_rows_of_a_large_vocabulary_are_those_of_each_alone():
    """Beyond a megabyte the C++ op takes memory in another way, and beyond 8192 ids it works in parts."""
    seeds, positions = torch.arange(9) * 77 - 5, torch.arange(9) + 2**31
    whole = gumbel_noise(seeds, positions, 40_001)
    assert whole.numel() * 4 > 2**20
    for i in range(9):
        assert torch.equal(whole[i : i + 1], gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 40_001))
    assert torch.equal(whole[:, :20], gumbel_noise(seeds, positions, 20))
