"""Calibration files: what is read back, refused and read off."""

from __future__ import annotations

import copy
import json

import pytest

from blockpilot.training.calibration import KEYS, Calibration
from blockpilot.training.calibration_rows import Spread, StepCost
from tests.training.calibrations import calibration, modelled, row


@pytest.fixture
def edited(tmp_path):
    """Load a saved calibration after `edit` changed its JSON object."""

    def load(edit) -> Calibration:
        found = copy.deepcopy(calibration().to_dict())
        edit(found)
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(found))
        return Calibration.load(path)

    return load


def test_what_is_saved_is_read_back(tmp_path):
    path = tmp_path / "new folder" / "c.json"
    saved = calibration()
    saved.save(path)
    assert Calibration.load(path) == saved
    assert json.loads(path.read_text()) == saved.to_dict()
    assert [p.name for p in path.parent.iterdir()] == ["c.json"]


def test_axes_are_those_of_the_rows():
    found = calibration(rows=tuple(reversed(calibration().rows)))
    assert (found.requests, found.contexts, found.widths) == ((1, 4), (100, 300), (1, 2, 4, 8))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "{}", '{"policy": 1}', '{"calibration": '])
def test_files_that_are_no_calibration_are_refused(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"c\.json: .*expected .*blockpilot calibrate"):
        Calibration.load(path)


def test_bytes_and_absent_files_are_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="expected the JSON of a calibration"):
        Calibration.load(path)
    with pytest.raises(ValueError, match="expected a readable calibration, got No such file"):
        Calibration.load(tmp_path / "absent.json")


@pytest.mark.parametrize("version", [0, 2, "1", True, None])
def test_other_formats_are_refused(edited, version):
    with pytest.raises(ValueError, match="calibration: expected format 1, got"):
        edited(lambda found: found.update(calibration=version))


@pytest.mark.parametrize("key", [key for key in KEYS if key != "trees"])
def test_missing_keys_are_named(edited, key):
    with pytest.raises(ValueError, match=rf"missing \['{key}'\]"):
        edited(lambda found: found.pop(key))


def test_unknown_keys_are_named(edited):
    with pytest.raises(ValueError, match=r"unknown \['speed'\]"):
        edited(lambda found: found.update(speed=1))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pair", "some-target", "pair: expected target and drafter"),
        ("pair", {"target": "", "drafter": "d"}, "Pair.target"),
        ("dtype", "", "dtype: expected text"),
        ("device", 0, "device: expected text"),
        ("backend", None, "backend: expected text"),
        ("threads", 0, "threads: expected an int >= 1"),
        ("threads", True, "threads: expected an int >= 1"),
        ("hardware", "a processor", "hardware: expected an object"),
        ("versions", None, "versions: expected an object"),
        ("rows", {}, "rows: expected a list"),
        ("rows", [], "rows: expected plain decoding"),
        ("rows", [1], r"rows\[0\]: expected keys"),
    ],
)
def test_wrong_values_are_refused(edited, key, value, message):
    with pytest.raises(ValueError, match=message):
        edited(lambda found: found.update({key: value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, "7", True, None])
def test_times_that_are_none_are_refused(edited, value):
    def edit(found):
        found["rows"][1]["ms"]["verify"]["median"] = value

    with pytest.raises(ValueError, match=r"rows\[1\]: ms.verify: median: expected|no JSON number"):
        edited(edit)


@pytest.mark.parametrize(
    ("name", "value"), [("requests", 0), ("context", -1), ("width", 1.5), ("steps", True), ("sum_width", 99)]
)
def test_counts_that_are_none_are_refused(edited, name, value):
    with pytest.raises(ValueError, match=rf"rows\[2\]: {name}: expected"):
        edited(lambda found: found["rows"][2].update({name: value}))


def test_incomplete_rows_are_refused(edited):
    def unordered(found):
        found["rows"][0]["ms"]["host"]["p10"] = 50.0

    for edit, message in (
        (lambda found: found["rows"][0].pop("steps"), r"rows\[0\]: expected keys"),
        (lambda found: found["rows"][0].update(ms=3), r"rows\[0\]: ms: expected an object"),
        (lambda found: found["rows"][0]["ms"].pop("accept"), r"rows\[0\]: ms: expected phases"),
        (lambda found: found["rows"][0]["ms"].update(host=1.0), r"rows\[0\]: ms.host: expected keys"),
        (unordered, r"rows\[0\]: ms.host: expected p10 <= median <= p90"),
    ):
        with pytest.raises(ValueError, match=message):
            edited(edit)


def test_a_step_takes_time():
    nothing = Spread(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="total above 0"):
        StepCost(1, 1, 1, 1, {**row().ms, "total": nothing})


def test_the_grid_must_be_whole():
    rows = calibration().rows
    with pytest.raises(ValueError, match=r"missing \[\(4, 300, 8\)\]"):
        calibration(rows=rows[:-1])
    with pytest.raises(ValueError, match=r"expected every cell once, got .*\(1, 100, 1\)"):
        calibration(rows=(*rows, rows[0]))
    with pytest.raises(ValueError, match=r"width 1, among them, got widths \(2, 4\)"):
        calibration(widths=(2, 4))


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("context", [100, 175.5, 300])
@pytest.mark.parametrize("width", [1, 2, 3, 6, 8])
def test_costs_are_linear_between_what_was_measured(requests, context, width):
    assert calibration().cost(width, context, requests) == pytest.approx(modelled(requests, context, width))


@pytest.mark.parametrize(
    ("asked", "nearest"), [((16, 200), (8, 200)), ((4, 0), (4, 100)), ((20, 4000), (8, 300))]
)
def test_costs_outside_are_those_of_the_nearest(asked, nearest):
    assert calibration().cost(*asked) == calibration().cost(*nearest)


def test_a_drafting_width_never_borrows_from_plain():
    found = calibration(widths=(1, 4))
    assert found.cost(2, 100) == found.cost(4, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 100), "width: expected an int >= 1, got 0"),
        ((2.0, 100), "width: expected an int"),
        ((2, -1), "context: expected a number >= 0"),
        ((2, float("nan")), "context: expected a number >= 0"),
        ((2, 100, 2), r"requests: expected one of \(1, 4\), got 2; measure it"),
    ],
)
def test_costs_of_nonsense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibration().cost(*arguments)


def test_drafting_has_no_cost_where_only_plain_was_measured():
    found = calibration(widths=(1,))
    assert found.cost(1, 100) == modelled(1, 100, 1) and found.fits() == ()
    with pytest.raises(ValueError, match="width: expected 1, the only one measured, got 4"):
        found.cost(4, 100)


def grown(nodes=(1, 2, 5, 9), width=6):
    return tuple(row(r, c, width, n) for r in (1, 4) for c in (100, 300) for n in nodes)


def test_trees_are_kept_and_need_not_be_there(edited, tmp_path):
    saved = calibration(trees=grown())
    saved.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == saved
    assert saved.widths == (1, 2, 4, 8)
    assert edited(lambda found: found.pop("trees")) == calibration()


def test_the_cost_of_nodes_is_a_line_that_never_falls():
    found = calibration(trees=grown()).node_cost(6, 7)
    assert found == pytest.approx([modelled(1, 100, n + 1) for n in range(1, 8)])
    dip = tuple(t if t.nodes != 5 else row(t.requests, t.context, 6, 1) for t in grown())
    dip = tuple(
        StepCost(t.requests, t.context, 6, 15, t.ms, n) for t, n in zip(dip, (1, 2, 5, 9) * 4, strict=True)
    )
    cost = calibration(trees=dip).node_cost(6, 9)
    level = (modelled(1, 100, 3) + modelled(1, 100, 2)) / 2  # what was measured at 2 and at 5 nodes
    assert cost == pytest.approx([modelled(1, 100, 2), *4 * [level], *cost[5:]])
    assert level < cost[5] < cost[8] == modelled(1, 100, 10)


def test_trees_that_were_not_measured_are_refused(edited):
    for asked, found in (((5, 4), "got none"), ((6, 10), "got 9")):
        with pytest.raises(ValueError, match=rf"{found}; measure with `blockpilot calibrate --trees"):
            calibration(trees=grown()).node_cost(*asked)
    for trees in (grown()[:-1], (*grown(), grown()[0]), tuple(t for t in grown() if t.context == 100)):
        with pytest.raises(ValueError, match="trees: expected every requests and context"):
            calibration(trees=trees)
    with pytest.raises(ValueError, match=r"trees\[0\]: expected keys"):
        edited(lambda found: found.update(trees=found["rows"]))
    with pytest.raises(ValueError, match="nodes: expected an int >= 0"):
        StepCost(1, 1, 2, 1, row().ms, -1)


def test_the_fit_finds_the_model():
    near, far = calibration().fits()
    assert (near.context, far.context) == (100, 300)
    assert near.c1 == far.c1 == 0.5
    assert near.c0 == {1: 23.0, 4: 29.0} and far.c0 == {1: 25.0, 4: 31.0}
    assert near.plain == {1: 6.0, 4: 6.0} and near.residual == 0


def test_the_fit_says_what_it_leaves():
    bent = tuple(r for r in calibration(requests=(1,), contexts=(100,)).rows if r.width != 8)
    last = row(width=8)
    total = Spread(last.total + 6, 0.0, 100.0)
    rows = (*bent, StepCost(1, 100, 8, 15, {**last.ms, "total": total}))
    (fit,) = calibration(rows=rows).fits()
    assert fit.c1 > 0.5 and 0 < fit.residual < 6


def test_another_pair_is_refused_with_both_names():
    calibration().check_pair("some-target", "some-drafter")
    with pytest.raises(ValueError, match=r"target some-target with drafter another, .* drafter some-drafter"):
        calibration().check_pair("some-target", "another")


def test_spreads():
    assert Spread.of([0.001 * i for i in range(11)]) == Spread(5.0, 1.0, 9.0)
    assert Spread.of([0.25]) == Spread(250.0, 250.0, 250.0)
