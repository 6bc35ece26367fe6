"""Label files as training reads them: formats, halves, what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from blockpilot.training.dataset import load_examples
from blockpilot.training.label_rows import halves
from blockpilot.training.label_store import read_labels
from tests.training.fakes import (
    HIDDEN,
    VOCAB,
    planted,
    prompts,
    write_labels,
)
from tests.training.label_runs import run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "labels.jsonl"


def test_label_files_of_other_settings_or_ids_do_not_mix(path):
    run(path)
    other = path.with_name("other.jsonl")
    run(other, max_new_tokens=13, items=[{**p, "id": "q" + p["id"]} for p in prompts(4)])
    with pytest.raises(ValueError, match="found other max_new_tokens"):
        load_examples([path, other])
    with pytest.raises(ValueError, match="'p/0' is already in"):
        load_examples([path, path])
    with pytest.raises(ValueError, match="at least 8 usable prompts, got 4"):
        load_examples([other])
    with pytest.raises(ValueError, match=r"among the labelled \[1, 2, 4\], got \[3\]"):
        load_examples([path], window=(2, 3))
    assert load_examples([path], window=(2, 4)).examples.tau.shape == (10, 2)


def test_a_damaged_input_is_named(path):
    run(path)
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    row["input"] = row["input"][: 4 * HIDDEN]
    path.write_text("\n".join([*lines[:2], json.dumps(row), *lines[3:]]) + "\n")
    with pytest.raises(ValueError, match="prompt 'p/1': input: expected 16 float32 values"):
        load_examples([path])


def test_vocabulary_and_size_come_from_the_bound_embedding(path):
    run(path)
    settings, _ = read_labels(path)
    assert (settings["vocabulary"], settings["input_size"], settings["dtype"]) == (VOCAB, HIDDEN, "float32")


def test_a_step_belongs_to_the_half_in_which_it_starts():
    assert halves([2, 1, 3, 1, 1]) == [
        [6, 3],
        [2, 2],
    ]  # 8 tokens: the third step starts at 3, the fourth at 6
    assert halves([1, 1]) == [[1, 1], [1, 1]]
    assert halves([3]) == [[3, 1], [0, 0]] and halves([]) == [[0, 0], [0, 0]]


def test_rows_hold_the_halves_and_the_evaluation_set(path):
    items = [{**p, "dataset": "gsm"} if i < 5 else p for i, p in enumerate(prompts(10))]
    run(path, items=items)
    rows = read_labels(path)[1]
    assert [r["dataset"] for r in rows] == ["gsm"] * 5 + [None] * 5
    for row in rows:
        for tokens, steps, parts in zip(row["committed"], row["steps"], row["halves"], strict=True):
            assert [sum(x) for x in zip(*parts, strict=True)] == [tokens, steps]
    examples = load_examples([path], window=(1, 4)).examples
    first = rows[0]["halves"][2]
    assert examples.halves[0, :, 1].tolist() == pytest.approx([c / s for c, s in first])
    assert examples.halves[:, :, 0].eq(1).all() and examples.datasets[4:6] == ("gsm", None)


def as_format_1(path):
    """Rewrites a label file as it was before rows held dataset and halves."""
    head, *rows = (json.loads(line) for line in path.read_text().splitlines())
    old = [{k: v for k, v in row.items() if k not in ("dataset", "halves")} for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in ({**head, "labels": 1}, *old)))


def test_format_1_is_read_without_halves_and_continued_in_format_1(path):
    run(path, count=12)
    as_format_1(path)
    whole = path.read_bytes()
    settings, rows = read_labels(path)
    assert settings["block_size"] == 4 and rows[0]["halves"] is None and rows[0]["dataset"] is None
    assert load_examples([path]).examples.halves is None
    path.unlink()
    run(path)
    as_format_1(path)
    assert run(path, count=12).skipped == 10
    assert path.read_bytes() == whole


def test_rows_of_both_formats_mix(path):
    run(path)
    as_format_1(path)
    other = path.with_name("other.jsonl")
    run(other, items=[{**p, "id": "q" + p["id"]} for p in prompts(4)])
    found = load_examples([path, other]).examples.halves
    assert found.isnan().all(-1).all(-1).tolist() == [True] * 10 + [False] * 4


def test_plain_needs_no_label(path):
    run(path, window=(2, 4))
    examples = load_examples([path], window=(1, 2, 4)).examples
    assert examples.window == (1, 2, 4) and examples.tau[:, 0].eq(1).all()
    plain = load_examples([path]).examples.with_plain()
    assert torch.equal(plain.tau, examples.tau) and torch.equal(plain.halves, examples.halves)
    assert plain.window == (1, 2, 4) and plain.with_plain() is plain


def test_figures_that_are_no_numbers_are_refused(tmp_path):
    path = write_labels(tmp_path / "labels.jsonl", *planted(3))
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    lines[2] = json.dumps({**row, "tau": [float("nan"), *row["tau"][1:]]})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"line 3.*NaN, which is no JSON number"):
        read_labels(path)
