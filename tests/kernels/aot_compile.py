"""Compiles this package's Triton kernels for GPUs that are not here and prints one JSON line a kernel and
target.

Run as `python -m tests.kernels.aot_compile` without TRITON_INTERPRET: a process of its own, because that
variable is read when a kernel's module is imported.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from blockpilot_kernels.accept_commit import kernel as accept
from blockpilot_kernels.choose import filters
from blockpilot_kernels.choose import kernel as choose
from blockpilot_kernels.gumbel_noise import kernel as noise

ARCHITECTURES = (80, 90, 100)
F32, I64, I32, I8 = "*fp32", "*i64", "*i32", "*i8"
CHOOSE = {"ROWS": choose.TILE_CUDA[0], "CHUNK": choose.TILE_CUDA[1]}
CHUNKS = 128  # a vocabulary of up to 262,144 ids


def pointers(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def sizes(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


# (kernel, types of its arguments, compile-time constants, options) as the launchers use them.
KERNELS: list[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]] = [
    (
        noise.noise_kernel,
        pointers("SEED POSITION", I64) | {"OUT": F32} | sizes("N V"),
        {"RAW": False, "ROWS": noise.TILE_CUDA[0], "COUNTERS": noise.TILE_CUDA[1]},
        noise.OPTIONS,
    ),
    (
        choose.row_stats,
        pointers("LOGITS X BEST", F32)
        | pointers("INDEX BAD", I32)
        | {"BANNED": I64}
        | sizes("N V S n_chunks"),
        CHOOSE,
        choose.OPTIONS,
    ),
    (
        filters.row_cuts,
        pointers("X TEMPERATURE TOP_P ROW_BEST", F32)
        | pointers("TOP_K CUT_KEY CUT_ID", I64)
        | sizes("N V n_chunks"),
        {**CHOOSE, "CHUNKS": CHUNKS},
        choose.CUT_OPTIONS,
    ),
    *(
        (
            choose.row_scores,
            pointers("X NOISE TEMPERATURE MIN_P ROW_BEST BEST", F32)
            | pointers("CUT_KEY CUT_ID", I64)
            | {"INDEX": I32}
            | sizes("N V n_chunks"),
            {**CHOOSE, "CHUNKS": CHUNKS, "FILTERED": filtered},
            choose.OPTIONS,
        )
        for filtered in (False, True)
    ),
    (
        choose.row_ids,
        {"BEST": F32, "IDS": I64, "FINITE": I8} | pointers("INDEX BAD", I32) | sizes("N V n_chunks"),
        {"ROWS": CHOOSE["ROWS"], "CHUNKS": CHUNKS},
        choose.OPTIONS,
    ),
    (
        accept.accept_commit_kernel,
        pointers("BLOCK CHOICE WIDTH STOPS LIMIT TOKENS LENGTH FINISH ACCEPTED COUNT", I64)
        | pointers("FINITE DONE", I8)
        | sizes("R W S C"),
        {"ROWS": accept.ROWS, "COLUMNS": 32},
        accept.OPTIONS,
    ),
]


def compile_one(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any], arch: int
) -> dict[str, Any]:
    """Spilled bytes (from ptxas) and bytes of shared memory of one kernel on one architecture."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in types
        if types[name].startswith("*")
    }
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=target, options=options
    )
    return {
        "kernel": kernel.__name__,
        "constants": constants,
        "arch": arch,
        "spills": _spilled_bytes(compiled.asm["ptx"], arch),
        "shared": compiled.metadata.shared,
    }


def _spilled_bytes(ptx: str, arch: int) -> int:
    found = re.search(r"\.target (\w+)", ptx)
    assert found is not None
    command = [get_ptxas(arch).path, "-v", f"-arch={found[1]}", "-o", "/dev/null", "-"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))


if __name__ == "__main__":
    for entry in KERNELS:
        for architecture in ARCHITECTURES:
            print(json.dumps(compile_one(*entry, architecture)), flush=True)
