"""Training logs: what is read, what a resumed run replaces, and the fitted line."""

from __future__ import annotations

import json
import math

import pytest

from blockpilot.training.page.training_log import extrapolate, read_training_log
from tests.training.page_files import LOG, write_log

TRAIN, VALIDATION = LOG[0], LOG[-1]


def test_curves_against_blocks_tokens_and_hours(tmp_path):
    log = read_training_log(write_log(tmp_path / "log"))
    assert log.widths == (2, 4) and log.others == 0
    assert log.curve(4, "blocks") == [(1600, 1.25), (3200, 1.5), (6400, 2.0)]
    assert log.curve(2, "tokens") == [(12800, 1.125), (32000, 1.25), (64000, 1.5)]  # of the last step before
    assert log.curve(4, "cpu_hours") == [(0.25, 1.25), (0.5, 1.5), (1.0, 2.0)]
    assert log.curve(3, "blocks") == []


def test_points_at_zero_or_without_tokens_are_left_out(tmp_path):
    start = {**VALIDATION, "step": 0, "blocks": 0, "cpu_seconds": 0.0}
    log = read_training_log(write_log(tmp_path / "log", [start, *LOG[-2:]]))
    assert [x for x, _ in log.curve(4, "blocks")] == [3200, 6400]
    assert log.curve(4, "tokens") == []


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    again = [{**r, "loss": 0.5} for r in LOG[8:10]]  # steps 90 and 100
    log = read_training_log(write_log(tmp_path / "log", [*LOG, *again]))
    assert [r["step"] for r in log.train] == list(range(10, 110, 10))
    assert [r["loss"] for r in log.train[-3:]] == [5 - 0.8, 0.5, 0.5]
    assert [r["step"] for r in log.validation] == [25, 50, 100]


def test_a_torn_last_line_is_left_out_and_other_kinds_are_counted(tmp_path):
    path = write_log(tmp_path / "log", [{"kind": "start", "seed": 1}, *LOG])
    whole = read_training_log(path)
    assert whole.others == 1
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert read_training_log(path) == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2"),
        ("[1]", "expected an object with a kind"),
        (json.dumps({**TRAIN, "loss": None}), "loss: expected a finite number, got None"),
        (json.dumps({**TRAIN, "loss": math.nan}), "NaN is no JSON number"),
        (json.dumps({**TRAIN, "step": True}), "step: expected a finite number"),
        (json.dumps({**TRAIN, "accuracy": 0.5}), "accuracy: expected a list"),
        (json.dumps({**TRAIN, "accuracy": ["x"]}), "accuracy: expected a finite number"),
        (json.dumps({k: v for k, v in VALIDATION.items() if k != "tau"}), "tau: expected an object"),
        (json.dumps({**VALIDATION, "tau": {"wide": 1}}), "tau: expected an object"),
        (json.dumps({**VALIDATION, "tau": {"4": None}}), r"tau\[4\]: expected a finite number"),
    ],
)
def test_malformed_lines_are_refused(tmp_path, line, message):
    path = write_log(tmp_path / "log", LOG[:1])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message) as refusal:
        read_training_log(path)
    assert "log, line 2: " in str(refusal.value)


def test_a_log_without_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kind train or validation, got 1 others"):
        read_training_log(write_log(tmp_path / "log", [{"kind": "start"}]))


def test_the_line_is_found_and_stops_at_the_width():
    curve = [(x, 1 + 0.25 * math.log(x)) for x in (1, 2, 4, 8, 16, 32)]
    fit = extrapolate([(1.0, 9.0), (1.5, 9.0), *curve[2:]], 4)  # the first half is not used
    assert (fit.points, fit.first, fit.last) == (3, 8, 32)
    assert fit.slope == pytest.approx(0.25) and fit.residual == pytest.approx(0, abs=1e-9)
    assert fit.at(320) == pytest.approx(1 + 0.25 * math.log(320))
    assert fit.at(1e9) == 4


def test_two_points_are_too_few():
    assert extrapolate([(1, 1.0), (2, 1.5)], 4) is None
    assert extrapolate([(1, 1.0), (2, 1.5), (2, 1.6)], 4) is None
