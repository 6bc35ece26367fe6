"""`blockpilot demo`."""

from __future__ import annotations

from blockpilot.cli import demo


def test_last_line_says_identical(cli, fake_llm):
    result = cli("demo", "--max-new-tokens", "8")
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().splitlines()[-1] == "identical: yes"
    assert result.stdout.count("policy called once") == 3
    assert "width 4" in result.stdout


def test_a_difference_is_named_and_exits_with_1(cli, fake_llm):
    fake_llm.wrong = staticmethod(lambda prompt, width: width > 1 and "bakery" in prompt)
    result = cli("demo", "--max-new-tokens", "8")
    assert result.exit_code == 1
    last = result.stdout.rstrip().splitlines()[-1]
    assert last == "identical: NO, first difference in word_problem/1 at token 2"
    assert "speculative / plain" not in result.stdout


def test_a_streamed_answer_that_differs_is_a_difference(cli_json, fake_llm, monkeypatch):
    stream = fake_llm.stream

    def other_seed(self, prompt, params):
        return stream(self, prompt + "!", params)

    monkeypatch.setattr(fake_llm, "stream", other_seed)
    report = cli_json("demo", "--max-new-tokens", "8", code=1)
    assert report["identical"] is False
    assert report["first_difference"]["id"] == "word_problem/1"


def test_json_keys(cli_json, fake_llm):
    report = cli_json("demo", "--max-new-tokens", "9")
    assert set(report) == set(demo.JSON_KEYS)
    assert report["identical"] is True and report["first_difference"] is None
    assert report["width"] == [4, 4, 4]
    assert report["policy_calls"] == [1, 1, 1]
    assert report["tau"] == 8 / 2
    assert report["acceptance_by_offset"] == [1.0, 0.0, 0.0]
    assert report["plain_tokens_per_s"] > 0 and report["spec_tokens_per_s"] > 0
    assert report["speedup"] == report["spec_tokens_per_s"] / report["plain_tokens_per_s"]
    assert set(report["ttft"]) == set(report["seconds"]) == {"plain", "spec"}
    assert [p["id"] for p in report["prompts"]] == list(demo.SHOWN)
    assert report["settings"]["policy"] == "bundled"
    assert report["versions"]["torch"] and report["hardware"]["cpu"]


def test_plain_and_speculative_share_a_seed_and_prompts_do_not(cli_json, fake_llm):
    cli_json("demo", "--max-new-tokens", "8", "--temperature", "1", "--seed", "5")
    seeds: dict[str, set] = {}
    for prompt, _, seed in fake_llm.asked:
        seeds.setdefault(prompt, set()).add(seed)
    assert len(seeds) == 3
    assert all(len(s) == 1 and None not in s for s in seeds.values())
    assert len(set.union(*seeds.values())) == 3


def test_an_empty_budget_is_not_an_error(cli_json, fake_llm):
    report = cli_json("demo", "--max-new-tokens", "0")
    assert report["identical"] is True
    assert report["tau"] is None and report["speedup"] is None


def test_the_predictor_can_be_asked_for(cli_json, fake_llm):
    assert cli_json("demo", "--policy", "predictor")["settings"]["policy"] == "predictor"
    assert fake_llm.opened[0]["policy"] == "predictor"


def test_fixed_width(cli_json, fake_llm):
    assert cli_json("demo", "--policy", "fixed:2")["settings"]["policy"] == 2
    assert fake_llm.opened[0]["policy"] == 2
