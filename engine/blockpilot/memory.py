"""Memory is computed before anything is allocated; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from blockpilot.errors import MemoryLimitError

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Free memory of a device in bytes; on a CPU the lower of the system's and the container's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    free = psutil.virtual_memory().available
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return free if limit is None or used is None else min(free, max(limit - used, 0))


def _cgroup(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def require_fits(parts: Mapping[str, int], device: torch.device) -> None:
    """Raise `MemoryLimitError` naming every part when their sum exceeds what is free on `device`."""
    need, free = sum(parts.values()), available_bytes(device)
    if need <= free:
        return
    listed = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in parts.items())
    raise MemoryLimitError(
        f"memory on {device}: needs {need / 2**20:.0f} MiB ({listed}), {free / 2**20:.0f} MiB are free; "
        "lower max_requests or max_length"
    )
