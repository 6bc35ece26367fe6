"""Making data: what the bytes are that a tiny target makes, in one go or in several."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from blockpilot import LLM
from blockpilot.training.answers import read_answers, read_shards
from blockpilot.training.draft_data import feature_cache, read_answer
from blockpilot.training.make_data import DROPPED, make_data
from blockpilot.training.prompt_sources import DataOptions
from tests.training.talking import END, save_talker

OPTIONS = {"shard_prompts": 7, "max_new_tokens": 6, "prompt_tokens": 260, "sampled": 0.5}


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return save_talker(tmp_path_factory.mktemp("talker") / "target")


def opened(talker, requests=5):
    return LLM(talker, max_requests=requests, max_length=270)


@pytest.fixture(scope="module")
def llm(talker):
    with opened(talker) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(llm, tmp_path_factory):
    """A mixed folder of three shards, made in one go."""
    folder = tmp_path_factory.mktemp("whole")
    return make(llm, folder, count=21)


def make(llm, folder, count=None, **options):
    return make_data(llm, folder, DataOptions(**{**OPTIONS, **options}), count=count, progress=False)


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_rows_are_what_the_target_answers(llm, whole):
    settings, rows = read_answers(whole.path)
    assert settings["target"] == llm.target.fingerprint and settings["source"] == "mixed"
    assert len(rows) >= 10 and len({r["id"] for r in rows}) == len(rows)
    for r in rows:
        assert r["prompt_ids"] == llm.tokenizer.encode_prompt(r["prompt"]) and len(r["prompt_ids"]) <= 260
        assert r["temperature"] == 0 or 0.7 <= r["temperature"] <= 1
        assert r["finish_reason"] == ("stop" if r["output_ids"][-1] == END else "length")
    sampled = [r for r in rows if r["temperature"]]
    assert 0 < len(sampled) < len(rows) and len({r["temperature"] for r in sampled}) > 1


def test_any_row_can_be_made_again_from_itself(llm, whole):
    from blockpilot import SamplingParams

    rows = read_answers(whole.path)[1]
    params = [SamplingParams(max_new_tokens=6, temperature=r["temperature"], seed=r["seed"]) for r in rows]
    outputs = llm.generate([r["prompt_ids"] for r in rows], params)
    assert [o.token_ids for o in outputs] == [r["output_ids"] for r in rows]


def test_the_summary_counts_the_folder(whole):
    rows = read_answers(whole.path)[1]
    assert (whole.prompts, whole.skipped, whole.answered) == (21, 0, len(rows))
    assert whole.tokens == sum(len(r["output_ids"]) for r in rows)
    assert whole.families == Counter(r["family"] for r in rows)
    assert set(whole.dropped) == set(DROPPED) and sum(whole.dropped.values()) == 21 - len(rows)


def test_more_prompts_continue_a_folder_byte_for_byte(talker, whole, tmp_path):
    with opened(talker, requests=2) as other:
        assert make(other, tmp_path, count=5).prompts == 7
        summary = make(other, tmp_path, count=21)
        assert (summary.prompts, summary.skipped) == (21, 7)
        assert make(other, tmp_path, count=1).prompts == 21
    assert contents(tmp_path) == contents(whole.path)
    assert {**vars(summary), "skipped": 0, "path": whole.path} == vars(whole)


@pytest.mark.parametrize("steps", [1, 30])
def test_a_run_killed_inside_a_shard_loses_that_shard_only(llm, whole, tmp_path, monkeypatch, steps):
    make(llm, tmp_path, count=7)
    step, calls = llm.step, iter(range(steps))

    def failing():
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(llm, "step", failing)
        with pytest.raises(KeyboardInterrupt):
            make(llm, tmp_path, count=21)
    (tmp_path / ".00001.jsonl.0a1b2c3d.tmp").write_text('{"id": "ha')
    assert len((tmp_path / "manifest.jsonl").read_text().splitlines()) == 1
    make(llm, tmp_path, count=21)
    assert contents(tmp_path) == contents(whole.path)


@pytest.mark.parametrize("kept", [0, 25])
def test_a_run_killed_before_a_shard_is_listed_writes_it_again(llm, whole, tmp_path, kept):
    make(llm, tmp_path, count=14)
    manifest = tmp_path / "manifest.jsonl"
    first, second, _ = manifest.read_bytes().split(b"\n")
    manifest.write_bytes(first + b"\n" + second[:kept])
    (tmp_path / "00001.jsonl").write_text("anything")
    make(llm, tmp_path, count=21)
    assert contents(tmp_path) == contents(whole.path)


def test_changed_shards_and_settings_are_refused(llm, whole, tmp_path):
    make(llm, tmp_path, count=7)
    with pytest.raises(ValueError, match="max_new_tokens: expected 6, got 5; seed: expected 0, got 1"):
        make(llm, tmp_path, count=14, seed=1, max_new_tokens=5, validation_families=_validation(tmp_path))
    shard = tmp_path / "00000.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"train", b"trains", 1))
    with pytest.raises(ValueError, match=r"00000\.jsonl: expected sha256"):
        make(llm, tmp_path, count=14)


def _validation(folder):
    return tuple(json.loads((folder / "settings.json").read_text())["settings"]["validation_families"])


def test_rows_of_held_out_families_are_for_validation(whole):
    settings, rows = read_answers(whole.path)
    assert all((r["split"] == "validation") == (r["family"] in settings["validation_families"]) for r in rows)


def test_features_kept_beside_the_answers_are_those_of_reading_them(talker, llm, whole, tmp_path):
    summary = make(llm, tmp_path / "data", count=21, features=(0, 2))
    assert llm.target.feature_layers == ()
    settings, shards = read_shards(summary.path)
    assert shards == read_shards(whole.path)[1]
    cache = feature_cache(summary.path, settings["target"], (0, 2))
    with opened(talker, 1) as reader:
        reader.target.use_features((1, 3))
        for name, digest, rows in shards:
            assert cache.has(name, digest)
            for row, read in zip(rows, cache.answers(name, rows), strict=True):
                features, ids, logp = read_answer(reader.target, row["prompt_ids"], row["output_ids"])
                answer = read()
                assert torch.equal(answer.features, features.bfloat16())
                assert torch.equal(answer.teacher_ids, ids.long())
                assert torch.equal(answer.teacher_p, logp.float().exp())


def test_a_shard_without_answers_has_no_features_and_does_no_harm(llm, tmp_path):
    rows = [{"id": str(i), "family": "ab"[i % 2], "prompt": "The same words"} for i in range(4)]
    options = {"source": "file", "prompts": write(tmp_path / "p.jsonl", rows), "shard_prompts": 2}
    summary = make(llm, tmp_path / "data", features=(0, 2), **options)
    assert (summary.prompts, summary.answered, summary.dropped["repeated"]) == (4, 1, 3)
    cache = feature_cache(tmp_path / "data", llm.target.fingerprint, (0, 2))
    (first, digest, kept), (second, other, none) = read_shards(tmp_path / "data")[1]
    assert cache.has(first, digest) and len(kept) == 1
    assert not cache.has(second, other) and not none and not list(cache.answers(second, none))


def test_features_the_target_lacks_are_refused_before_any_work(llm, tmp_path):
    with pytest.raises(ValueError, match=r"expected target layers of 0 to 3, got \[1, 4\]"):
        make(llm, tmp_path / "data", features=(1, 4))
    assert not (tmp_path / "data").exists()
