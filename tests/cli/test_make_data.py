"""`blockpilot make-data`: a tiny target from the command line to the folder."""

from __future__ import annotations

import json

import pytest

from blockpilot.cli import make_data
from blockpilot.training.answers import read_answers
from tests.training.talking import save_talker

SMALL = ("--shard-prompts", "4", "-n", "5", "--prompt-tokens", "240", "--batch", "3")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return save_talker(tmp_path_factory.mktemp("talker") / "target")


def test_json_says_what_the_folder_holds(cli_json, cli, talker, tmp_path):
    evaluation = tmp_path / "e.jsonl"
    evaluation.write_text('{"id": "e", "prompt": "nothing of this will occur anywhere"}\n')
    folder = tmp_path / "data"
    arguments = ("make-data", "-t", talker, "-o", folder, *SMALL, "--seed", "5", "--against", evaluation)
    report = cli_json(
        *arguments,
        "--count",
        "6",
        "--sampled",
        "1",
        "--validation-families",
        "story,table",
        "--features",
        "0,1",
    )
    assert list((folder / "features").glob("*.safetensors"))
    assert set(report) == set(make_data.JSON_KEYS)
    settings, rows = read_answers(folder)
    assert (report["prompts"], report["skipped"], report["path"]) == (8, 0, str(folder))
    assert report["answered"] == len(rows) == 8 - sum(report["dropped"].values())
    assert report["tokens"] == sum(len(r["output_ids"]) for r in rows)
    assert sum(report["families"].values()) == len(rows)
    assert all(r["temperature"] >= 0.7 for r in rows)
    assert (settings["source"], settings["seed"], settings["max_new_tokens"]) == ("mixed", 5, 5)
    assert (settings["prompt_tokens"], settings["shard_prompts"], settings["weights"]) == (240, 4, "dense")
    assert settings["validation_families"] == ["story", "table"] and len(settings["against"]) == 1

    result = cli(*arguments, "--count", "12", "--sampled", "1", "--validation-families", "story,table")
    assert result.exit_code == 0, result.output
    assert f"of 12 prompts answered in {folder}" in result.stdout and "earlier runs: 8" in result.stdout


def test_prompts_of_a_file_need_no_source(cli_json, cli, refused, talker, tmp_path):
    file, folder = tmp_path / "p.jsonl", tmp_path / "data"
    rows = [{"id": f"q{i}", "family": f"f{i}", "prompt": f"Question {i}?"} for i in range(5)]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    arguments = ("make-data", "-t", talker, "-o", folder, *SMALL, "--prompts", file)
    report = cli_json(*arguments, "--validation-families", "none")
    assert (report["prompts"], report["answered"], report["validation"]) == (5, 5, 0)
    assert "sampled: expected 0.2, got 0.5; validation_families" in refused(*arguments, "--sampled", "0.5")
    assert "source 'file' and no other" in refused(*arguments, "--source", "own")


def test_mistakes_are_refused_before_the_target_is_loaded(refused, fake_llm, tmp_path):
    assert "--source" in refused("make-data", "-o", tmp_path / "x", "--source", "web")
    assert "sampled: expected a share" in refused("make-data", "-o", tmp_path / "x", "--sampled", "2")
    assert fake_llm.opened == [] and not (tmp_path / "x").exists()
