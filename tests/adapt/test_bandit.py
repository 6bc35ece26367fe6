"""Decisions from numbers alone: updates that pay are made, others only within the budget for exploration."""

from __future__ import annotations

import json
import random

import pytest

from blockpilot.adapt.bandit import CONTEXT, EXPLORATION, FELL, HORIZON, LONGEST, Bandit, Choice, saved

HERE = [1.0, 0.0, 0.4, 0.1, 0.5]
SHIFTED = [1.0, 0.3, 0.6, 0.1, 0.5]


def told(bandit: Bandit, arm: str, gain: float, seconds: float = 1.0, times: int = 12, context=HERE) -> None:
    """Updates that were not exploration."""
    for _ in range(times):
        bandit.learn(Choice(arm, explores=False), context, gain, 0.01, seconds)


def test_what_pays_is_made_and_what_does_not_is_not():
    bandit = Bandit()
    told(bandit, "head", 0.05)
    told(bandit, "full", 0.0)
    mean, deviation = bandit.arms["head"].gain(HERE)
    assert mean == pytest.approx(0.05, abs=0.002) and 0 < deviation < 0.01
    pays = 1.0 / (mean - 1.64 * deviation) / HORIZON  # seconds, of half of which that share is one
    assert bandit.decide(HERE, 1.2 * pays, 1.0) == Choice("head", explores=False)
    bandit.explored = 1e9
    assert bandit.decide(HERE, 0.8 * pays, 1.0) is None


def test_a_dearer_arm_is_made_where_it_gains_more():
    bandit = Bandit()
    told(bandit, "head", 0.03, 1.0)
    told(bandit, "full", 0.09, 4.0)
    assert bandit.decide(HERE, 600.0, 1.0) == Choice("full", explores=False)
    assert bandit.decide(HERE, 90.0, 1.0) == Choice("head", explores=False)


def test_harm_is_not_repeated():
    bandit = Bandit()
    for arm in bandit.arms:
        told(bandit, arm, -0.05)
    assert bandit.decide(HERE, 600.0, 1.0) is None


def test_nothing_is_tried_where_even_the_upper_bound_does_not_pay():
    bandit = Bandit()
    bandit.explored = -1e9
    assert bandit.decide(HERE, 20.0, 1.0) is None
    assert bandit.decide(HERE, 24.0, 1.0) == Choice("full", explores=True)


def test_exploration_takes_no_more_than_its_share():
    """Of a stream where no update gains anything, whatever is measured of it."""
    random.seed(3)
    bandit, served, spent, updates = Bandit(), 0.0, 0.0, 0
    for _ in range(200_000):
        served += 0.3
        choice = bandit.decide(HERE, served, 1.0)
        if choice is not None:
            seconds = random.uniform(0.5, 1.5)
            bandit.learn(choice, HERE, random.gauss(0.0, 0.01), 0.01, seconds)
            spent, updates = spent + seconds, updates + 1
            assert choice.explores
            assert bandit.explored == pytest.approx(spent)
    assert updates > 3
    assert spent <= EXPLORATION * served + 1.5


def test_a_first_update_is_guessed_to_cost_what_it_is_told():
    assert Bandit().decide(HERE, 0.99 * 12.0 / EXPLORATION, 6.0) is None
    assert Bandit().decide(HERE, 1.01 * 12.0 / EXPLORATION, 6.0) == Choice("full", explores=True)


def test_half_of_exploration_is_kept_for_times_when_drafts_do_worse():
    served = 1.01 * 6.0 / EXPLORATION
    fallen, nearly = ([1.0, drop, *HERE[2:]] for drop in (FELL, 0.99 * FELL))
    assert Bandit().decide(nearly, served, 6.0) is None
    bandit = Bandit()
    assert bandit.decide(fallen, 0.5 * served, 6.0) is None
    assert bandit.decide(HERE, served, 6.0) == Choice(
        "full", explores=True
    )  # it has not been looked into yet
    assert Bandit.from_dict(bandit.to_dict()).decide(HERE, served, 6.0) == Choice("full", explores=True)
    bandit.learn(Choice("full", explores=False), HERE, 0.0, 0.01, 6.0)
    assert bandit.decide(HERE, served, 6.0) is None


def test_the_context_decides():
    bandit = Bandit()
    for _ in range(12):
        told(bandit, "head", 0.0, context=HERE, times=1)
        told(bandit, "head", 0.06, context=SHIFTED, times=1)
    bandit.explored = 1e9
    assert bandit.decide(HERE, 400.0, 1.0) is None
    assert bandit.decide(SHIFTED, 400.0, 1.0) == Choice("head", explores=False)


def test_what_was_told_long_ago_fades():
    bandit = Bandit()
    told(bandit, "head", 0.08)
    told(bandit, "head", 0.0, times=60)
    assert abs(bandit.arms["head"].gain(HERE)[0]) < 0.006


def test_a_measurement_counts_as_much_as_it_is_sure():
    sure, unsure = Bandit(), Bandit()
    sure.learn(Choice("head", explores=False), HERE, 0.1, 0.001, 1.0)
    unsure.learn(Choice("head", explores=False), HERE, 0.1, 0.2, 1.0)
    (near, tight), (far, wide) = (b.arms["head"].gain(HERE) for b in (sure, unsure))
    assert near > 0.09 > 0.02 > far
    assert tight < 0.01 < wide


def test_gains_are_seconds_of_the_time_to_come():
    assert saved(100.0, 0.25) == pytest.approx(20.0 * HORIZON)
    assert saved(100.0, -0.2) == pytest.approx(-25.0 * HORIZON)
    assert saved(10 * LONGEST, 0.25) == pytest.approx(LONGEST / 5)


def test_kept_as_json_it_decides_the_same():
    bandit = Bandit()
    told(bandit, "head", 0.02, times=3)
    bandit.learn(Choice("full", explores=True), SHIFTED, 0.04, 0.02, 3.0)
    other = Bandit.from_dict(json.loads(json.dumps(bandit.to_dict())))
    assert other.to_dict() == bandit.to_dict()
    for served in (20.0, 100.0, 500.0):
        for context in (HERE, SHIFTED):
            assert other.decide(context, served, 1.0) == bandit.decide(context, served, 1.0)
            assert [a.gain(context) for a in other.arms.values()] == [
                a.gain(context) for a in bandit.arms.values()
            ]
    assert len(CONTEXT) == len(HERE)
