"""What is known of how drafts do, and when a fall of τ is more than noise."""

from __future__ import annotations

import json
import random

import pytest

from blockpilot.adapt.pulse import FALL, FAST, LOOKED_AT, ROUNDS, Moments, Pulse, Watch


def moments(*tokens: int) -> Moments:
    made = Moments()
    for n in tokens:
        made.add(n)
    return made


def test_moments():
    m = moments(1, 1, 3, 3)
    assert (m.steps, m.tau) == (4, 2.0)
    assert m.error == pytest.approx(0.5)
    assert Moments.sum([moments(1, 1), moments(3, 3)]) == m
    assert Moments().tau == Moments().error == 0.0


def test_a_look_moves_the_averages():
    pulse = Pulse()
    pulse.count([1, 3], 1, 4)
    pulse.count([2, 2], 0, 6)
    assert pulse.close() == moments(1, 3, 2, 2)
    assert (pulse.fast, pulse.slow, pulse.rejected, pulse.width) == (2.0, 2.0, 0.25, 5.0)
    assert pulse.unsayable == pytest.approx(1 / 8)
    assert pulse.context()[:4] == [1.0, 0.0, 0.25, pytest.approx(1 / 8)]
    for _ in range(200):
        pulse.count([2] * 4, 0, 5)
        pulse.close()
    pulse.count([1] * 4, 4, 5)
    pulse.close()
    _, drop, rejected, unsayable, waited = pulse.context()
    assert 0 < drop < 0.5 and (rejected, unsayable) == (pytest.approx(FAST), pytest.approx(FAST))
    assert pulse.waited == 4 * 202 and waited > 0.5
    assert Pulse.from_dict(json.loads(json.dumps(pulse.to_dict()))) == pulse


def looks(tau: float, count: int, seed: int):
    """`count` looks of steps that commit 1 or 3 tokens, τ in the mean."""
    draw = random.Random(seed)
    return [
        moments(*(3 if draw.random() < (tau - 1) / 2 else 1 for _ in range(ROUNDS))) for _ in range(count)
    ]


def asked(before: float, after: float, seed: int) -> int:
    """How often harm is suspected behind an update."""
    watch = Watch()
    for look in looks(before, 20, seed):
        assert not watch.fell(look)
    watch.begin()
    found = sum(watch.fell(look) for look in looks(after, 3 * LOOKED_AT[-1] // ROUNDS, seed + 1))
    assert watch._before is None
    return found


def test_a_fall_is_seen_and_noise_is_not():
    assert all(asked(2.0, 1.7, seed) for seed in range(20))
    assert sum(asked(2.0, 2.0, seed) > 0 for seed in range(100)) <= 20
    assert sum(asked(2.0, 2.0 * (1 - FALL), seed) > 0 for seed in range(100)) <= 35
    assert not any(asked(2.0, 2.2, seed) for seed in range(20))


def test_nothing_is_watched_before_an_update():
    watch = Watch()
    assert watch._before is None
    assert not any(watch.fell(look) for look in [*looks(2.5, 20, 0), *looks(1.1, 40, 1)])
