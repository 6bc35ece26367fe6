"""Groups, plain decoding and the split-half oracle against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from blockpilot.training.dataset import Examples
from blockpilot.training.evaluation import Picked, compare, supported
from blockpilot.training.held_out import Bootstrap, HeldOutReport, Interval, Seeds

WINDOW = (2, 4, 8)
TAU = [[1.0, 2.0, 3.0], [2.0, 2.0, 1.0], [1.5, 3.0, 3.5], [1.0, 4.0, 2.0]]
CHOSEN, CONTROL = torch.tensor([2, 0, 1, 1]), torch.tensor([0, 0, 0, 0])


def examples(tau=TAU, families="abab", datasets=(), halves=None) -> Examples:
    names = tuple(str(i) for i in range(len(tau)))
    made = torch.tensor(tau, dtype=torch.float64)
    return Examples(names, tuple(families), torch.zeros(len(tau), 1), made, WINDOW, tuple(datasets), halves)


TRAIN = examples([[1.0, 2.0, 1.5], [1.0, 1.0, 4.0], [1.5, 2.0, 1.0]], "aab")  # 8 is the best fixed width


def section(held_out=None, cost=None, **options):
    bootstrap = Bootstrap(4, 200, seed=0)
    return compare(
        TRAIN,
        held_out or examples(),
        CHOSEN,
        CONTROL,
        block_size=4,
        cost=cost,
        bootstrap=bootstrap,
        **options,
    )


def test_families_are_judged_each_for_itself():
    groups = section().by_family
    assert {name: g.prompts for name, g in groups.items()} == {"a": 2, "b": 2}
    a = groups["a"]  # rows 0 and 2
    assert {k: v.mean for k, v in a.strategies.items()} == pytest.approx({
        "drafter_block": 2.5, "best_fixed": 3.25, "predictor": 3.0, "shuffled_control": 1.25,
        "random": (2 + 8 / 3) / 2, "oracle": 3.25,
    })  # fmt: skip
    assert a.gains["predictor - best_fixed"].mean == pytest.approx(-0.25)
    assert a.regret == pytest.approx(0.25) and a.picks == {2: 0, 4: 1, 8: 1}


def test_prompts_without_an_evaluation_set_are_in_none():
    found = section(examples(datasets=("gsm", None, "gsm", "code")))
    assert {name: g.prompts for name, g in found.by_dataset.items()} == {"code": 1, "gsm": 2}
    assert section().by_dataset == {} and section().evaluation == {}


def test_evaluation_sets_use_the_training_parts_fixed_width():
    sets = examples([[9.0, 1.0, 2.0], [7.0, 1.0, 4.0]], "cc", ("x", "y"))
    found = section(evaluation=Picked(sets, torch.tensor([0, 2]), torch.tensor([1, 1]))).evaluation
    assert found["x"].gains["predictor - best_fixed"].mean == pytest.approx(7)
    assert found["y"].strategies["predictor"].mean == pytest.approx(4) and found["y"].regret == pytest.approx(
        3
    )


def test_plain_is_worth_one_token_per_step_where_its_cost_is_known():
    cost = {2: 0.5, 4: 1.0, 8: 4.0}
    assert "plain" not in section(cost=cost).strategies and "plain" not in section().strategies
    found = section(cost={**cost, 1: 0.25})
    assert found.strategies["plain"] == Interval(4.0, 4.0, 4.0)
    assert found.gains["predictor - plain"].mean == pytest.approx((3 / 4 + 4 + 3 + 4) / 4 - 4)
    assert set(found.picks) == set(WINDOW)  # known beside the window, not chosen from


HALVES = torch.tensor([
    [[1.0, 2.0, 3.0], [1.0, 5.0, 2.0]],  # 8 chosen, worth 2
    [[3.0, 1.0, 1.0], [4.0, 1.0, 1.0]],  # 2 chosen, worth 4
    [[1.0, 2.0, 2.0], [1.0, 2.0, 3.0]],  # 4 and 8 tie, 8 is better on the training part: worth 3
    [[1.0, math.nan, 1.0], [1.0, 1.0, 1.0]],  # left out
], dtype=torch.float64)  # fmt: skip


def test_the_split_half_oracle_is_scored_where_it_did_not_choose():
    half = section(examples(halves=HALVES)).split_half
    assert half is not None and half.prompts == 3
    assert {k: v.mean for k, v in half.strategies.items()} == pytest.approx({
        "best_fixed": (2 + 1 + 3) / 3, "predictor": (2 + 4 + 2) / 3,
        "split_half_oracle": (2 + 4 + 3) / 3, "oracle": (5 + 4 + 3) / 3,
    })  # fmt: skip
    assert half.gains["split_half_oracle - best_fixed"].mean == pytest.approx(1)


def test_the_split_half_oracle_divides_by_the_cost():
    half = section(examples(halves=HALVES), cost={2: 1.0, 4: 1.0, 8: 100.0}).split_half
    assert half.strategies["split_half_oracle"].mean == pytest.approx((5 + 4 + 2) / 3)


def test_without_halves_there_is_no_split_half_oracle():
    assert section().split_half is None
    assert section(examples(halves=torch.full((4, 2, 3), math.nan, dtype=torch.float64))).split_half is None


def test_noise_gives_an_oracle_and_no_split_half_oracle():
    """Halves that share nothing: the oracle gains, choosing on the other half does not."""
    n = 400
    halves = torch.randn(n, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    held = replace(examples(halves.mean(1).tolist(), "a" * n), halves=halves)
    chosen = torch.zeros(n, dtype=torch.long)
    found = compare(TRAIN, held, chosen, chosen, block_size=4, cost=None, bootstrap=Bootstrap(n, 400, seed=0))
    assert found.gains["oracle - best_fixed"].low > 0.3
    gain = found.split_half.gains["split_half_oracle - best_fixed"]
    assert gain.low < 0 < gain.high


def test_seeds_report_mean_and_spread():
    def with_gain(mean):
        s = section()
        return replace(s, gains={**s.gains, "predictor - best_fixed": Interval(mean, mean, mean)})

    found = Seeds.of((3, 4, 5), [with_gain(0.1), with_gain(0.2), with_gain(0.6)])
    assert found.seeds == (3, 4, 5) and found.gain == (0.1, 0.2, 0.6)
    assert (found.mean, found.spread) == pytest.approx((0.3, math.sqrt(0.07)))
    assert Seeds.of((3,), [with_gain(0.1)]).spread == 0


@pytest.mark.parametrize(("low", "wanted"), [(0.1, True), (0.0, False), (-0.1, False)])
def test_only_an_interval_above_zero_supports_the_predictor(low, wanted):
    s = replace(section(), picks={2: 4, 4: 6, 8: 0})
    s = replace(s, gains={**s.gains, "predictor - best_fixed": Interval(0.2, low, 0.3)})
    assert supported(s) is wanted
    assert not supported(replace(s, picks={2: 4, 4: 5, 8: 0}))


def test_the_headline_names_the_default_policy():
    values = ("acceptance", WINDOW, 4, 3, 4, "random", section(), None, {}, "So it is.")
    report = HeldOutReport(*values, saved={"kind": "fixed", "width": 8})
    assert report.headline == "So it is. The default policy is the fixed width 8."
    assert replace(report, saved={"kind": "predictor"}).headline.endswith("is the predictor.")
    assert report.judged is report.acceptance
