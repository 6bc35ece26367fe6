"""Which backend runs, what says so, and what happens when one is missing or broken."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from blockpilot_kernels import dispatch, gumbel_noise

CPU = torch.zeros(2, dtype=torch.int64)
META = CPU.to("meta")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(dispatch.ENVIRONMENT, raising=False)
    dispatch.reset()
    yield
    monkeypatch.undo()
    dispatch.reset()


@pytest.fixture
def break_import(monkeypatch: pytest.MonkeyPatch):
    """break_import(name, error): importing `name` raises `error` from now on."""
    real = importlib.import_module

    def install(name: str, error: BaseException) -> None:
        def import_module(wanted: str, package: str | None = None):
            if wanted == name:
                raise error
            return real(wanted, package)

        monkeypatch.setattr(importlib, "import_module", import_module)

    return install


def backends() -> set[str]:
    return {row["backend"] for row in dispatch.explain()}


def test_the_extension_has_some_ops_within_its_passes_only() -> None:
    if dispatch.extension_error():
        pytest.skip(f"cpp: {dispatch.extension_error()}")
    with dispatch.forced("cpp"):
        rows = {row["op"]: row for row in dispatch.explain()}
        assert dispatch.backend_for("choose", CPU) == rows["choose"]["backend"] == "cpp"
        for op in ("block_attention", "norm_rope"):
            assert dispatch.backend_for(op, CPU) == "reference"
            assert rows[op]["backend"] == "cpp"
            assert "within its passes over a whole model, and by itself in PyTorch" in rows[op]["why"]


def test_cpu_takes_the_extension_where_it_loads() -> None:
    assert dispatch.backend_for("choose", CPU) == ("reference" if dispatch.extension_error() else "cpp")


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_environment_forces_a_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(dispatch.ENVIRONMENT, name)
    assert dispatch.backend_for("choose", CPU) == name
    assert dispatch.explain()[0]["why"] == "forced by BLOCKPILOT_BACKEND"


def test_environment_is_read_on_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reference", "triton", "reference"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv(dispatch.ENVIRONMENT, name)
        assert dispatch.backend_for("choose", CPU) == name


def test_forced_wins_over_the_environment_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(dispatch.ENVIRONMENT, "triton")
    with dispatch.forced("reference"):
        assert backends() == {"reference"}
        with dispatch.forced("triton"):
            assert backends() == {"triton"}
        assert backends() == {"reference"}
    assert backends() == {"triton"}


@pytest.mark.parametrize("value", ["cuda", "CPP", "cpp "])
def test_a_name_that_does_not_exist_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, value)
    with pytest.raises(ValueError, match="BLOCKPILOT_BACKEND: expected one of reference, cpp, triton, got"):
        gumbel_noise(CPU, CPU, 4)
    with pytest.raises(ValueError, match="expected one of"):
        dispatch.explain()


def test_empty_value_means_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "")
    assert dispatch.backend_for("choose", CPU) in ("reference", "cpp")


def test_meta_tensors_take_the_reference_whatever_is_forced() -> None:
    with dispatch.forced("cpp"):
        assert dispatch.backend_for("choose", META) == "reference"


def test_calls_are_counted() -> None:
    before = dispatch.calls.copy()
    with dispatch.forced("reference"):
        for _ in range(3):
            gumbel_noise(CPU, CPU, 4)
    counted = dispatch.calls - before
    assert counted == {("gumbel_noise", "reference"): 3}


def test_explain_names_every_op() -> None:
    rows = dispatch.explain()
    named = ["gumbel_noise", "choose", "accept_commit", "draft_tree", "prompt_lookup"]
    assert [row["op"] for row in rows] == [*named, *dispatch.INSIDE_CPP_PASS]
    assert all(row["why"] for row in rows)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'blockpilot_kernels._C'"), "was not built"),
        (ImportError("undefined symbol: _ZN5torch\nmore"), "does not load: undefined symbol: _ZN5torch"),
        (OSError("libgomp.so.1: cannot open shared object file"), "does not load: libgomp.so.1"),
    ],
)
def test_absent_or_broken_extension(break_import, caplog, error: BaseException, words: str) -> None:
    """Reference, one line said once, and a forced cpp says how to get it."""
    break_import("blockpilot_kernels._C", error)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dispatch.backend_for("choose", CPU) == "reference"
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert words in line
    assert "\n" not in line
    assert words in dispatch.explain()[0]["why"]
    with dispatch.forced("cpp"), pytest.raises(RuntimeError, match=r"BLOCKPILOT_REQUIRE_EXT=1 pip install"):
        dispatch.backend_for("choose", CPU)


def test_absent_triton(break_import, caplog) -> None:
    break_import("triton", ModuleNotFoundError("No module named 'triton'"))
    with dispatch.forced("triton"), pytest.raises(RuntimeError, match=r"not installed.*blockpilot\[triton\]"):
        dispatch.backend_for("choose", CPU)
    rows = dispatch.explain("cuda")
    assert rows[0] == {
        "op": "gumbel_noise",
        "backend": "reference",
        "why": "Triton is absent: it is not installed",
    }


def test_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with dispatch.forced("triton"), pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        dispatch.backend_for("choose", CPU)


def test_cuda_takes_triton_and_other_devices_the_reference() -> None:
    pytest.importorskip("triton")
    assert dispatch.explain("cuda")[0]["backend"] == "triton"
    assert dispatch.explain("mps")[0] == {
        "op": "gumbel_noise",
        "backend": "reference",
        "why": "no kernels exist for device 'mps'",
    }


def test_import_needs_neither_triton_nor_the_extension() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['blockpilot_kernels._C'] = None\n"
        "import torch, blockpilot_kernels as k\n"
        "seed = torch.zeros(1, dtype=torch.int64)\n"
        "k.gumbel_noise(seed, seed, 4)\n"
        "print(k.dispatch.calls['gumbel_noise', 'reference'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != dispatch.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "1", done.stderr
    assert done.stderr.count("\n") == 1
    assert "PyTorch reference runs on cpu" in done.stderr
