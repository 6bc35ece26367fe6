"""Fixed widths, oracle, noise and locality: by hand, by simulation, and the published tables."""

from __future__ import annotations

import json

import numpy as np
import pytest

from blockpilot.training.acceptance import AcceptanceTable, read_acceptance
from blockpilot.training.analysis import analyse, noise_control
from tests.training.acceptance_data import WIDTHS, published, write_set


@pytest.fixture
def small(tmp_path):
    return read_acceptance(write_set(tmp_path / "small"), 8)[0]


def table(tau, widths=(2, 3, 4), block=3):
    names = tuple(str(i) for i in range(len(tau)))
    return AcceptanceTable("t", names, names, widths, np.array(tau, dtype=float), block, widths)


def test_figures_worked_out_by_hand(small):
    found = analyse(small, simulations=10)
    assert found.tau_by_width == dict(zip(WIDTHS, (1.75, 2.5, 3.25, 4.25, 3.75, 2.75), strict=True))
    assert (found.best_fixed_width, found.best_fixed, found.at_block) == (8, 4.25, 4.25)
    assert found.window == (6, 7, 8, 9)
    assert found.oracle == (4 + 5 + 6 + 3) / 4
    assert found.gain_over_block == found.gain_over_best_fixed == pytest.approx(4.5 / 4.25 - 1)
    place = found.locality
    assert (place.differs, place.differs_lowest, place.within, place.tied) == (0.5, 0.75, 0.75, 0.25)
    assert place.best == {4: 0, 6: 0, 7: 1, 8: 1, 9: 1, 16: 1}
    assert place.reaching == {4: 0, 6: 0, 7: 1, 8: 2, 9: 1, 16: 1}
    assert (found.chosen.prompts, found.chosen.equal_oracle) == (4, 3)
    assert found.chosen.tau == (4 + 5 + 6 + 2) / 4
    assert json.loads(json.dumps(found.to_dict()))["tau_by_width"]["8"] == 4.25


def test_a_window_of_its_own(small):
    found = analyse(small, (16, 6, 6), simulations=10)
    assert (found.window, found.best_fixed_width, found.oracle) == ((6, 16), 16, 3.25)
    assert found.gain_over_block == pytest.approx(3.25 / 4.25 - 1)
    assert found.noise.over_block is None
    assert found.locality == analyse(small).locality
    with pytest.raises(ValueError, match=r"window: .*got \[5\]"):
        analyse(small, (5, 6))


def test_a_block_size_that_was_not_measured():
    found = analyse(table([[1, 2, 3], [2, 2, 1]], block=5), simulations=10)
    assert found.at_block is found.gain_over_block is found.noise.over_block is None
    assert found.locality.differs is found.locality.differs_lowest is None
    assert found.locality.within == 1


def test_one_prompt_or_one_width_has_no_noise_control(small):
    assert analyse(table([[1, 2, 3]])).noise is None
    assert analyse(small, (8,)).noise is None
    with pytest.raises(ValueError, match="at least 2 prompts, 2 widths and 1 simulation"):
        noise_control(np.ones((1, 3)), None)
    with pytest.raises(ValueError, match="2 prompts, 2 widths and 1 simulation, got 2, 3 and 0"):
        noise_control(np.ones((2, 3)), None, simulations=0)


def test_without_residuals_noise_gains_nothing():
    tau = np.add.outer([1.0, 2.0, 5.0], [0.0, 0.5, 0.25])
    found = noise_control(tau, 0, simulations=5)
    assert found.residual == pytest.approx(0, abs=1e-12)
    assert found.over_best_fixed.mean == pytest.approx(0, abs=1e-12)
    assert found.over_block.mean == pytest.approx(tau[:, 1].mean() / tau[:, 0].mean() - 1)


def test_noise_control_finds_the_noise_it_was_given():
    noise = np.random.default_rng(3).standard_normal((4000, 4))
    found = noise_control(10 + 0.5 * noise, 0, simulations=20, seed=1)
    assert found.freedom == 3999 * 3
    assert found.residual == pytest.approx(0.5, rel=0.03)
    expected_maximum = 1.0294  # of four standard normal draws
    assert found.over_block.mean == pytest.approx(0.5 * expected_maximum / 10, rel=0.05)
    assert found.over_block.low < found.over_block.mean < found.over_block.high


def test_the_seed_decides_and_batches_do_not(monkeypatch):
    tau = np.random.default_rng(0).random((6, 3)) + 1
    first = noise_control(tau, 1, simulations=30, seed=5)
    assert noise_control(tau, 1, simulations=30, seed=6) != first
    monkeypatch.setattr("blockpilot.training.analysis._DRAWN_AT_ONCE", 4 * tau.size)
    assert noise_control(tau, 1, simulations=30, seed=5) == first


@pytest.fixture(scope="module")
def tables():
    folder = published()
    if folder is None:
        pytest.skip("the published acceptance tables are not here: set BLOCKPILOT_ACCEPTANCE_DATA")
    return read_acceptance(folder)


def test_published_tables(tables):
    gsm8k, math500 = found = [analyse(t) for t in tables]
    assert [(a.name, a.prompts, a.window) for a in found] == [
        ("gsm8k", 32, (14, 15, 16, 17, 18)),
        ("math500", 32, (14, 15, 16, 17, 18)),
    ]
    assert [round(a.at_block, 3) for a in found] == [6.509, 8.200]
    assert [(a.best_fixed_width, round(a.best_fixed, 3)) for a in found] == [(17, 6.528), (16, 8.200)]
    assert [round(a.oracle, 3) for a in found] == [6.735, 8.532]
    assert [round(100 * a.gain_over_block, 1) for a in found] == [3.5, 4.0]
    assert sum(a.chosen.equal_oracle for a in found) == sum(a.chosen.prompts for a in found) == 64
    assert [a.locality.differs for a in found] == [21 / 32, 16 / 32]
    assert [a.locality.within for a in found] == [1, 1]
    for analysis in (gsm8k, math500):  # an oracle over noise gains as much
        assert analysis.noise.over_block.low < analysis.gain_over_block < analysis.noise.over_block.high


@pytest.mark.parametrize(
    ("freedom", "gains"), [(31 * 4, [0.0378, 0.0435]), (32 * 4, [0.0371, 0.0427])], ids=["default", "prompts"]
)
def test_noise_of_the_published_tables(tables, freedom, gains):
    """Divided by (N − 1)(C − 1), and by N(C − 1), which corrects for the means of prompts only."""
    found = [
        noise_control(t.columns(t.window), t.window.index(16), simulations=4000, freedom=freedom)
        for t in tables
    ]
    assert [f.over_block.mean for f in found] == pytest.approx(gains, abs=0.0005)
    if freedom == found[0].freedom == 31 * 4:
        assert found == [noise_control(t.columns(t.window), 2, simulations=4000) for t in tables]
