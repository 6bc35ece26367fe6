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

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from blockpilot_kernels.accept_commit import kernel as accept
from blockpilot_kernels.block_attention import kernel as attention
from blockpilot_kernels.choose import filters
from blockpilot_kernels.choose import kernel as choose
from blockpilot_kernels.draft_tree import kernel as tree
from blockpilot_kernels.gumbel_noise import kernel as noise
from blockpilot_kernels.head_choice import kernel as head
from blockpilot_kernels.kv_compact import kernel as compact
from blockpilot_kernels.norm_rope import kernel as glue
from blockpilot_kernels.prompt_lookup import kernel as lookup
from blockpilot_kernels.qk_rope_append import kernel as rope
from blockpilot_kernels.tiled_linear import kernel as tiled

ARCHITECTURES = (80, 90, 100)
F32, I64, I32, I8 = "*fp32", "*i64", "*i32", "*i8"
STRIDE = "i32, a multiple of 16"  # which a launch sees and compiles for
CACHE = {torch.float32: F32, torch.float16: "*fp16", torch.bfloat16: "*bf16"}
# (type of the cache, head dimension, causal, window, tails of a tree, whole), which meet each of their values in few
# compilations.
ATTENTION = (
    (torch.bfloat16, 128, True, 0, 0, False),
    (torch.bfloat16, 128, True, 1024, 2, False),
    (torch.bfloat16, 128, False, 1024, 0, True),
    (torch.bfloat16, 128, True, 1024, 1, True),
    (torch.float16, 64, False, 1024, 0, True),
    (torch.bfloat16, 64, True, 0, 2, False),
    (torch.bfloat16, 256, True, 0, 1, True),
    (torch.float32, 128, False, 1024, 0, False),
    (torch.float32, 128, True, 1024, 2, False),
)
MULTIPLIES = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync")
CHOOSE = {"ROWS": choose.TILE_CUDA[0], "CHUNK": choose.TILE_CUDA[1]}
CHUNKS = 128  # a vocabulary of up to 262,144 ids


Entry = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]


def pointers(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def sizes(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


def attend(dtype: torch.dtype, dim: int, causal: bool, window: int, tails: int, whole: bool) -> Entry:
    """The attention kernel as it is launched for a cache of that type."""
    launch = attention.Launch.of(dtype, dim, on_cuda=True)
    types = (
        pointers("Q OUT PART TOP MASS", F32)
        | pointers("K V", CACHE[dtype])
        | pointers("POSITION EXTENT PATH", I64)
        | {"SPANS": I32, "BAD": I8, "scale": "fp32"}
        | dict.fromkeys(["q_row", "q_head", "kv_slot", "kv_head", "length"], STRIDE)
        | sizes("heads chunks deepest")
    )
    constants = {
        "CAUSAL": causal, "WINDOW": window, "TAILS": tails, "WHOLE": whole, "PRODUCT": launch.product,
        "KEYS": launch.keys, "ROWS": launch.rows, **attention.sizes(4, dim),
    }  # fmt: skip
    return attention.attend_kernel, types, constants, launch.options


def linear(dtype: torch.dtype, columns: int, k: int, biased: bool = False) -> Entry:
    """The product with a weight of that shape."""
    launch = tiled.Launch.of(dtype, columns, k, on_cuda=True)
    types = pointers("X BIAS OUT PART", F32) | {"W": CACHE[dtype], "DONE": I32, "M": STRIDE}
    types |= dict.fromkeys(["N", "K", "w_row"], STRIDE)
    constants = {"BIASED": biased, "SPLITS": launch.splits, **launch.constants(dtype == torch.bfloat16)}
    return tiled.linear_kernel, types, constants, launch.options


def guess(dtype: torch.dtype, mapped: bool, sampled: bool) -> Entry:
    """The drafter's head over Qwen3's vocabulary, or part of it."""
    launch = head.launch_of(dtype, 151_936, 4096, on_cuda=True)
    types = pointers("X NOISE TEMPERATURE BEST", F32) | pointers("IDS SOURCE BANNED", I64)
    types |= pointers("INDEX BAD", I32) | {"W": CACHE[dtype], "scale": "fp32"} | sizes("S tiles")
    types |= dict.fromkeys(["M", "N", "K", "w_row", "V"], STRIDE)
    constants = {"MAPPED": mapped, "SAMPLED": sampled, **launch.constants(dtype == torch.bfloat16)}
    return head.head_kernel, types, constants, launch.options


def combine(dim: int) -> Entry:
    """The kernel that follows it where there are several chunks."""
    launch = attention.Launch.of(torch.bfloat16, dim, on_cuda=True)
    types = pointers("PART TOP MASS OUT", F32) | {"SPANS": I32, "EXTENT": I64} | sizes("heads chunks")
    constants = {"ROWS": launch.combined, **attention.sizes(4, dim)}
    return attention.combine_kernel, types, constants, launch.options


def append(heads: int, norm: bool, dtype: torch.dtype) -> Entry:
    """Norm, rotary embedding and cache of heads of 128, 8 of keys; no queries for a drafter's context."""
    types = (
        pointers("QKV Q_NORM K_NORM COS SIN Q", F32)
        | pointers("K V", CACHE[dtype])
        | {"TO": I64, "BAD": I8, "eps": "fp32", "cache_layer": "i64", "bad_layer": "i64"}
        | sizes("N x_row x_head length")
    )
    constants = {"NORM": norm, "ROWS": rope.ROWS_CUDA, **rope.sizes(heads, 8, 128)}
    return rope.append_kernel, types, constants, rope.OPTIONS


def norm(kernel: Any, names: str, width: int = 4096, table: str = F32) -> Entry:
    """A norm of hidden rows and what is fused with it."""
    types = pointers(names, F32) | {"N": "i32", "eps": "fp32"}
    if kernel is glue.block_input_kernel:
        types |= {"scale": "fp32", "TOKENS": I64, "TABLE": table}
    block = triton.next_power_of_2(width)
    options = glue.LONG_OPTIONS if block > glue.LONG else glue.OPTIONS
    return kernel, types, {"H": width, "ROWS": glue.ROWS_CUDA, "BLOCK": block}, options


# (kernel, types of its arguments, compile-time constants, options) as the launchers use them.
KERNELS: list[Entry] = [
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
    *(
        (
            choose.row_ids,
            {"BEST": F32, "IDS": I64, "FINITE": I8} | pointers("INDEX BAD", I32) | sizes("N V n_chunks"),
            {"ROWS": CHOOSE["ROWS"], "CHUNKS": chunks},
            choose.OPTIONS,
        )
        for chunks in (CHUNKS, 4096)
    ),
    (
        accept.accept_commit_kernel,
        pointers("BLOCK CHOICE WIDTH STOPS LIMIT TOKENS LENGTH FINISH ACCEPTED COUNT", I64)
        | pointers("FINITE DONE", I8)
        | sizes("R W S C"),
        {"ROWS": accept.ROWS, "COLUMNS": 32},
        accept.OPTIONS,
    ),
    (
        tree.draft_tree_kernel,
        pointers("SCORE COST", F32)
        | pointers("DEEPEST BUDGET CANDIDATE PARENT DEPTH COUNT", I64)
        | sizes("nodes depths width"),
        {"NODES": 32, "STOP": True},
        tree.OPTIONS,
    ),
    (
        compact.kv_compact_kernel,
        pointers("K V", CACHE[torch.bfloat16])
        | {"BAD": I8}
        | pointers("BEGIN SOURCE COUNT", I64)
        | sizes("S H C W"),
        {"D": 128, "COLUMNS": 32, "BLOCK_D": 128},
        compact.OPTIONS,
    ),
    *(linear(torch.bfloat16, *shape) for shape in ((4096, 12_288, True), (151_936, 4096))),
    *(linear(torch.float32, *shape) for shape in ((2048, 151_936, True), (49_152, 576))),
    (
        lookup.prompt_lookup_kernel,
        pointers("KNOWN LENGTH DRAFTS OUT", I64) | sizes("stride_known C N shortest longest"),
        {"PLACES": lookup.PLACES, "COLUMNS": 16},
        lookup.OPTIONS,
    ),
    *(guess(torch.bfloat16, *case) for case in ((False, False), (False, True), (True, True))),
    guess(torch.float32, True, True),
    *(attend(*case) for case in ATTENTION),
    *(combine(dim) for dim in (64, 128, 256)),
    *(norm(glue.rms_norm_kernel, "X WEIGHT OUT", width) for width in (576, 12_288)),
    *(norm(glue.residual_norm_kernel, "X Y WEIGHT SUM OUT", width) for width in (576, 4096, 12_288)),
    norm(glue.block_input_kernel, "WEIGHT X OUT", table=CACHE[torch.bfloat16]),
    *(append(32, normed, dtype) for normed, dtype in ((True, torch.bfloat16), (False, torch.float32))),
    append(0, True, torch.bfloat16),
    (
        glue.swiglu_kernel,
        pointers("X OUT", F32) | sizes("N WIDTH"),
        {"ROWS": glue.ROWS_CUDA, "BLOCK": glue.COLUMNS},
        glue.OPTIONS,
    ),
]


def compile_one(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any], arch: int
) -> dict[str, Any]:
    """Spilled bytes and registers (from ptxas), bytes of shared memory and tensor-core instructions of one kernel on
    one architecture."""
    signature = {
        name: "constexpr" if name in constants else types[name].partition(",")[0] for name in kernel.arg_names
    }
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in types
        if types[name].startswith("*") or types[name] == STRIDE
    }
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=target, options=options
    )
    spills, registers = _resources(compiled.asm["ptx"], arch)
    return {
        "kernel": kernel.__name__,
        "constants": {name: str(value) for name, value in constants.items()},
        "arch": arch,
        "spills": spills,
        "registers": registers,
        "shared": compiled.metadata.shared,
        "multiplies": sorted(set(MULTIPLIES.findall(compiled.asm["ptx"]))),
    }


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Bytes spilled and registers a thread."""
    found = re.search(r"\.target (\w+)", ptx)
    assert found is not None
    command = [get_ptxas(arch).path, "-v", f"-arch={found[1]}", "-o", "/dev/null", "-"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return spilled, max(int(n) for n in re.findall(r"Used (\d+) registers", report))


if __name__ == "__main__":
    for entry in KERNELS:
        for architecture in ARCHITECTURES:
            print(json.dumps(compile_one(*entry, architecture)), flush=True)
