"""Peak memory bandwidth and dense bfloat16 arithmetic of GPUs, as NVIDIA publishes them.

Sources: datasheets "NVIDIA H200 Tensor Core GPU" (SXM), "NVIDIA H100 Tensor Core GPU" (SXM), "NVIDIA A100 80GB" (SXM),
"NVIDIA DGX B200" (an eighth of 64 TB/s, 1,440 GB and 36 PFLOPS), and the white paper "NVIDIA Ada GPU Architecture",
appendix A (RTX 4090, float32 accumulation). Where a sheet states tensor figures with sparsity (H100, H200, B200),
dense is half of them. Dense bfloat16 is the peak for weights of a byte too: they are widened on the way in.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What a step runs on.

    Attributes:
        bandwidth: bytes per second. flops: per second; infinite where unknown, so that only memory bounds a step.
        memory: bytes. words: all of them occur in the name that CUDA reports.
        measured: the bandwidth was measured with a kernel of its own, so no efficiency is taken off it.
    """

    name: str
    bandwidth: float
    flops: float = math.inf
    memory: float = math.inf
    words: tuple[str, ...] = ()
    measured: bool = False


DEVICES = (
    Device("H200", 4.8e12, 989e12, 141e9, ("H200",)),
    Device("H100-SXM", 3.35e12, 989e12, 80e9, ("H100", "HBM3")),
    Device("A100-80GB", 2.039e12, 312e12, 80e9, ("A100", "SXM4", "80GB")),
    Device("B200", 8.0e12, 2250e12, 180e9, ("B200",)),
    Device("RTX-4090", 1.008e12, 165.2e12, 24e9, ("RTX", "4090")),
)


def find_device(name: str) -> Device:
    """The GPU of this name, ours in any case or the one that CUDA reports.

    Raises:
        ValueError: there is none; the message lists them.
    """
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    for device in DEVICES:
        reported = words.issuperset(device.words) and not words & {"LAPTOP", "MIG"}
        if name.upper() == device.name.upper() or reported:
            return device
    raise ValueError(f"GPU: expected one of {', '.join(d.name for d in DEVICES)}, got {name!r}")
