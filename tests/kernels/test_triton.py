"""What the interpreter cannot show: the Triton kernels compile for real GPUs, and their offsets are 64 bits
wide."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.kernels.conftest import device_of

pytest.importorskip("triton")

SHARED_MEMORY = 99 * 1024  # bytes a block may have on every listed architecture
KERNELS = {
    "noise_kernel", "row_stats", "row_cuts", "row_scores", "row_ids", "accept_commit_kernel", "attend_kernel",
    "combine_kernel", "draft_tree_kernel", "kv_compact_kernel", "rms_norm_kernel", "residual_norm_kernel",
    "block_input_kernel",
    "append_kernel", "swiglu_kernel", "linear_kernel", "head_kernel",
    "prompt_lookup_kernel",
}  # fmt: skip
PRODUCTS = {"linear_kernel", "head_kernel"}
# 16-bit products of 64 rows are those of whole warp groups; three of tf32 make one of float32.
WIDE = {80: ["mma.sync"], 90: ["wgmma.mma_async"], 100: ["tcgen05.mma"]}


def test_kernels_compile_ahead_of_time() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot_compile"]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(r["kernel"], r["arch"]) for r in reports} == {(k, a) for k in KERNELS for a in (80, 90, 100)}
    for report in reports:
        assert report["spills"] == 0, report
        assert report["shared"] <= SHARED_MEMORY, report
        expected = []
        if report["kernel"] == "attend_kernel":
            expected = ["mma.sync"] if report["constants"]["PRODUCT"] == "fp32" else WIDE[report["arch"]]
        if report["kernel"] in PRODUCTS:
            expected = WIDE[report["arch"]]
        assert report["multiplies"] == expected, report


def test_offsets_pass_two_to_the_31() -> None:
    from tests.kernels import triton_probes

    rows, width = torch.tensor([0, 1, 40_000, 2**20], dtype=torch.int32), 151_936
    got = triton_probes.offsets(rows, 4, width, device_of("triton"))
    assert got.tolist() == [[r * width + i for i in range(4)] for r in rows.tolist()]
    assert got.max() > 2**31


def test_repaired_interpreter_rounds_bfloat16_as_torch_does() -> None:
    from tests import interp_shim

    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).numpy()
    values[:4] = [1.00390625, 1.01171875, np.inf, np.nan]  # two ties, to even either way
    expected = torch.from_numpy(values).to(torch.bfloat16)
    got = interp_shim.widen(interp_shim.narrow(values))
    assert np.array_equal(got, expected.float().numpy(), equal_nan=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="about the interpreter")
def test_repaired_interpreter_multiplies_bfloat16() -> None:
    from tests.kernels import triton_probes

    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    expected = (a.float() @ b.float()).bfloat16()
    assert torch.allclose(triton_probes.product(a, b).float(), expected.float(), atol=0.02, rtol=0.01)
