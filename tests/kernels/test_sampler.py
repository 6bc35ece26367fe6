"""Draws follow the filtered softmax; and the checks that say so fail where a fault is planted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import choose, gumbel_noise
from blockpilot_kernels.dispatch import forced
from blockpilot_kernels.gumbel_noise import reference
from tests.kernels import checks
from tests.kernels.backends import Backend, Params

FILTERS = {
    "plain": Params(),
    "warm": Params(temperature=1.7),
    "cold": Params(temperature=0.3),
    "top_k": Params(top_k=3),
    "top_p": Params(top_p=0.8),
    "min_p": Params(min_p=0.2, temperature=2.0),
    "all": Params(top_k=6, top_p=0.9, min_p=0.1, temperature=1.3),
}
DRAWS = 8_000


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_softmax(backend: Backend, name: str) -> None:
    checks.check_sampler(backend.choose, backend.noise, FILTERS[name], 256 if backend.slow else DRAWS)


# Planted faults. Each stands for a class of bug that the named check has to see.


def noise(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    with forced("reference"):
        return gumbel_noise(seed, position, vocab)


def same_for_two_positions(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    return noise(seed, position // 2, vocab)


def same_for_all_seeds(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    return noise(torch.zeros_like(seed), position, vocab)


def low_seed_bits_only(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    return noise(seed & 0xFFFFFFFF, position, vocab)


def one_lane_for_four_ids(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    return noise(seed, position, vocab)[:, torch.arange(vocab) // 4 * 4]


def uniform_instead_of_gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    with forced("reference"):
        return reference.philox(seed, position, vocab) * 2.0**-32


def too_wide(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    return 1.1 * noise(seed, position, vocab)


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (checks.check_independent_positions, same_for_two_positions),
        (checks.check_independent_seeds, same_for_all_seeds),
        (checks.check_high_seed_bits, low_seed_bits_only),
        (checks.check_independent_ids, one_lane_for_four_ids),
        (checks.check_gumbel, uniform_instead_of_gumbel),
        (checks.check_gumbel, too_wide),
    ],
)
def test_noise_checks_see_planted_faults(check: Callable[..., None], fault: checks.Noise) -> None:
    check(noise)
    with pytest.raises(AssertionError):
        check(fault)


def unclamped(integers: Tensor) -> Tensor:
    u = (integers.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u))


def u_may_be_zero(integers: Tensor) -> Tensor:
    u = (integers.to(torch.float32) * 2.0**-32).clamp(max=reference.LARGEST_BELOW_ONE)
    return -torch.log(-torch.log1p(-u))


def coarse_for_small_u(integers: Tensor) -> Tensor:
    """log(1 − u) where log1p(−u) is needed: small u, and so large g, lose their digits."""
    u = ((integers.to(torch.float32) + 0.5) * 2.0**-32).clamp(2.0**-24, reference.LARGEST_BELOW_ONE)
    return -torch.log(-torch.log(1 - u))


@pytest.mark.parametrize("fault", [unclamped, u_may_be_zero, coarse_for_small_u])
def test_transform_check_sees_planted_faults(fault: Callable[[Tensor], Tensor]) -> None:
    checks.check_transform(reference.gumbel_from_integers)
    with pytest.raises(AssertionError):
        checks.check_transform(fault)


def draw(logits: Tensor, drawn: Tensor | None, params: Params) -> tuple[Tensor, Tensor]:
    with forced("reference"):
        return choose(logits, drawn, *params.tensors(logits.shape[0]), filtered=True)


def filters_greedy_rows_only(logits: Tensor, drawn: Tensor | None, params: Params) -> tuple[Tensor, Tensor]:
    """The filter is applied where no noise is, and forgotten where noise is added."""
    return draw(logits, drawn, Params(temperature=params.temperature) if drawn is not None else params)


def forgets_temperature(logits: Tensor, drawn: Tensor | None, params: Params) -> tuple[Tensor, Tensor]:
    return draw(logits, drawn, Params(1.0, params.top_k, params.top_p, params.min_p))


def adds_noise_before_temperature(
    logits: Tensor, drawn: Tensor | None, params: Params
) -> tuple[Tensor, Tensor]:
    assert drawn is not None
    return draw(logits + drawn, torch.zeros_like(drawn), params)


def keeps_one_too_few(logits: Tensor, drawn: Tensor | None, params: Params) -> tuple[Tensor, Tensor]:
    return draw(logits, drawn, Params(params.temperature, params.top_k - 1, params.top_p, params.min_p))


def renormalises_over_everything(
    logits: Tensor, drawn: Tensor | None, params: Params
) -> tuple[Tensor, Tensor]:
    """top_p of the whole mass where top_p of what top_k left is meant."""
    left = checks.filtered_softmax(checks.LOGITS, Params(params.temperature))
    share = sorted(left)[-params.top_k :]
    return draw(logits, drawn, Params(params.temperature, params.top_k, params.top_p / sum(share)))


@pytest.mark.parametrize(
    ("fault", "params"),
    [
        (filters_greedy_rows_only, FILTERS["top_k"]),
        (filters_greedy_rows_only, FILTERS["top_p"]),
        (filters_greedy_rows_only, FILTERS["min_p"]),
        (forgets_temperature, FILTERS["warm"]),
        (adds_noise_before_temperature, FILTERS["cold"]),
        (keeps_one_too_few, FILTERS["top_k"]),
        (renormalises_over_everything, Params(top_k=4, top_p=0.8)),
    ],
)
def test_sampler_check_sees_planted_faults(fault: checks.Choose, params: Params) -> None:
    checks.check_sampler(draw, noise, params, DRAWS)
    with pytest.raises(AssertionError):
        checks.check_sampler(fault, noise, params, DRAWS)


def test_sampler_check_sees_shared_noise() -> None:
    with pytest.raises(AssertionError):
        checks.check_sampler(draw, same_for_all_seeds, Params(), DRAWS)
