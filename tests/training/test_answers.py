"""Folders of answers: whole shards, checked on every reading."""

from __future__ import annotations

import json

import pytest

from blockpilot.training.answers import ROW_KEYS, AnswerStore, prompt_key, read_answers

SETTINGS = {"seed": 3, "dtype": "float32", "validation_families": ["b"]}


def row(number, family="a", **over):
    made = {
        "id": f"p{number}",
        "family": family,
        "split": "validation" if family == "b" else "train",
        "prompt": f"Prompt {number}",
        "prompt_ids": [1, 2],
        "output_ids": [5] * (1 + number),
        "temperature": 0.0,
        "seed": number,
        "finish_reason": "stop",
    }
    return made | over


@pytest.fixture
def folder(tmp_path):
    """Two shards: p0 and p1, then p2 of family b."""
    with AnswerStore(tmp_path / "data", SETTINGS) as store:
        store.append([row(0), row(1)], 3, {"short": 1})
        store.append([row(2, "b")], 3, {"short": 0, "long": 2})
    return tmp_path / "data"


def test_rows_come_back_in_order_and_by_split(folder):
    settings, rows = read_answers(folder)
    assert settings == SETTINGS
    assert rows == [row(0), row(1), row(2, "b")]
    assert read_answers(folder, "train")[1] == rows[:2]
    assert read_answers(folder, "validation")[1] == rows[2:]
    with pytest.raises(ValueError, match="split: expected one of"):
        read_answers(folder, "test")


def test_files_are_what_the_format_says(folder):
    assert sorted(p.name for p in folder.iterdir()) == [
        "00000.jsonl",
        "00001.jsonl",
        "manifest.jsonl",
        "settings.json",
    ]
    assert json.loads((folder / "settings.json").read_text()) == {"answers": 1, "settings": SETTINGS}
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    assert [(s["file"], s["prompts"], s["rows"], s["tokens"]) for s in lines] == [
        ("00000.jsonl", 3, 2, 3),
        ("00001.jsonl", 3, 1, 3),
    ]
    first = (folder / "00000.jsonl").read_text().splitlines()[0]
    assert list(json.loads(first)) == list(ROW_KEYS)


def test_a_reopened_folder_knows_what_it_holds(folder):
    with AnswerStore(folder, SETTINGS) as store:
        assert len(store.shards) == 2 and store.validation == 1
        assert store.families == {"a": 2, "b": 1}
        assert store.seen == {prompt_key(f"prompt  {i}\n") for i in range(3)}
        store.append([], 3, {"long": 3})
    assert len(read_answers(folder)[1]) == 3


def damage(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("00000.jsonl", lambda d: d.replace(b"Prompt 1", b"Prompt 9"), "00000.jsonl: expected sha256"),
        ("00001.jsonl", lambda d: d[:-5], "00001.jsonl: expected sha256"),
        ("manifest.jsonl", lambda d: d.split(b"\n", 1)[1], "line 1: expected 00000.jsonl"),
        ("manifest.jsonl", lambda d: d + d, "line 3: expected 00002.jsonl"),
        ("manifest.jsonl", lambda d: d.replace(b'"rows": 2', b'"rows": 3'), "expected 3 rows"),
        ("manifest.jsonl", lambda d: b"{\n" + d, "line 1: expected a JSON object"),
        ("settings.json", lambda d: d.replace(b'"answers": 1', b'"answers": 2'), "format 1, found 2"),
        ("settings.json", lambda d: d[:-9], "expected the settings of make-data"),
    ],
)
def test_damage_is_refused_by_reader_and_writer(folder, name, change, message):
    damage(folder, name, change)
    for refused in (lambda: read_answers(folder), lambda: AnswerStore(folder, SETTINGS)):
        with pytest.raises(ValueError, match=message):
            refused()


def test_a_missing_shard_is_refused(folder):
    (folder / "00000.jsonl").unlink()
    for refused in (lambda: read_answers(folder), lambda: AnswerStore(folder, SETTINGS)):
        with pytest.raises(
            ValueError, match=r"00000.jsonl: expected a file of a make-data folder, found No such"
        ):
            refused()


def test_a_torn_manifest_is_mended_by_the_writer_and_refused_by_the_reader(folder):
    damage(folder, "manifest.jsonl", lambda d: d[:-7])
    with pytest.raises(ValueError, match="torn line; run make-data again"):
        read_answers(folder)
    with AnswerStore(folder, SETTINGS) as store:
        assert len(store.shards) == 1
    assert [r["id"] for r in read_answers(folder)[1]] == ["p0", "p1"]


def test_ids_are_unique(folder):
    with AnswerStore(folder, SETTINGS) as store:
        store.append([row(1)], 1, {})
    with pytest.raises(ValueError, match=r"every id once, found \['p1'\] again"):
        read_answers(folder)


def test_other_settings_are_refused_one_by_one(folder):
    other = {**SETTINGS, "seed": 4, "weights": "dense"}
    with pytest.raises(ValueError, match="seed: expected 3, got 4; weights: expected None, got 'dense'"):
        AnswerStore(folder, other)


def test_other_folders_and_rows_are_refused(tmp_path, folder):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"expected an empty folder .* found \['data', 'notes.txt'\]"):
        AnswerStore(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r"absent: expected a folder of answers, found nothing"):
        read_answers(tmp_path / "absent")
    with AnswerStore(folder, SETTINGS) as store, pytest.raises(ValueError, match="answer row: expected keys"):
        store.append([{"id": "x"}], 1, {})
    with AnswerStore(folder, SETTINGS) as first, AnswerStore(folder, SETTINGS) as second:
        first.append([row(5)], 1, {})
        with pytest.raises(ValueError, match="another run writes here too"):
            second.append([row(5)], 1, {})


def test_a_folder_without_shards_has_no_answers(tmp_path):
    with AnswerStore(tmp_path / "data", SETTINGS):
        pass
    with pytest.raises(ValueError, match="a line per finished shard, found none"):
        read_answers(tmp_path / "data")
