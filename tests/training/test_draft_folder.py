"""What a run of train-draft refuses before it does any work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockpilot.training.draft_folder import DraftOptions, RunFolder, check_rows
from blockpilot.training.draft_training import Recipe

OPTIONS = DraftOptions(Path("answers"), layers=2, block_size=4)


def row(split="train", tokens=8, temperature=0.0):
    return {"split": split, "output_ids": [3] * tokens, "temperature": temperature}


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", 0), ("block_size", 1), ("validation", 0), ("widths", (1, 4)), ("widths", ()), ("every", 0.0),
     ("every", float("nan")), ("draft_vocabulary", -1)],
)  # fmt: skip
def test_options_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        DraftOptions(Path("answers"), **{name: value})


def test_layers_to_start_from():
    assert OPTIONS.starting_layers(5) == (0, 4)
    assert DraftOptions(Path("a"), layers=1).starting_layers(5) == (0,)
    assert DraftOptions(Path("a"), kind="eagle3", layers=1).starting_layers(5) == (4,)
    assert DraftOptions(Path("a"), kind="specblock").starting_layers(5) == (3, 4)
    assert DraftOptions(Path("a"), layers=9, start=()).starting_layers(5) == ()
    for start in ((0,), (0, 5), (-1, 2)):
        with pytest.raises(ValueError, match="expected 2 target layers of 0 to 4"):
            DraftOptions(Path("a"), layers=2, start=start).starting_layers(5)
    with pytest.raises(ValueError, match="at most the target's 1"):
        OPTIONS.starting_layers(1)


def test_answers_that_leave_nothing():
    check_rows([row(), row(), row("validation")], 2, Path("a"))
    with pytest.raises(ValueError, match="at least 3 answers to train on"):
        check_rows([row(), row(), row(tokens=7), row("validation")], 3, Path("a"))
    for held_out in ([], [row("validation", tokens=7)], [row("validation", temperature=0.8)]):
        with pytest.raises(ValueError, match="held-out family"):
            check_rows([row(), row(), *held_out], 2, Path("a"))


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        RunFolder(tmp_path)
    for text in ("{", "[]", '{"answers": 1, "settings": {}}', '{"training": 1}'):
        (tmp_path / "settings.json").write_text(text)
        with pytest.raises(ValueError, match=r"settings\.json: expected the settings of"):
            RunFolder(tmp_path)


def test_settings_bind(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.check(OPTIONS, "target", ["a", "b"])
    run.write(OPTIONS, Recipe(8), "target", ["a", "b"], 7)
    again = RunFolder(tmp_path / "run")
    assert again.found["mask_token_id"] == 7
    again.check(OPTIONS, "target", ["a", "b", "c"])
    with pytest.raises(ValueError, match="other options \\(target\\)"):
        again.check(OPTIONS, "another", ["a", "b"])
    with pytest.raises(ValueError, match="other options \\(layers\\)"):
        again.check(DraftOptions(Path("answers"), layers=3, block_size=4), "target", ["a", "b"])
    with pytest.raises(ValueError, match="other options \\(draft_vocabulary\\)"):
        again.check(replace(OPTIONS, draft_vocabulary=9), "target", ["a", "b"])
    for answers in (["a"], ["b", "a"]):
        with pytest.raises(ValueError, match="other answers"):
            again.check(OPTIONS, "target", answers)


def test_a_run_from_before_there_was_a_draft_vocabulary_goes_on_without_one(tmp_path):
    RunFolder(tmp_path / "run").write(OPTIONS, Recipe(8), "target", ["a"], 7)
    settings = json.loads((tmp_path / "run/settings.json").read_text())
    del settings["options"]["draft_vocabulary"]
    (tmp_path / "run/settings.json").write_text(json.dumps(settings))
    again = RunFolder(tmp_path / "run")
    again.check(replace(OPTIONS, draft_vocabulary=0), "target", ["a"])
    with pytest.raises(ValueError, match="other options \\(draft_vocabulary\\)"):
        again.check(OPTIONS, "target", ["a"])
