"""`blockpilot train-draft`: from a folder of answers to a drafter that loads, stopped and continued."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import torch

from blockpilot import LLM
from blockpilot.cli import train_draft
from blockpilot.drafters.dflash_checkpoint import load_dflash
from blockpilot.params import SamplingParams
from blockpilot.targets.stored import read_tensor, stored_tensors
from blockpilot.training import draft_training
from blockpilot.training.draft_training import DraftTrainer
from tests.training.talking import END

SMALL = ("--layers", "1", "--block-size", "4", "--batch", "2", "--anchors", "3", "--vocabulary", "64")


def run(cli_json, data, folder, *more):
    return cli_json("train-draft", data[1], "-o", folder, "-t", data[0], *SMALL, "--widths", "2,4", *more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: read_tensor(t, name) for name, t in stored_tensors(folder / "drafter").items()}


def test_a_drafter_that_loads(cli_json, data, tmp_path):
    report = run(cli_json, data, tmp_path / "run", "--blocks", "36", "--validation", "3")
    assert set(report) == set(train_draft.JSON_KEYS)
    assert (report["blocks"], report["finished"]) == (36, True)
    assert set(report["tau"]) == {"2", "4"} and all(1 <= t <= 4 for t in report["tau"].values())
    lines = [json.loads(x) for x in Path(report["log"]).read_text().splitlines()]
    assert {x["kind"] for x in lines} == {"train", "validation"}
    assert len(lines[0]["accuracy"]) == 3 and lines[0]["loss"] > 0
    assert (tmp_path / "run/curve.png").read_bytes().startswith(b"\x89PNG")
    with LLM(data[0], drafter=report["drafter"], max_length=64) as llm:
        wide, plain = (
            llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9, width=w))[0].token_ids for w in (4, 1)
        )
    assert wide == plain


def frequent(answers: Path, size: int) -> list[int]:
    """The most frequent ids of the training answers and the end of a turn, counted here."""
    from blockpilot.training.answers import read_shards

    rows = [r for _, _, shard in read_shards(answers)[1] for r in shard if len(r["output_ids"]) >= 8]
    counts = Counter(i for r in rows if r["split"] == "train" for i in r["output_ids"])
    order = sorted(range(1000), key=lambda i: (i != END, -counts[i], i))
    return sorted(order[:size])


def test_a_drafter_of_the_most_frequent_ids(cli_json, data, tmp_path, monkeypatch):
    """Its τ is measured with these ids, and it decodes."""
    given = []
    measure = draft_training.validate
    monkeypatch.setattr(draft_training, "validate", lambda *a: given.append(a[-1]) or measure(*a))
    more = ("--blocks", "12", "--validation", "3", "--draft-vocabulary")
    report = run(cli_json, data, tmp_path / "run", *more, "20")
    ids = load_dflash(Path(report["drafter"])).vocabulary
    assert ids.tolist() == frequent(data[1], 20) and END in ids
    assert given and all(torch.equal(v, ids) for v in given)
    with LLM(data[0], drafter=report["drafter"], max_length=64) as llm:
        wide, plain = (
            llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9, width=w))[0].token_ids for w in (4, 1)
        )
    assert wide == plain
    report = run(cli_json, data, tmp_path / "one", *more, "1")  # the end of a turn is never left out
    assert load_dflash(Path(report["drafter"])).vocabulary.tolist() == [END] != ids.tolist()
    given.clear()
    for size in ("0", "100000"):
        report = run(cli_json, data, tmp_path / size, *more, size)
        assert load_dflash(Path(report["drafter"])).vocabulary is None
    assert given == [None, None]


def test_a_folder_that_is_not_there_is_said_once(refused, tmp_path):
    (tmp_path / "file").touch()
    for name, found in (("absent", "nothing"), ("file", "a file")):
        line = refused("train-draft", tmp_path / name, "-o", tmp_path / "run")
        assert line.count("expected") == 1
        assert f"expected a folder of answers, found {found}; make one with `blockpilot make-data`" in line


def test_a_stopped_run_ends_as_one_that_was_not(cli_json, data, tmp_path):
    run(cli_json, data, tmp_path / "whole", "--blocks", "36", "--validation", "1")
    stopped = run(cli_json, data, tmp_path / "part", "--blocks", "36", "--minutes", "0", "--validation", "1")
    assert (stopped["blocks"], stopped["finished"]) == (0, False)
    ended = run(cli_json, data, tmp_path / "part", "--blocks", "36", "--validation", "1")
    assert ended["finished"]
    ours, theirs = weights(tmp_path / "part"), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_an_interrupted_run_keeps_its_steps(cli, cli_json, data, tmp_path, monkeypatch):
    """SIGTERM within the third step: the state after it is there, and the end is that of an undisturbed run."""
    step, seen = DraftTrainer.step, []

    def interrupting(self):
        seen.append(None)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(DraftTrainer, "step", interrupting)
    call = ("train-draft", data[1], "-o", tmp_path / "part", "-t", data[0], *SMALL, "--blocks", "36")
    result = cli(*call, "--validation", "1")
    assert result.exit_code == 130 and len(seen) == 3
    run(cli_json, data, tmp_path / "part", "--blocks", "36", "--validation", "1")
    assert len(seen) == 6
    run(cli_json, data, tmp_path / "whole", "--blocks", "36", "--validation", "1")
    ours, theirs = weights(tmp_path / "part"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def test_what_does_not_fit_is_refused(cli_json, refused, data, tmp_path):
    call = ("train-draft", data[1], "-t", data[0])
    run(cli_json, data, tmp_path / "run", "--blocks", "6", "--validation", "1")
    assert "other options (layers, block_size);" in refused(*call, "-o", tmp_path / "run")
    assert "low,high" in refused(*call, "-o", tmp_path / "x", "--train-widths", "5,3")
    assert "--minutes" in refused(*call, "-o", tmp_path / "x", "--minutes", "nan")
    assert "layer numbers" in refused(*call, "-o", tmp_path / "x", "--start", "first")
    assert "another target's" in refused("train-draft", data[1], "-o", tmp_path / "x")
    kept = (tmp_path / "run/settings.json").read_bytes()
    again = ("--blocks", "6", "--validation", "1")
    more = (*call, "-o", tmp_path / "run", *SMALL, *again)
    assert "another recipe (gamma: 4.0, not 2.0)" in refused(*more, "--gamma", "2")
    assert (tmp_path / "run/settings.json").read_bytes() == kept
    assert "expected 1 target layers" in refused(*call, "-o", tmp_path / "new", *SMALL, "--start", "99")
    assert not (tmp_path / "new").exists()
    (tmp_path / "run/drafter/notes.txt").touch()
    assert "notes.txt" in refused(*more)


def test_answers_may_grow_and_not_change(cli_json, refused, data, tmp_path):
    """The folder of answers counts, not its name."""
    from blockpilot.training.answers import AnswerStore, read_shards

    settings, shards = read_shards(data[1])

    def write(folder, chosen):
        with AnswerStore(folder, settings) as store:
            for i in chosen:
                store.append(shards[i][2], 8, {})
        return data[0], folder

    part = write(tmp_path / "part", range(5))
    run(cli_json, part, tmp_path / "run", "--blocks", "6", "--validation", "1")
    other = write(tmp_path / "other", [1, 0, 2, 3, 4, 5])
    call = ("train-draft", other[1], "-t", data[0], "-o", tmp_path / "run", *SMALL, "--widths", "2,4")
    assert "learns from other answers" in refused(*call, "--blocks", "12", "--validation", "1")
    assert run(cli_json, data, tmp_path / "run", "--blocks", "12", "--validation", "1")["blocks"] == 12
    few = ("--validation", "1", "--draft-vocabulary", "30", "--blocks")
    run(cli_json, part, tmp_path / "few", *few, "6")
    kept = load_dflash(tmp_path / "few/drafter").vocabulary
    assert run(cli_json, data, tmp_path / "few", *few, "12")["blocks"] == 12
    assert torch.equal(load_dflash(tmp_path / "few/drafter").vocabulary, kept)
    assert kept.tolist() == frequent(part[1], 30) != frequent(data[1], 30)


def test_answers_of_the_held_out_families_may_be_the_longest(cli_json, data, tmp_path):
    """They and wide blocks need positions that no training answer has."""
    from blockpilot.training.answers import AnswerStore, read_shards

    settings, shards = read_shards(data[1])
    rows = [r for _, _, shard in shards for r in shard if len(r["output_ids"]) >= 8]
    rows.sort(key=lambda r: len(r["prompt_ids"]) + len(r["output_ids"]))
    rows = [r | {"split": "train"} for r in rows[:4]] + [
        rows[-1] | {"split": "validation", "temperature": 0.0}
    ]
    with AnswerStore(tmp_path / "answers", settings) as store:
        store.append(rows, 5, {})
        store.append([], 3, {"failed": 3})
    assert len(rows[-1]["prompt_ids"]) > len(rows[3]["prompt_ids"]) + 40
    wide = ("--train-widths", "2,12", "--blocks", "12")
    assert run(cli_json, (data[0], tmp_path / "answers"), tmp_path / "run", *wide)["finished"]


def test_a_run_killed_while_it_validates_has_its_steps(cli, cli_json, data, tmp_path, monkeypatch):
    call = ("train-draft", data[1], "-o", tmp_path / "run", "-t", data[0], *SMALL, "--blocks", "36")
    with monkeypatch.context() as patched:
        patched.setattr(DraftTrainer, "validate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli(*call, "--validation", "1").exit_code == 130
    log = tmp_path / "run/log.jsonl"
    log.write_text(log.read_text() + '{"kind": "validation", "step": 6, "tau": {"4": 1.5}')
    monkeypatch.setattr(DraftTrainer, "step", None)
    assert run(cli_json, data, tmp_path / "run", "--blocks", "36", "--validation", "1")["finished"]
    assert [json.loads(x)["kind"] for x in log.read_text().splitlines()] == ["train", "validation"]


def test_without_matplotlib_all_but_the_picture_is_there(cli, data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    call = ("train-draft", data[1], "-o", tmp_path / "run", "-t", data[0], *SMALL, "--blocks", "6")
    result = cli(*call, "--json")
    assert result.exit_code == 0 and "no curve.png: pictures need matplotlib" in result.stderr
    assert json.loads(result.stdout)["finished"]


def test_two_runs_in_one_folder_do_not_mix(refused, data, tmp_path, monkeypatch):
    step = DraftTrainer.step

    def beside(self):
        with (tmp_path / "run/log.jsonl").open("a") as file:
            file.write("{}\n")
        return step(self)

    monkeypatch.setattr(DraftTrainer, "step", beside)
    call = ("train-draft", data[1], "-o", tmp_path / "run", "-t", data[0], *SMALL, "--blocks", "6")
    assert "another run writes here too" in refused(*call)
    assert not (tmp_path / "run/state.safetensors").exists()
