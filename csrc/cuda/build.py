"""Compiles the CUDA C++ of the package with nvcc alone: `python csrc/cuda/build.py FOLDER`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("step_loop.cu")
NAME = "_step_loop.so"
FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=default", "-shared")
ARCHITECTURES = ("80", "90a", "100a")


def build(folder: Path) -> Path:
    """The library in `folder`, for every architecture that this nvcc knows; others compile its PTX when it is loaded.

    Raises:
        OSError: there is no nvcc. subprocess.CalledProcessError: it fails.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc is not on the PATH")
    listed = subprocess.run(
        [nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True
    ).stdout.split()
    known = [a for a in ARCHITECTURES if f"sm_{a}" in listed]
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in known]
    codes.append(f"-gencode=arch=compute_{ARCHITECTURES[0]},code=compute_{ARCHITECTURES[0]}")
    target, temporary = folder / NAME, folder / f".{NAME}.{os.getpid()}.tmp"
    try:
        command = [nvcc, *FLAGS, *codes, "-o", str(temporary), str(SOURCE)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
