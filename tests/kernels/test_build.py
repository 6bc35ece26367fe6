"""A machine whose compiler does not work installs without the extension, unless the extension is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAID = "blockpilot: the C++ extension was not built"


def build(tmp_path: Path, required: str) -> subprocess.CompletedProcess[str]:
    """`setup.py build_ext` with a compiler that fails at once, into a folder of its own."""
    environment = {**os.environ, "CC": "false", "CXX": "false", "BLOCKPILOT_REQUIRE_EXT": required}
    command = [sys.executable, "setup.py", "build_ext", "--force"]
    command += ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_failed_build_is_one_line(tmp_path: Path) -> None:
    done = build(tmp_path, "0")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if SAID in line]
    assert len(lines) == 1
    assert "PyTorch reference" in lines[0]
    assert not list(tmp_path.rglob("_C*.so"))


def test_failed_build_is_an_error_where_the_extension_is_required(tmp_path: Path) -> None:
    done = build(tmp_path, "1")
    assert done.returncode != 0
    assert SAID not in done.stderr


@pytest.mark.parametrize("folder", ["csrc/cpu"])
def test_row_kernels_include_no_torch_header(folder: str) -> None:
    """Units compiled for several instruction sets share no inline function with the rest of the library."""
    for source in [
        *(ROOT / folder).glob("row*.cpp"),
        *(ROOT / folder).glob("row*.inl"),
        ROOT / folder / "rows.h",
    ]:
        for line in source.read_text(encoding="utf-8").splitlines():
            if line.startswith("#include"):
                assert line.split()[1] in ("<cstddef>", "<cstdint>") or line.split()[1].startswith('"row'), (
                    line
                )
