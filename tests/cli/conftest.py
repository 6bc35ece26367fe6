from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from blockpilot import LLM
from blockpilot.cli.app import app
from blockpilot.training.make_data import make_data
from blockpilot.training.prompt_sources import DataOptions
from tests.cli.fakes import FakeLLM
from tests.training.talking import save_talker


@pytest.fixture
def fake_llm(monkeypatch) -> type[FakeLLM]:
    """A fresh fake in place of `blockpilot.llm.LLM`."""
    fresh = type("FreshFake", (FakeLLM,), {"opened": [], "asked": []})
    monkeypatch.setattr("blockpilot.llm.LLM", fresh)
    return fresh


@pytest.fixture
def cli(monkeypatch):
    """Run a command line; returns the result with `exit_code`, `stdout`, `stderr`."""
    monkeypatch.delenv("BLOCKPILOT_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args, **options: CliRunner().invoke(app, [str(a) for a in args], **options)


@pytest.fixture
def cli_json(cli):
    """Run with `--json`; stdout must be one JSON object and nothing else."""

    def run(*args, code: int = 0, **options):
        result = cli(*args, "--json", **options)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture
def refused(cli):
    """Run something that must be refused; returns its single line of error."""

    def run(*args, **options) -> str:
        result = cli(*args, **options)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        lines = [line for line in result.stderr.splitlines() if line]
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == 1 and lines[-1] == errors[0], result.stderr
        assert "Traceback" not in result.stderr
        return errors[0]

    return run


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Folders of a target that talks and of its answers."""
    folder = tmp_path_factory.mktemp("data")
    talker = save_talker(folder / "target")
    options = DataOptions(shard_prompts=8, max_new_tokens=14, prompt_tokens=260, sampled=0.2, source="own")
    with LLM(talker, max_requests=8, max_length=280) as llm:
        make_data(llm, folder / "answers", options, count=48, progress=False)
    return talker, folder / "answers"
