"""`blockpilot train-draft --kind`: EAGLE-3 and SpecBlock drafters that load, and features that answers come with."""

from __future__ import annotations

import shutil
from pathlib import Path

from blockpilot import LLM
from blockpilot.drafters.eagle3_checkpoint import load_eagle3
from blockpilot.drafters.specblock_checkpoint import load_specblock
from blockpilot.params import SamplingParams
from tests.cli.test_train_draft import SMALL, frequent


def test_an_eagle3_drafter(cli_json, refused, data, tmp_path):
    """It loads, decodes and goes on; the run's kind and its one layer are its own."""
    call = ("train-draft", data[1], "-o", tmp_path / "run", "-t", data[0], "--kind", "eagle3", *SMALL[2:])
    more = ("--widths", "2,4", "--validation", "2", "--draft-vocabulary", "30", "--feature-layers", "0,1")
    first = cli_json(*call, *more, "--blocks", "18")
    report = cli_json(*call, *more, "--blocks", "36")
    assert (first["blocks"], report["blocks"], report["finished"]) == (18, 36, True)
    assert all(1 <= t <= int(w) for w, t in report["tau"].items())
    loaded = load_eagle3(Path(report["drafter"]))
    assert loaded.config.block_size == 4 and loaded.vocabulary.tolist() == frequent(data[1], 30)
    with LLM(data[0], drafter=report["drafter"], max_length=64) as llm:
        wide, plain = (
            llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9, width=w))[0].token_ids for w in (4, 1)
        )
    assert wide == plain
    assert "other options (kind, layers" in refused(*call[:-8], *more, "--kind", "dflash")
    assert "layers: expected 1 of an EAGLE-3 drafter" in refused(*call, "--layers", "2")
    assert "kind: expected one of ['dflash', 'eagle3', 'specblock']" in refused(*call, "--kind", "eagle4")


def test_features_of_other_layers_are_said(cli, data, tmp_path, caplog):
    """Which the folder holds, and the option that takes them; nothing is said where they are taken."""
    answers = shutil.copytree(data[1], tmp_path / "answers")
    call = ("train-draft", answers, "-t", data[0], "--kind", "eagle3", *SMALL[2:], "--blocks", "6", "-o")
    assert cli(*call, tmp_path / "first", "--feature-layers", "0,1").exit_code == 0
    shutil.copytree(tmp_path / "first/features", answers / "features")
    assert cli(*call, tmp_path / "taken", "--feature-layers", "0,1").exit_code == 0
    assert not caplog.text and not (tmp_path / "taken/features").exists()
    for _ in range(2):  # what was read once is not read again
        assert cli(*call, tmp_path / "other", "--feature-layers", "1").exit_code == 0
        assert caplog.text.count("holds features of target layers [0, 1], this drafter reads [1]") == 1
    assert "answers again; --feature-layers 0,1 trains" in caplog.text


def test_a_specblock_drafter(cli_json, refused, data, tmp_path):
    """It loads, decodes two blocks and goes on; what it is without binds the run."""
    call = (
        "train-draft",
        data[1],
        "-t",
        data[0],
        "--kind",
        "specblock",
        *SMALL[2:],
        "--feature-layers",
        "0,1",
    )
    more = ("--widths", "2,4,7", "--validation", "2", "--draft-vocabulary", "30")
    first = cli_json(*call, *more, "-o", tmp_path / "run", "--blocks", "18")
    report = cli_json(*call, *more, "-o", tmp_path / "run", "--blocks", "36")
    assert (first["blocks"], report["blocks"], report["finished"]) == (18, 36, True)
    assert all(1 <= t <= int(w) for w, t in report["tau"].items()) and len(report["accuracy"]) == 6
    loaded = load_specblock(Path(report["drafter"]))
    assert (loaded.config.slots, loaded.config.model.num_layers, loaded.config.shift) == (3, 2, True)
    assert loaded.vocabulary.tolist() == frequent(data[1], 30)
    with LLM(data[0], drafter=report["drafter"], max_length=64) as llm:
        wide, plain = (
            llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9, width=w))[0].token_ids for w in (7, 1)
        )
    assert wide == plain
    bare = cli_json(*call, *more, "-o", tmp_path / "bare", "--blocks", "6", "--without", "shift,valid-prefix")
    assert not load_specblock(Path(bare["drafter"])).config.shift
    run = (*call, *more, "-o", tmp_path / "run")
    assert "other options (without)" in refused(*run, "--without", "valid-prefix")
    assert "without: expected parts of ('shift', 'valid-prefix')" in refused(*run, "--without", "prefix")
    assert "train widths: expected 4 alone of SpecBlock blocks" in refused(*run, "--train-widths", "2,4")
    assert "widths: expected at most 7, 2 blocks of 3 ids" in refused(
        *call, "-o", tmp_path / "run", "--widths", "8"
    )
    assert "of kind 'dflash'" in refused(*run, "--kind", "dflash", "--without", "shift")
