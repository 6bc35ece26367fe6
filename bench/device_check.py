"""Everything that only a GPU can tell, by one command within eight minutes: `python bench/device_check.py`.

Needs a checkout, torch, Triton and transformers; nothing is installed, built or fetched. Sections run in order of
importance, each in a process of its own that is stopped when its time is up: what one breaks or leaves hanging costs
no other. After every section the results so far are in `results/<gpu>.json`, which `bench/run.py roofline --measured`
reads, and the end is a table. `--dry-run` does the same here: tiny shapes, kernels in Triton's interpreter, models on
the PyTorch reference, steps replayed by calling them, times of no meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The checkout's own packages, whatever is installed; tests holds the tiny models and the interpreter's repairs.
PLACES = [str(ROOT / name) for name in ("engine", "triton_kernels", "bench", "")]

LIMIT_S = 480
CLOSING_S = 3  # kept for the last files and the table
# Name and seconds, most important first.
SECTIONS = {
    "probe": 30,
    "tests": 90,
    "errors": 40,
    "exact": 70,
    "sanitizer": 50,
    "kernels": 45,
    "Qwen3-8B": 60,
    "Qwen3-4B": 45,
    "Llama-3.1-8B": 50,
    "smollm2": 30,
}
HIDDEN = ("small_step",)  # what the sanitizer watches
TAIL = 4000  # characters kept of what a section printed


def main(arguments: list[str] | None = None) -> int:
    """Run all sections, or one of them in this process; 0 if none failed."""
    options = _parser().parse_args(arguments)
    if options.section is not None:
        return run_section(options.section, options.into, options.dry_run, SECTIONS.get(options.section, 60))
    began = time.monotonic()
    report: dict[str, Any] = {
        "benchmark": "device_check",
        "label": "dry run: no figure means anything" if options.dry_run else "measured",
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "sections": {},
    }
    for name, box in SECTIONS.items():
        if options.only and name not in options.only:
            continue
        left = options.limit - CLOSING_S - (time.monotonic() - began)
        report["sections"][name] = found = _started(name, min(box, left), options.dry_run)
        if name == "probe":
            report |= {
                key: found["results"][key]
                for key in ("gpu", "hardware", "versions")
                if key in found["results"]
            }
        report["seconds"] = round(time.monotonic() - began, 1)
        path = _write(options.output, report, options.dry_run)
        print(
            f"{name:14}{found['status']:10}{found['seconds']:7.1f} s  {found.get('reason', '')}", flush=True
        )
    from device_table import show

    show(report)
    print(f"results: {path}")
    return 0 if all(s["status"] in ("ok", "skipped") for s in report["sections"].values()) else 1


def run_section(name: str, into: Path, dry: bool, seconds: float) -> int:
    """One section in this process; its results are in `into` as far as they got."""
    found: dict[str, Any] = {"status": "running", "results": {}}

    def put(key: str, value: Any) -> None:
        found["results"][key] = value
        replace_json(into, found)

    from device_setup import Setup, Skip

    try:
        setup = Setup.of(dry, seconds)
        from device_sections import find_section

        find_section(name)(setup, put)
        found["status"] = "ok"
    except Skip as reason:
        found |= {"status": "skipped", "reason": str(reason)}
    except BaseException as error:
        found |= {"status": "failed", "reason": _line(error), "traceback": traceback.format_exc()[-TAIL:]}
    replace_json(into, found)
    return 0 if found["status"] in ("ok", "skipped") else 1


def replace_json(path: Path, value: Any) -> None:
    """A file that is there whole: the last state or this one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "results", metavar="FOLDER", help="(results/)")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), metavar="NAME,…", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="N", help=f"seconds in all ({LIMIT_S})"
    )
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at tiny shapes")
    parser.add_argument("--section", choices=(*SECTIONS, *HIDDEN), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser


def _started(name: str, seconds: float, dry: bool) -> dict[str, Any]:
    """Run a section in a process of its own for at most `seconds`; what it wrote, and how it ended."""
    began = time.monotonic()
    if seconds <= 0:
        return {"status": "no time", "seconds": 0.0, "results": {}}
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        into, log = Path(folder) / "section.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--section", name, "--into", str(into), *(["--dry-run"] * dry)]
        ended = bounded(command, seconds, log)
        try:
            found: dict[str, Any] = json.loads(into.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {"status": "running", "results": {}}
        if found["status"] == "running":  # it was stopped, or died of a signal
            how = "timed out" if ended is None else "failed"
            found |= {
                "status": how,
                "reason": f"stopped after {seconds:.0f} s" if ended is None else f"exit {ended}",
            }
        if found["status"] not in ("ok", "skipped"):
            found["log"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def bounded(command: list[str], seconds: float, log: Path, **environment: str) -> int | None:
    """Exit code of a command, its output in `log`; None: it and what it started were stopped after `seconds`."""
    paths = os.pathsep.join([*PLACES, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **environment}
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _write(folder: Path, report: dict[str, Any], dry: bool) -> Path:
    gpu = "dry-run" if dry else str(report.get("gpu", "unknown")).lower().replace(" ", "-")
    path = folder / f"{gpu}.json"
    folder.mkdir(parents=True, exist_ok=True)
    replace_json(path, report)
    return path


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, timeout=10
        )
        return found.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


if __name__ == "__main__":
    sys.path[:0] = [place for place in PLACES if place not in sys.path]
    sys.exit(main())
