"""The prompt generator, the split, and the check against evaluation files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from blockpilot.training.prompts import (
    FAMILIES,
    contamination,
    generate_prompts,
    read_prompts,
    split,
    words,
    write_prompts,
)


def test_default_prompts_are_many_distinct_and_of_many_families():
    prompts = generate_prompts()
    assert len(prompts) == 720 and len(FAMILIES) >= 12
    assert len({p["id"] for p in prompts}) == 720
    assert len({" ".join(words(p["prompt"])) for p in prompts}) == 720
    counts = Counter(p["family"] for p in prompts)
    assert set(counts) == set(FAMILIES) and max(counts.values()) - min(counts.values()) <= 1


def test_families_vary_in_words():
    prompts = generate_prompts()
    for family in FAMILIES:
        texts = [p["prompt"] for p in prompts if p["family"] == family]
        vocabulary = {w for t in texts for w in words(t)}
        assert len(vocabulary) > 60, family
        openings = Counter(" ".join(words(t)[:6]) for t in texts)
        assert openings.most_common(1)[0][1] <= len(texts) / 2, family


def test_texts_are_whole():
    for p in generate_prompts(2000, seed=3):
        text = p["prompt"]
        assert (
            text == text.strip()
            and "  " not in text.replace("    ", "")
            and "{t}" not in text
            and "{m}" not in text
        )
        assert 3 <= len(words(text)) <= 150


def test_a_seed_gives_the_same_prompts_in_every_process():
    code = (
        "import json; from blockpilot.training.prompts import *; print(json.dumps(generate_prompts(100, 7)))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(h)},
            capture_output=True,
            check=True,
        ).stdout
        for h in (1, 2)
    }
    assert [json.loads(t) for t in texts] == [generate_prompts(100, 7)]
    assert generate_prompts(100, 8) != generate_prompts(100, 7)


def test_fewer_prompts_are_a_prefix_of_more():
    assert generate_prompts(60) == generate_prompts(200)[:60]


def test_an_exhausted_family_is_named_and_bad_counts_refused():
    with pytest.raises(ValueError, match=r"family '\w+' has no more than about \d+ distinct prompts"):
        generate_prompts(100_000)
    with pytest.raises(ValueError, match="expected at least 1"):
        generate_prompts(0)


def test_files_round_trip(tmp_path):
    path = tmp_path / "prompts.jsonl"
    write_prompts(generate_prompts(50), path)
    assert read_prompts(path) == generate_prompts(50)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_separators_inside_strings_end_no_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    prompts = [{"id": "a", "family": "f", "prompt": "one\u2028two\u0085three\u2029four\x0cfive"}]
    write_prompts(prompts, path)
    assert read_prompts(path) == prompts


def test_a_prompt_of_an_evaluation_set_needs_no_family(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "dataset": "gsm", "prompt": "x"},
        {"id": "b", "family": "f", "prompt": "y", "dataset": "c"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(path) == [{**rows[0], "family": "gsm"}, rows[1]]


def test_several_files_are_one_after_another_with_ids_fresh_in_all(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_prompts(generate_prompts(3), first)
    second.write_text('{"id": "b", "dataset": "d", "prompt": "x"}\n')
    assert [p["id"] for p in read_prompts(first, second)] == [*(p["id"] for p in generate_prompts(3)), "b"]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: expected a fresh id"):
        read_prompts(first, second, first)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a", "family": "f"}\n', r"line 1: .*missing \['prompt'\]"),
        ('{"id": "a", "family": "f", "prompt": "x"}\n' * 2, "line 2: expected a fresh id"),
        ("[1]\n", "line 1: expected a JSON object, got list"),
        ("{\n", "line 1: expected a JSON object"),
        ("\n", "empty file"),
    ],
)
def test_bad_prompt_files_are_refused_by_line(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


LONG = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron"


def evaluation(tmp_path, *records):
    path = tmp_path / "evaluation.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return [path]


def test_a_planted_overlap_is_found_whatever_the_case_and_punctuation(tmp_path):
    copied = "Please read: " + LONG.title().replace(" ", ", ") + "."
    prompts = [{"id": "x", "family": "f", "prompt": copied}, *generate_prompts(50)]
    found = contamination(
        prompts, evaluation(tmp_path, {"id": "e7", "turns": [{"text": f"well {LONG} end"}]})
    )
    assert [(o.prompt_id, o.file, o.evaluation_id) for o in found] == [("x", "evaluation.jsonl", "e7")]
    assert len(found[0].gram.split()) == 13


def test_twelve_shared_words_are_no_overlap_and_thirteen_are(tmp_path):
    files = evaluation(tmp_path, {"id": "e", "prompt": f"{LONG} and more"})
    w = LONG.split()
    of = [{"id": str(n), "family": "f", "prompt": "so " + " ".join(w[1 : 1 + n]) + " then"} for n in (12, 13)]
    assert [o.prompt_id for o in contamination(of, files)] == ["13"]
    assert [o.prompt_id for o in contamination(of, files, n=12)] == ["12", "13"]


def test_a_short_evaluation_text_counts_when_all_of_it_occurs(tmp_path):
    files = evaluation(
        tmp_path, {"id": "e", "prompt": "Who painted the old bridge?"}, {"id": "f", "prompt": "Hello there"}
    )
    of = [
        {"id": "whole", "family": "f", "prompt": "Tell me who painted the old bridge, hello there"},
        {"id": "part", "family": "f", "prompt": "Who painted the new bridge?"},
    ]
    assert [(o.prompt_id, o.evaluation_id) for o in contamination(of, files)] == [("whole", "e")]


def test_generated_prompts_are_found_in_a_copy_of_themselves(tmp_path):
    prompts = [p for p in generate_prompts(200) if len(words(p["prompt"])) >= 5]
    found = contamination(prompts, evaluation(tmp_path, *prompts))
    assert {o.prompt_id for o in found} == {p["id"] for p in prompts}


def test_random_split_parts_everything_once():
    items = generate_prompts(101)
    train, held = split(items, 0.25, seed=1)
    assert len(held) == 25 and len(train) == 76
    assert sorted(p["id"] for p in train + held) == sorted(p["id"] for p in items)
    assert split(items, 0.25, seed=1) == (train, held)
    assert split(items, 0.25, seed=2)[1] != held


def test_family_split_shares_no_family():
    items = generate_prompts(210)
    train, held = split(items, 0.25, seed=1, by="family")
    assert {p["family"] for p in train}.isdisjoint({p["family"] for p in held})
    assert 0.25 * 210 <= len(held) <= 0.25 * 210 + 10 and len(train) + len(held) == 210


@pytest.mark.parametrize(
    ("share", "by", "message"),
    [
        (0, "random", "held_out"),
        (1.0, "random", "held_out"),
        (0.2, "topic", "'random' or 'family'"),
        (0.9, "family", "nothing is left"),
    ],
)
def test_bad_splits_are_refused(share, by, message):
    items = [{"id": str(i), "family": "one", "prompt": "x"} for i in range(10)]
    with pytest.raises(ValueError, match=message):
        split(items, share, by=by)


def test_half_characters_are_refused_before_any_work(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "a", "family": "f", "prompt": "half \ud83d"}) + "\n")
    with pytest.raises(ValueError, match="line 1: expected valid Unicode text"):
        read_prompts(path)
