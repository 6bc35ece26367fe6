"""Making data: a tiny target for what the bytes are, a scripted one for what is dropped."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from blockpilot import LLM
from blockpilot.training import openings, prompts
from blockpilot.training.answers import read_answers, read_shards
from blockpilot.training.draft_data import feature_cache, read_answer
from blockpilot.training.make_data import DROPPED, make_data
from blockpilot.training.prompt_sources import DataOptions
from tests.training.talking import CHAT, END, ScriptedLLM, save_talker

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


# What is dropped, and from where prompts come.


def chatty(text, opened):
    """Ends every turn; answers differ by prompt."""
    words = f" {sum(map(ord, text))} times over and over"
    return (words if opened else f"Answer:{words}"), "stop"


def test_own_prompts_are_the_generators(tmp_path):
    llm = ScriptedLLM(chatty)
    make(llm, tmp_path, count=40, source="own", prompt_tokens=2000)
    rows = read_answers(tmp_path)[1]
    assert len(rows) == 42 and set(prompts.FAMILIES) == {r["family"] for r in rows}
    expected = prompts.generate_prompts(42, seed=1_000_000)
    assert [(r["id"], r["prompt"]) for r in rows] == [(p["id"], p["prompt"]) for p in expected]
    assert {r["prompt"] for r in rows}.isdisjoint(p["prompt"] for p in prompts.generate_prompts(720))


def test_the_target_continues_openings(tmp_path):
    llm = ScriptedLLM(chatty)
    summary = make(llm, tmp_path, count=70, source="target", prompt_tokens=400)
    rows = read_answers(tmp_path)[1]
    assert summary.answered == len(rows) > 50 and len({r["family"] for r in rows}) > 8
    assert set(summary.families) <= set(openings.FAMILIES)
    assert all(" times over and over" in r["prompt"] and r["id"].startswith("target/") for r in rows)
    boxed = [r for r in rows if "\\boxed{}" in r["prompt"]]
    assert boxed and all(r["family"] in ("word_problem", "mathematics") for r in boxed)
    made = [p for text, p in llm.asked if not text.endswith("assistant\n")]
    assert {(p.temperature, p.top_p, p.max_new_tokens) for p in made} == {(0.9, 0.92, 200)}
    assert all(p.stop_token_ids == (END,) for p in made) and len({p.seed for p in made}) == 70


def test_repeated_prompts_are_dropped_alike_after_a_resume(tmp_path):
    folders = [tmp_path / name for name in ("whole", "parts")]
    summary = make(ScriptedLLM(chatty), folders[0], count=70, source="target", prompt_tokens=400)
    for count in range(7, 71, 7):
        make(ScriptedLLM(chatty), folders[1], count=count, source="target", prompt_tokens=400)
    assert summary.dropped["repeated"] > 5 and contents(folders[0]) == contents(folders[1])
    texts = [r["prompt"].lower().split() for r in read_answers(folders[0])[1]]
    assert len({tuple(t) for t in texts}) == len(texts)


def test_a_mixture_is_one_to_six(tmp_path):
    summary = make(ScriptedLLM(chatty), tmp_path, count=70, prompt_tokens=2000)
    rows = read_answers(tmp_path)[1]
    made = sum(r["id"].startswith("target/") for r in rows)
    assert len(rows) - made == 10 and made + summary.dropped["repeated"] == 60


def test_a_file_is_answered_to_its_end(tmp_path):
    given = [{"id": f"q{i}", "family": f"f{i % 4}", "prompt": f"Question number {i}?"} for i in range(10)]
    path = write(tmp_path / "p.jsonl", given)
    llm = ScriptedLLM(chatty, template=None)
    options = {"source": "file", "prompts": path, "sampled": 0}
    assert make(llm, tmp_path / "data", count=3, **options).prompts == 7
    summary = make(llm, tmp_path / "data", **options)
    assert (summary.prompts, summary.skipped, summary.answered) == (10, 7, 10)
    rows = read_answers(tmp_path / "data")[1]
    assert [{k: r[k] for k in ("id", "family", "prompt")} for r in rows] == given
    assert {r["temperature"] for r in rows} == {0.0}
    write(path, given[:9])
    with pytest.raises(ValueError, match="prompts: expected '"):
        make(llm, tmp_path / "data", **options)


def test_a_target_without_a_template_makes_no_prompts(tmp_path):
    llm = ScriptedLLM(chatty, template=None)
    with pytest.raises(ValueError, match="need a chat template"):
        make(llm, tmp_path, count=1)
    assert not list(tmp_path.iterdir())


def test_prompts_that_are_no_prompts_are_dropped_by_reason(tmp_path):
    said = iter([("x", "stop"), ("and on and on", "length"), ("oh", "error"), ("x" * 900, "stop")])

    def script(text, opened):
        return next(said, (" and the same", "stop")) if opened else ("Yes.", "stop")

    summary = make(ScriptedLLM(script), tmp_path, count=98, source="target")
    rows = read_answers(tmp_path)[1]
    assert summary.dropped["unfinished"] == summary.dropped["failed"] == summary.dropped["long"] == 1
    texts = [" ".join(r["prompt"].lower().split()) for r in rows]
    assert len(set(texts)) == len(texts) and summary.dropped["repeated"] > 0
    assert all(len(r["prompt"]) >= 12 for r in rows)


def test_short_prompts_are_dropped(tmp_path):
    summary = make(ScriptedLLM(lambda text, opened: ("", "stop")), tmp_path, count=70, source="target")
    assert summary.dropped["short"] > 10
    assert all(len(r["prompt"]) >= 12 for r in read_answers(tmp_path)[1])


RUN = "one two three four five six seven eight nine ten eleven twelve thirteen"


def test_what_evaluation_files_hold_is_dropped(tmp_path):
    texts = {
        "in the prompt": f"Say: {RUN.title()}!",
        "in the answer": "Count, please.",
        "twelve": RUN[:-9] + "?",
    }
    given = [{"id": k, "family": "f", "prompt": v} for k, v in texts.items()]
    path = write(tmp_path / "p.jsonl", given)
    evaluation = write(tmp_path / "e.jsonl", [{"id": "e", "turns": [f"first {RUN} last"]}])
    llm = ScriptedLLM(lambda text, opened: (f"So {RUN}" if "Count" in text else "No.", "stop"))
    options = {"source": "file", "prompts": path}
    summary = make(llm, tmp_path / "data", against=(evaluation,), **options)
    assert [r["id"] for r in read_answers(tmp_path / "data")[1]] == ["twelve"]
    assert (summary.dropped["contaminated"], summary.dropped["contaminated_answer"]) == (1, 1)
    assert not any("Thirteen" in text for text, _ in llm.asked)
    with pytest.raises(ValueError, match="against: expected "):
        make(llm, tmp_path / "data", **options)
    assert make(llm, tmp_path / "clean", **options).answered == 3


def test_failed_answers_are_dropped(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"id": "a", "family": "f", "prompt": "Go."}])
    llm = ScriptedLLM(lambda text, opened: ("x", "error"))
    summary = make(llm, tmp_path / "data", source="file", prompts=path)
    assert (summary.answered, summary.dropped["failed"]) == (0, 1)


def test_rows_of_held_out_families_are_for_validation(whole):
    settings, rows = read_answers(whole.path)
    assert all((r["split"] == "validation") == (r["family"] in settings["validation_families"]) for r in rows)


def test_named_families_are_held_out(tmp_path):
    summary = make(
        ScriptedLLM(chatty), tmp_path, count=21, source="own", validation_families=("story", "table")
    )
    held = read_answers(tmp_path, "validation")[1]
    assert {r["family"] for r in held} == {"story", "table"} and summary.validation == len(held)
    assert not {r["family"] for r in read_answers(tmp_path, "train")[1]} & {"story", "table"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"validation_families": ("stories",)},
            r"validation_families: expected some of .* got \['stories'\]",
        ),
        ({"source": "own", "validation_families": prompts.FAMILIES}, "nothing is left to train on"),
        ({"source": "web"}, "source: expected one of"),
        ({"source": "file"}, "prompts: a file of prompts goes with source 'file'"),
        ({"prompts": "x.jsonl"}, "prompts: a file of prompts goes with source 'file'"),
        ({"sampled": 1.5}, "sampled: expected a share"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        ({"shard_prompts": 2000}, "shard_prompts: expected at most 1000"),
        ({"against": ("absent.jsonl",)}, "absent.jsonl: expected a readable"),
        ({"max_new_tokens": 5000}, "llm: expected max_length >= 5260"),
        ({"count": 0}, "count: expected at least 1"),
        ({"source": "own", "count": 100_000}, r"needs 100002 of the generator's prompts .* no such limit"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make(ScriptedLLM(chatty, CHAT), tmp_path, **{"count": 7, **options})
    assert not list(tmp_path.iterdir())


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
