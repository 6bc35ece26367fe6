"""Reading tables of τ: folders, label files, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from blockpilot.training.acceptance import read_acceptance
from blockpilot.training.label_store import LabelStore
from tests.training.acceptance_data import CHOSEN, TAU, WIDTHS, write_set
from tests.training.fakes import WINDOW, label_row, planted, write_labels


def test_a_folder_is_its_subfolders_or_one_set(tmp_path):
    write_set(tmp_path / "b")
    write_set(tmp_path / "a", chosen=False)
    a, b = read_acceptance(tmp_path, 8)
    assert (a.name, b.name) == ("a", "b")
    assert a.widths == WIDTHS and a.window == (6, 7, 8, 9) and a.block_size == 8
    assert a.tau.tolist() == [list(row) for row in TAU.values()]
    assert a.chosen is None and b.chosen == tuple(CHOSEN.values())
    (alone,) = read_acceptance(tmp_path / "a", 8)
    assert np.array_equal(alone.tau, a.tau)


def test_a_label_file_is_one_set_without_its_unusable_rows(tmp_path):
    inputs, tau = planted(9)
    path = write_labels(tmp_path / "mine.jsonl", inputs, tau)
    settings = json.loads(path.read_text().splitlines()[0])["settings"]
    with LabelStore(path, settings) as store:
        store.append([{**label_row(9, inputs[0], [None] * 4), "input": None}])
    (table,) = read_acceptance(path)
    assert (table.name, table.widths, table.window, table.block_size) == ("mine", WINDOW, WINDOW, 4)
    assert np.array_equal(table.tau, tau.double().numpy())
    part = table.group("f1")
    assert part.ids == ("p/1", "p/7") and np.array_equal(part.tau, table.tau[[1, 7]])


def test_groups_keep_their_chosen_widths(tmp_path):
    (table,) = read_acceptance(write_set(tmp_path / "a"), 8)
    assert table.group("a").chosen == table.chosen


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("8.json", "[1]", "expected a JSON object"),
        ("8.json", "{", "expected a JSON object"),
        ("8.json", '{"0": 1, "1": "x", "2": 1, "3": 1}', "prompt '1': expected a finite number"),
        ("8.json", '{"0": 1, "1": NaN, "2": 1, "3": 1}', "prompt '1': expected a finite number"),
        ("8.json", '{"0": 1, "1": -2, "2": 1, "3": 1}', "expected finite τ above 0"),
        ("8.json", '{"0": 1}', "expected the prompts of 4.json"),
        ("1.json", '{"0": 8, "1": 8, "2": 5, "3": 8}', r"chosen widths: .*got \[5\]"),
        ("best.json", '{"0": 8}', "expected files named by width"),
    ],
)
def test_malformed_tables_are_refused(tmp_path, name, text, message):
    folder = write_set(tmp_path / "a")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_acceptance(folder, 8)


def test_other_things_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no JSON files"):
        read_acceptance(tmp_path)
    with pytest.raises(ValueError, match="expected widths near the block size 40"):
        read_acceptance(write_set(tmp_path / "a"), 40)
    with pytest.raises(ValueError, match="readable label file"):
        read_acceptance(tmp_path / "absent.jsonl")
    labels = write_labels(tmp_path / "l.jsonl", *planted(3))
    with pytest.raises(ValueError, match="a label file, which records it, got 8"):
        read_acceptance(labels, 8)
    for name, settings in (("no-window", {"window": None}), ("no-block", {"block_size": "4"})):
        broken = write_labels(tmp_path / f"{name}.jsonl", *planted(3), **settings)
        with pytest.raises(ValueError, match="expected settings with window and block_size"):
            read_acceptance(broken)
    empty = write_labels(tmp_path / "empty.jsonl", *(x[:0] for x in planted(1)))
    with pytest.raises(ValueError, match="none usable of 0"):
        read_acceptance(empty)
