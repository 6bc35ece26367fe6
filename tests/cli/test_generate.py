"""`blockpilot generate`."""

from __future__ import annotations

import json

import pytest

from blockpilot.cli import generate


def test_answer_goes_to_stdout_and_figures_to_stderr(cli, fake_llm):
    result = cli("generate", "hello", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    words = result.stdout.split()
    assert len(words) == 4 and all(w.isdecimal() for w in words)
    assert "width 4" in result.stderr and "seed 7" in result.stderr


def test_json_is_the_output(cli_json, fake_llm):
    report = cli_json("generate", "hello", "--max-new-tokens", "4", "--seed", "11")
    assert set(report) == set(generate.JSON_KEYS)
    assert report["seed"] == 11
    assert len(report["token_ids"]) == 4
    assert report["stats"]["width"] == 4
    assert report["policy_calls"] == 1


def test_options_reach_the_engine(cli_json, fake_llm):
    options = {
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--weights": "dense",
        "--threads": "1",
        "--max-length": "99",
    }
    arguments = [part for pair in options.items() for part in pair]
    cli_json("generate", "hello", "--drafter", "none", "--policy", "none", "--width", "1", *arguments)
    (opened,) = fake_llm.opened
    assert opened == {
        "target": "smollm2",
        "drafter": None,
        "policy": None,
        "device": "cpu",
        "dtype": "bfloat16",
        "weights": "dense",
        "max_requests": 1,
        "max_length": 99,
        "threads": 1,
    }
    assert fake_llm.asked == [("hello", 1, None)]


@pytest.mark.parametrize(
    ("arguments", "drafter", "policy"),
    [
        ([], "bundled+lookup", "bundled"),
        (["--policy", "fixed:3"], "bundled+lookup", 3),
        (["--policy", "fixed:6/16"], "bundled+lookup", "6/16"),
        (["--drafter", "bundled"], "bundled", None),
        (["--drafter", "none"], None, None),
        (["--target", "some/model"], None, None),
        (["--target", "some/model", "--drafter", "bundled+lookup"], "bundled+lookup", "bundled"),
    ],
)
def test_defaults_follow_the_target(cli_json, fake_llm, arguments, drafter, policy):
    cli_json("generate", "hello", *arguments)
    (opened,) = fake_llm.opened
    assert (opened["drafter"], opened["policy"]) == (drafter, policy)


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_prompt_from_stdin(cli, fake_llm, arguments):
    assert cli("generate", *arguments, input="from stdin\n").exit_code == 0
    assert fake_llm.asked[0][0] == "from stdin\n"


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"messages": m}])
def test_chat_file(cli, fake_llm, tmp_path, wrap):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(wrap(messages)))
    assert cli("generate", "--chat", file).exit_code == 0
    assert json.loads(fake_llm.asked[0][0]) == messages


@pytest.mark.parametrize(
    "content", ["[]", "{}", '["x"]', '[{"role": "user"}]', "{", '[{"role": 1, "content": "x"}]']
)
def test_a_bad_chat_file_is_named(refused, fake_llm, tmp_path, content):
    file = tmp_path / "chat.json"
    file.write_text(content)
    assert "chat.json: expected" in refused("generate", "--chat", file)


def test_a_missing_chat_file_is_named(refused, fake_llm, tmp_path):
    assert "absent.json" in refused("generate", "--chat", tmp_path / "absent.json")


def test_prompt_and_chat_together_are_refused(refused, fake_llm, tmp_path):
    assert "got both" in refused("generate", "hello", "--chat", tmp_path / "chat.json")


def test_an_empty_prompt_is_refused(refused, fake_llm):
    assert "empty" in refused("generate", input=" \n")


def test_a_failed_request_exits_with_1(cli, cli_json, fake_llm):
    fake_llm.error = ArithmeticError("logits are not finite")
    result = cli("generate", "hello")
    assert result.exit_code == 1
    assert "error: the request failed: logits are not finite" in result.stderr
    assert cli_json("generate", "hello", code=1)["error"] == "ArithmeticError: logits are not finite"


def test_model_text_is_not_markup(cli, fake_llm, monkeypatch):
    def answer(self, prompt, params):
        output = original(self, prompt, params)
        return type(output)(**{**vars(output), "text": "[red]x[/red] :smile: " + "long " * 60})

    original = fake_llm._answer
    monkeypatch.setattr(fake_llm, "_answer", answer)
    result = cli("generate", "hello")
    assert result.stdout == "[red]x[/red] :smile: " + "long " * 60 + "\n"
