"""The command line itself: help, version, names, errors and exit codes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from blockpilot import __version__
from blockpilot.cli import (
    analyze,
    bench,
    calibrate,
    demo,
    doctor,
    generate,
    label,
    make_data,
    report,
    train_draft,
    train_policy,
)
from blockpilot.cli.console import finite
from blockpilot.cli.group import INTERRUPTION, guarded
from blockpilot.cli.options import Engine
from blockpilot.errors import NonFiniteLogitsError

COMMANDS = {
    "demo": demo,
    "generate": generate,
    "bench": bench,
    "calibrate": calibrate,
    "label": label,
    "make-data": make_data,
    "train-draft": train_draft,
    "train-policy": train_policy,
    "analyze": analyze,
    "report": report,
    "doctor": doctor,
}


def test_version(cli):
    result = cli("--version")
    assert result.exit_code == 0
    assert result.stdout == f"blockpilot {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(cli, arguments):
    result = cli(*arguments)
    assert result.exit_code == 0
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_documents_every_json_key(cli, name):
    result = cli(name, "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "--json" in text
    assert all(f"{key}: " in text for key in COMMANDS[name].JSON_KEYS)


def test_unknown_command_lists_the_known_ones(refused):
    line = refused("benhc")
    assert "benhc" in line
    assert all(name in line for name in COMMANDS)


def test_unknown_option_is_refused(refused):
    assert "--widht" in refused("bench", "--widht", "4")


def test_unknown_dtype_lists_the_known_ones(refused):
    line = refused("demo", "--dtype", "fp8")
    assert "float32" in line and "bfloat16" in line


@pytest.mark.parametrize(
    "policy",
    [
        "fixed:0",
        "fixed:x",
        "fixed:4/",
        "fixed:4/6/8",
        "fixed:4@x",
        "fixed:4/0",
        "fixed:4/6@",
        "fixed:٤",
        "missing.safetensors",
        "best",
    ],
)
def test_unknown_policy_lists_the_known_ones(refused, policy):
    line = refused("bench", "--policy", policy)
    assert "fixed:N" in line and repr(policy) in line


def test_a_calibration_that_is_not_there_is_said(refused):
    assert "found no file 'absent.json'" in refused("bench", "--policy", "fixed:4/6@absent.json")


def test_what_a_report_says_of_a_policy(tmp_path):
    """The hash of a file is that of what it holds, wherever the file is named."""
    file = tmp_path / "costs@home.json"
    file.write_text("{}")
    sealed = f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
    for text, said in (
        ("fixed:4", 4),
        ("fixed:4/8", "4/8"),
        (f"fixed:4/8@{file}", f"4/8@{file} {sealed}"),
        (str(file), f"{file} {sealed}"),
        ("bundled", "bundled"),
        ("none", None),
    ):
        assert Engine.resolve("target", "none", text).to_dict()["policy"] == said


def test_unknown_device_lists_the_ones_here(refused, fake_llm):
    line = refused("generate", "hello", "--device", "gpux")
    assert "cpu" in line and "'gpux'" in line


def test_a_forced_backend_that_is_unknown_lists_the_known_ones(refused, fake_llm, monkeypatch):
    monkeypatch.setenv("BLOCKPILOT_BACKEND", "quick")
    line = refused("generate", "hello")
    assert "reference, cpp, triton" in line


def test_a_forced_backend_that_cannot_run_is_one_line(refused, fake_llm, monkeypatch):
    monkeypatch.setenv("BLOCKPILOT_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "'triton' is forced" in refused("generate", "hello")


def test_sampling_mistakes_say_what_was_expected(refused, fake_llm):
    assert "SamplingParams.top_p" in refused("generate", "hello", "--top-p", "2")
    assert "SamplingParams.temperature" in refused("bench", "--temperature", "1e-9")


def test_debugging_shows_where(cli, monkeypatch):
    monkeypatch.setenv("BLOCKPILOT_DEBUG", "1")
    result = cli("bench", "--policy", "best")
    assert isinstance(result.exception, ValueError)


def test_a_bad_debug_value_is_refused(cli, monkeypatch):
    monkeypatch.setenv("BLOCKPILOT_DEBUG", "yes")
    result = cli("bench", "--policy", "best")
    assert result.exit_code == 2
    assert "BLOCKPILOT_DEBUG: expected 0 or 1" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("two\nlines"), 2, "error: two lines\n"),
        (
            FileNotFoundError(2, "No such file or directory", "x.jsonl"),
            2,
            "No such file or directory: x.jsonl",
        ),
        (NonFiniteLogitsError("not finite"), 1, "error: not finite\n"),
        (KeyboardInterrupt(), 130, f"error: {INTERRUPTION}\n"),
    ],
)
def test_errors_become_lines_and_codes(capsys, error, code, line):
    def run():
        raise error

    assert guarded(run) == code
    assert line in capsys.readouterr().err


def test_a_defect_keeps_its_traceback():
    def run():
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        guarded(run)


def test_brackets_in_errors_are_not_markup(capsys):
    def run():
        raise ValueError("got [bold]x[/bold]")

    assert guarded(run) == 2
    assert "got [bold]x[/bold]" in capsys.readouterr().err


def test_json_has_no_infinities():
    assert finite({"a": [float("nan"), 1.5, (float("inf"),)], 2: "x"}) == {"a": [None, 1.5, [None]], "2": "x"}


def test_help_does_not_import_torch():
    code = (
        "import sys\n"
        "from blockpilot.cli.app import app\n"
        "try:\n    app(['--help'], prog_name='blockpilot')\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_reports_mistakes_without_a_traceback():
    code = "from blockpilot.cli import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "--widths", "0"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: --widths") and "Traceback" not in done.stderr


def test_a_terminal_without_the_symbols_is_no_error():
    code = "from blockpilot.cli.group import guarded\nprint(guarded(lambda: print('\\u03c4 \\U0001f600')))\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout == "? ?\n0\n", done.stderr
