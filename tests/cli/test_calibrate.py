"""`blockpilot calibrate`: a tiny pair from the command line to the file."""

from __future__ import annotations

import json

import pytest

from blockpilot.cli import calibrate
from blockpilot.training.calibration import Calibration
from tests.engine.pair import write_tokenizer
from tests.tiny import save_drafter, save_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The options that name a tiny pair of block size 4."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target", vocab=48, eos_token_id=1)
    write_tokenizer(target)
    drafter = save_drafter(folder / "drafter", target, block_size=4)
    return "--target", target, "--drafter", drafter, "--max-length", "64"


SMALL = ("--contexts", "20,5", "--requests", "2,1", "--repeats", "2")


def test_json_and_file_hold_the_same(cli_json, pair, tmp_path):
    path = tmp_path / "c.json"
    report = cli_json("calibrate", *pair, *SMALL, "-o", path)
    assert set(report) == set(calibrate.JSON_KEYS)
    assert report == json.loads(path.read_text())
    found = Calibration.load(path)
    assert found.to_dict() == report
    assert (found.requests, found.contexts, found.widths) == ((1, 2), (5, 20), (1, 2, 3, 4))
    assert {"cpu", "threads"} <= set(report["hardware"]) and report["versions"]["torch"]
    assert [f["context"] for f in report["fit"]] == [5, 20]
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_tables_and_the_default_file(cli, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("calibrate", *pair, *SMALL, "--widths", "3,2")
    assert result.exit_code == 0, result.output
    assert "1 x 5" in result.stdout and "2 x 20" in result.stdout and "(1.00x)" in result.stdout
    assert "c0(2)" in result.stdout and "residual" in result.stdout
    assert result.stdout.rstrip().endswith("calibration written to calibration.json")
    assert Calibration.load(tmp_path / "calibration.json").widths == (1, 2, 3)


def test_trees(cli, refused, pair, tmp_path):
    path = tmp_path / "c.json"
    result = cli("calibrate", *pair, *SMALL, "--trees", "3/5,2/2", "-o", path)
    assert result.exit_code == 0, result.output
    assert "width/nodes" in result.stdout and "3/4" in result.stdout
    shapes = {(t.width, t.nodes) for t in Calibration.load(path).trees}
    assert shapes == {(2, 1), (2, 2), *((3, n) for n in range(1, 6))}
    for wrong in ("3", "3/x", "3/4/5", "3/4,3/5"):
        assert "--trees: expected widths, each once" in refused("calibrate", *pair, "--trees", wrong)


def test_a_target_alone(cli, pair, tmp_path):
    result = cli("calibrate", *pair, *SMALL, "--drafter", "none", "-o", tmp_path / "c.json")
    assert result.exit_code == 0, result.output
    assert "residual" not in result.stdout
    assert Calibration.load(tmp_path / "c.json").pair.drafter == "none"


@pytest.mark.parametrize("before", [None, "an earlier file"])
def test_an_interrupt_leaves_no_half_file(cli, pair, tmp_path, monkeypatch, before):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    path = tmp_path / "c.json"
    if before is not None:
        path.write_text(before)
    monkeypatch.setattr("blockpilot.training.step_timing._timed_step", interrupted)
    result = cli("calibrate", *pair, *SMALL, "-o", path)
    assert result.exit_code == 130
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else ["c.json"])
    assert before is None or path.read_text() == before


def test_mistakes_are_refused_before_the_models_load(refused, fake_llm, tmp_path):
    for option, what in (("--contexts", "tokens"), ("--requests", "counts"), ("--widths", "widths")):
        assert f"{option}: expected {what} >= 1" in refused("calibrate", option, "1,x")
    assert "--repeats" in refused("calibrate", "--repeats", "0")
    assert "--output: expected a file" in refused("calibrate", "-o", tmp_path)
    assert fake_llm.opened == []


def test_cells_that_do_not_fit_are_refused(refused, pair, tmp_path):
    path = tmp_path / "c.json"
    assert "contexts: expected at most 58" in refused("calibrate", *pair, "-o", path)
    assert "widths: expected widths among" in refused("calibrate", *pair, *SMALL, "--widths", "9", "-o", path)
    assert not path.exists()
