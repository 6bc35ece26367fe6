"""Statistical checks of noise and draws. Each raises AssertionError; `test_planted_faults` shows that each
can.

Seeds are fixed, so a check gives one answer for one implementation. Bounds: p > 1e-4 for tests of a
distribution, 5 standard errors for correlations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from tests.kernels.backends import Params, counting, rows_of

Noise = Callable[[Tensor, Tensor, int], Tensor]
Choose = Callable[[Tensor, Tensor | None, Params], tuple[Tensor, Tensor]]

ROWS, VOCAB = 64, 128
LOGITS = [2.0, 1.5, 1.5, 1.0, 0.0, -0.5, -1.0, -1.0, -2.0, -3.0, -3.5, -6.0]


def check_gumbel(noise: Noise) -> None:
    """Kolmogorov–Smirnov against the standard Gumbel distribution."""
    drawn = noise(counting(ROWS, 5), counting(ROWS, 1000), VOCAB).double().numpy().ravel()
    assert np.isfinite(drawn).all()
    assert stats.kstest(drawn, "gumbel_r").pvalue > 1e-4


def check_independent_positions(noise: Noise) -> None:
    """Neighbouring positions of one request are uncorrelated."""
    drawn = noise(torch.full((ROWS,), 7), counting(ROWS, 100), VOCAB)
    _assert_uncorrelated(drawn[:-1], drawn[1:])


def check_independent_seeds(noise: Noise) -> None:
    """Requests with neighbouring seeds are uncorrelated at the same position."""
    drawn = noise(counting(ROWS, 30), torch.full((ROWS,), 12), VOCAB)
    _assert_uncorrelated(drawn[:-1], drawn[1:])


def check_high_seed_bits(noise: Noise) -> None:
    """The upper 32 bits of a seed count."""
    low = counting(ROWS, 1)
    position = torch.full((ROWS,), 3)
    _assert_uncorrelated(noise(low, position, VOCAB), noise(low + (1 << 32), position, VOCAB))


def check_independent_ids(noise: Noise) -> None:
    """Neighbouring ids, in one counter and across counters, are uncorrelated."""
    drawn = noise(counting(ROWS, 2), counting(ROWS, 50), VOCAB)
    for distance in (1, 2, 4):
        _assert_uncorrelated(drawn[:, :-distance], drawn[:, distance:])


def check_transform(transform: Callable[[Tensor], Tensor]) -> None:
    """Every integer gives finite noise, falling in i, and right to float32 against float64."""
    edges = [
        0,
        1,
        2,
        3,
        255,
        2**23,
        2**24 + 1,
        2**31 - 1,
        2**31,
        2**32 - 257,
        2**32 - 129,
        2**32 - 2,
        2**32 - 1,
    ]
    integers = torch.cat(
        [torch.tensor(edges), torch.linspace(0, 2**32 - 1, 2000, dtype=torch.float64).long()]
    )
    integers = integers.sort().values
    got = transform(integers).double()
    assert torch.isfinite(got).all(), "noise is not finite"
    assert (got[1:] <= got[:-1] + 1e-6).all()
    u = ((integers.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    # Above u = ½ the float32 u has a relative error of 2⁻²⁵ / (1 − u): compare where it is small.
    clear = u < 0.99
    expected = -torch.log(-torch.log1p(-u))
    assert (got - expected)[clear].abs().max() < 3e-6
    assert abs(got[0].item() - 22.87) < 0.01
    assert got[-1].item() < -2.8


def check_sampler(choose: Choose, noise: Noise, params: Params, draws: int) -> None:
    """Chi-square of drawn ids against the filtered softmax, and nothing drawn outside it."""
    expected = filtered_softmax(LOGITS, params)
    ids, finite = choose(
        rows_of(LOGITS, draws), noise(counting(draws), torch.full((draws,), 9), len(LOGITS)), params
    )
    assert finite.all()
    counts = np.bincount(ids.numpy(), minlength=len(LOGITS))
    assert counts[expected == 0].sum() == 0, "an id was drawn that the filters exclude"
    likely = expected * draws >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * draws
    if wanted[-1] < 1:  # too few to test, and few enough to leave out
        observed, wanted = observed[:-1], wanted[:-1] * (observed[:-1].sum() / wanted[:-1].sum())
    assert len(wanted) == 1 or stats.chisquare(observed, wanted).pvalue > 1e-4


def filtered_softmax(logits: list[float], params: Params) -> np.ndarray:
    """float64 probabilities after temperature, top_k, top_p and min_p, by sorting. Scalars in `params`."""
    z = np.array(logits) / params.temperature
    p = np.exp(z - z.max())
    order = np.argsort(-p, kind="stable")
    kept = order[: params.top_k or len(p)]
    before = np.cumsum(p[kept]) - p[kept]
    kept = kept[before < params.top_p * p[kept].sum()]
    kept = kept[p[kept] >= params.min_p * p.max()]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def _assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    a, b = a.double().flatten(), b.double().flatten()
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    assert abs(correlation) < 5 / len(a) ** 0.5, f"correlation {correlation:.4f}"
