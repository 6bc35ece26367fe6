"""Where prompts of made data come from, what is dropped and what is refused: a scripted target."""

from __future__ import annotations

import pytest

from blockpilot.training import openings, prompts
from blockpilot.training.answers import read_answers
from tests.training.talking import CHAT, END, ScriptedLLM
from tests.training.test_make_data import contents, make, write


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
