"""`blockpilot bench`: figures, comparison with plain, reports and resumption."""

from __future__ import annotations

import json

import pytest

from blockpilot.cli import bench, measure
from blockpilot.cli.bench import parse_widths
from blockpilot.cli.bench_store import sidecar_of
from blockpilot.cli.prompts import load_prompts
from tests.cli.fakes import write_prompts


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", {"alpha": 3, "beta": 2})


def run_arguments(prompts, *more):
    return ["bench", "--prompts", prompts, "--max-new-tokens", "9", *more]


def test_table_and_last_line(cli, fake_llm, prompts):
    result = cli(*run_arguments(prompts))
    assert result.exit_code == 0, result.output
    assert "alpha" in result.stdout and "beta" in result.stdout
    assert result.stdout.rstrip().splitlines()[-1] == "identical: yes"


def test_prompts_that_cannot_be_read_are_said(refused, tmp_path):
    (tmp_path / "latin").write_bytes(b'{"id": "\xe9"}')
    for name, found in (("absent", "got No such file or directory"), ("latin", "got 'utf-8' codec can't")):
        line = refused("bench", "-p", tmp_path / name)
        assert (
            f"{name}: expected a UTF-8 file of prompts, one JSON object a line with id, dataset, prompt, "
            in line
        )
        assert found in line and line.endswith("or none for the bundled prompts")


def test_json_keys_overall_and_per_dataset(cli_json, fake_llm, prompts):
    report = cli_json(*run_arguments(prompts, "--widths", "policy,2"))
    assert set(report) == set(bench.JSON_KEYS)
    assert report["prompts"] == 5
    assert report["width"] == [4] * 5
    assert report["tau"] == 4
    figures = {"identical", "tau", "width", "plain_tokens_per_s", "spec_tokens_per_s", "acceptance_by_offset"}
    assert set(report["datasets"]) == {"alpha", "beta"}
    assert all(figures <= set(group) for group in report["datasets"].values())
    assert report["datasets"]["alpha"]["prompts"] == 3
    assert set(report["arms"]) == {"policy", "width 2"}
    assert report["arms"]["width 2"]["overall"]["width"] == [2] * 5


def test_several_files_and_a_limit_per_dataset(cli_json, fake_llm, prompts, tmp_path):
    more = write_prompts(tmp_path / "more.jsonl", {"gamma": 4})
    report = cli_json(*run_arguments(prompts, "--prompts", more, "--limit", "2"))
    assert {name: group["prompts"] for name, group in report["datasets"].items()} == {
        "alpha": 2,
        "beta": 2,
        "gamma": 2,
    }


def test_the_bundled_prompts_are_the_default(cli_json, fake_llm):
    report = cli_json("bench", "--max-new-tokens", "3")
    assert {name: group["prompts"] for name, group in report["datasets"].items()} == dict.fromkeys(
        ("word_problem", "python_function", "explanation", "rewriting", "list", "dialogue"), 4
    )


def test_check_fails_on_a_difference_and_names_it(cli, cli_json, fake_llm, prompts):
    fake_llm.wrong = staticmethod(lambda prompt, width: width == 2 and prompt == "beta question 1")
    arguments = run_arguments(prompts, "--widths", "4,2")
    report = cli_json(*arguments, "--check", code=1)
    assert report["identical"] is False
    assert report["differences"] == [{"arm": "width 2", "id": "beta/1", "token": 2}]
    assert report["arms"]["width 4"]["overall"]["identical"] is True
    assert report["arms"]["width 2"]["overall"]["speedup"] is None
    assert report["arms"]["width 2"]["datasets"]["alpha"]["speedup"] is not None
    result = cli(*arguments)
    assert result.exit_code == 0
    assert result.stdout.rstrip().splitlines()[-1] == "identical: NO (1 differences)"


def test_failed_requests_exit_with_1(cli_json, fake_llm, prompts):
    fake_llm.error = ArithmeticError("not finite")
    report = cli_json(*run_arguments(prompts), code=1)
    assert report["errors"] == 10
    assert report["identical"] is False


def test_a_batch_is_of_one_dataset(cli_json, fake_llm, prompts, monkeypatch):
    groups = []
    generate = fake_llm.generate
    monkeypatch.setattr(fake_llm, "generate", lambda self, p, s: groups.append(p) or generate(self, p, s))
    cli_json(*run_arguments(prompts, "--batch", "2"))
    assert fake_llm.opened[0]["max_requests"] == 2
    assert [len(g) for g in groups] == [2, 2, 1, 1, 2, 2]
    assert all(len({p.split()[0] for p in g}) == 1 for g in groups)


def test_seeds_do_not_depend_on_the_other_prompts(cli_json, fake_llm, prompts):
    def seeds(*more):
        fake_llm.asked.clear()
        cli_json(*run_arguments(prompts, "--temperature", "1", *more))
        return {prompt: seed for prompt, _, seed in fake_llm.asked}

    everything, first = seeds(), seeds("--limit", "1", "--batch", "2")
    assert len(set(everything.values())) == 5
    assert first.items() <= everything.items()
    assert seeds("--seed", "1")["alpha question 0"] != everything["alpha question 0"]


def test_a_tree_is_an_arm(cli_json, fake_llm, prompts):
    report = cli_json(*run_arguments(prompts, "--widths", "2/5,policy"))
    assert set(report["arms"]) == {"width 2 tree 5", "policy"}
    assert parse_widths("4,6/12")[1] == measure.Arm("width 6 tree 12", 6, 12)


@pytest.mark.parametrize(
    ("more", "arm"),
    [
        ([], "policy"),
        (["--policy", "fixed:3"], "policy"),
        (["--policy", "none"], "block size"),
        (["--drafter", "bundled"], "block size"),
        (["--drafter", "none"], "no drafter"),
    ],
)
def test_a_row_is_called_policy_only_where_one_is_in_use(cli_json, refused, fake_llm, prompts, more, arm):
    assert list(cli_json(*run_arguments(prompts, *more))["arms"]) == [arm]
    both = run_arguments(prompts, *more, "--widths", "2,policy")
    if arm == "policy":
        assert list(cli_json(*both)["arms"]) == ["width 2", "policy"]
    else:
        assert "no policy is in use, got '2,policy'; name one with --policy" in refused(*both)


@pytest.mark.parametrize("widths", ["0", "", "two", "2,,4", "-1", "2,2", "6/4", "/4", "4/", "0/3", "2/3/4"])
def test_bad_widths(refused, fake_llm, widths):
    assert "--widths" in refused("bench", "--widths", widths)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected at least one prompt"),
        ("{", "prompts.jsonl:1: expected JSON"),
        ('{"id": "a", "dataset": "d", "prompt": "p"}\n[1]\n', "prompts.jsonl:2: expected an object"),
        ('{"id": "a", "dataset": "d"}\n', "prompts.jsonl:1: expected a non-empty string 'prompt'"),
        ('{"id": "a", "dataset": "d", "prompt": "p"}\n' * 2, "expected unique ids, got 'a' twice"),
    ],
)
def test_bad_prompt_files_are_named(refused, fake_llm, tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert message in refused("bench", "--prompts", file)


def test_a_missing_prompt_file_is_named(refused, fake_llm, tmp_path):
    assert "absent.jsonl" in refused("bench", "--prompts", tmp_path / "absent.jsonl")


def test_output_is_the_json_of_stdout(cli_json, fake_llm, prompts, tmp_path):
    output = tmp_path / "report.json"
    assert cli_json(*run_arguments(prompts, "--output", output)) == json.loads(output.read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "prompts.jsonl",
        "report.json",
        "report.json.prompts.jsonl",
    ]


def test_an_interrupted_run_continues(cli, cli_json, fake_llm, prompts, tmp_path):
    output = tmp_path / "report.json"
    arguments = run_arguments(prompts, "--output", output)
    fake_llm.interrupt_at = 5
    result = cli(*arguments)
    assert result.exit_code == 130
    assert not output.exists()
    finished = [p for p, _, _ in fake_llm.asked][:4]

    fake_llm.interrupt_at = None
    fake_llm.asked.clear()
    report = cli_json(*arguments)
    assert report["prompts"] == 5
    assert not {p for p, _, _ in fake_llm.asked} & set(finished)
    assert len(fake_llm.asked) == 6

    fake_llm.asked.clear()
    assert cli_json(*arguments) == report
    assert fake_llm.asked == []


def test_a_torn_line_is_dropped(cli_json, fake_llm, prompts, tmp_path):
    output = tmp_path / "report.json"
    arguments = run_arguments(prompts, "--output", output)
    cli_json(*arguments)
    sidecar = sidecar_of(output)
    sidecar.write_bytes(sidecar.read_bytes()[:-20])
    fake_llm.asked.clear()
    assert cli_json(*arguments)["prompts"] == 5
    assert {p for p, _, _ in fake_llm.asked} == {"beta question 1"}
    assert all(json.loads(line) for line in sidecar.read_text().splitlines())


def test_a_changed_prompt_is_measured_again(cli_json, fake_llm, prompts, tmp_path):
    output = tmp_path / "report.json"
    cli_json(*run_arguments(prompts, "--output", output))
    prompts.write_text(prompts.read_text().replace("alpha question 1", "another question"))
    fake_llm.asked.clear()
    cli_json(*run_arguments(prompts, "--output", output))
    assert {p for p, _, _ in fake_llm.asked} == {"another question"}


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (["--temperature", "0.5"], "temperature 0.0 -> 0.5"),
        (["--policy", "fixed:3"], "policy 'bundled' -> 3"),
        (["--widths", "2"], "widths ['policy'] -> ['width 2']"),
        (["--batch", "2"], "batch 1 -> 2"),
    ],
)
def test_other_settings_are_refused(cli_json, refused, fake_llm, prompts, tmp_path, more, name):
    arguments = run_arguments(prompts, "--output", tmp_path / "report.json")
    cli_json(*arguments)
    line = refused(*arguments, *more)
    assert name in line and "report.json.prompts.jsonl" in line


def test_another_pair_is_refused(cli_json, refused, fake_llm, prompts, tmp_path):
    arguments = run_arguments(prompts, "--output", tmp_path / "report.json")
    cli_json(*arguments)
    fake_llm.fingerprint = "other"
    assert "pair 'fake-target+fake-drafter' -> 'other'" in refused(*arguments)


def test_a_changed_policy_file_is_refused(cli_json, refused, fake_llm, prompts, tmp_path):
    policy = tmp_path / "policy.safetensors"
    policy.write_bytes(b"one")
    arguments = run_arguments(prompts, "--output", tmp_path / "report.json", "--policy", policy)
    cli_json(*arguments)
    policy.write_bytes(b"two")
    assert "policy" in refused(*arguments)


def test_a_foreign_sidecar_is_refused(refused, fake_llm, prompts, tmp_path):
    output = tmp_path / "report.json"
    sidecar_of(output).write_text('{"hello": 1}\n')
    assert "report.json.prompts.jsonl:1" in refused(*run_arguments(prompts, "--output", output))


def test_an_unwritable_output_is_refused_before_measuring(refused, fake_llm, prompts, tmp_path):
    assert "absent" in refused(*run_arguments(prompts, "--output", tmp_path / "absent" / "report.json"))
    assert fake_llm.asked == []


def test_first_difference():
    def answer(ids, reason="length", error=None):
        return {"token_ids": ids, "finish_reason": reason, "error": error}

    same = answer([1, 2, 3])
    assert measure.first_difference(same, answer([1, 2, 3])) is None
    assert measure.first_difference(same, answer([1, 9, 3])) == 1
    assert measure.first_difference(same, answer([1, 2])) == 2
    assert measure.first_difference(same, answer([1, 2, 3], "stop")) == 3
    assert measure.first_difference(answer([], "error", "x"), answer([], "error", "x")) == 0


def test_acceptance_pools_requests_of_different_widths():
    stats = [
        {"offered": [4], "kept": [1]},
        {"offered": [2, 2, 0], "kept": [2, 1, 0]},
        {"offered": [], "kept": []},
    ]
    assert measure.acceptance(stats) == [0.5, 0.5, None]
    assert measure.acceptance([]) == []


def test_bundled_prompts_are_well_formed():
    prompts = load_prompts(())
    assert len(prompts) == 24
    assert all(p.id.startswith(f"{p.dataset}/") for p in prompts)
