"""Measured steps, read from results files, beside their projections.

A file is a report of `blockpilot calibrate` or of `bench/run.py throughput`, or any JSON that holds such reports or
entries with `requests`, `context`, `width` and `step_ms`. What stands around them says where they were measured:
`model`, `gpu` (else the CUDA device in `hardware`), `weights`, `dtype`. A CPU's bandwidth and bytes of weights are
those of a throughput report of the same processor and weights: the file itself, or another one given with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.training.calibration_rows import parse_rows
from roofline_devices import Device, find_device
from roofline_models import Model, find_model, values
from roofline_project import LABEL, Settings, duration, limit_ms
from roofline_terms import WEIGHTS, Load, Sizes, step_terms, verify_terms

ENTRY = ("requests", "context", "width", "step_ms")
AROUND = ("model", "gpu", "hardware", "device", "weights", "dtype", "bytes_per_s", "weight_bytes")
THROUGHPUT_MODEL = "SmolLM2-135M"  # the only one that this benchmark runs
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Q8_0_BYTES = 34 / 32  # what a drafter's weights become beside a target in stored blocks


@dataclass(frozen=True)
class Step:
    """One measurement. `what`: a whole "step", or "pass", a verification alone."""

    source: str
    what: str
    model: Model
    device: Device
    sizes: Sizes
    load: Load
    ms: float


def read_measured(paths: Sequence[Path], models: Sequence[str] | None = None) -> list[Step]:
    """Every measurement of these files.

    Args:
        models: where it is one, the model of files that name none.

    Raises:
        ValueError: a file that cannot be read, holds no measurement, or does not say what was measured on what.
    """
    found = [(path, _load(path)) for path in paths]
    beside = [report for _, reports in found for _, report in reports if _is_throughput(report)]
    steps: list[Step] = []
    for path, reports in found:
        try:
            for around, report in reports:
                steps += _steps(path.name, around, report, beside, models)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return steps


def compare(step: Step, settings: Settings) -> dict[str, Any]:
    """The measured time over the projected one."""
    terms = (verify_terms if step.what == "pass" else step_terms)(step.model, step.sizes, step.load)
    found = duration(terms, step.device, settings)
    return {
        "label": LABEL,
        "source": step.source,
        "what": step.what,
        "model": step.model.name,
        "gpu": step.device.name,
        "published_peaks": not step.device.measured,
        "requests": step.load.requests,
        "context": step.load.context,
        "width": step.load.width,
        "measured_ms": step.ms,
        "step_ms": found["ms"],
        "ratio": step.ms / found["ms"],
        "limit_ms": limit_ms(terms, step.device),
        "bound": found["bound"],
    }


def _load(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a readable JSON file, got {error}") from error
    try:
        found = list(_reports(content, {}))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not found:
        raise ValueError(f"{path}: expected measurements, such as entries with {', '.join(ENTRY)}, got none")
    return found


def _reports(found: Any, around: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What holds measurements, at any depth, each with the descriptions around it."""
    if isinstance(found, list):
        for part in found:
            yield from _reports(part, around)
    elif isinstance(found, dict):
        if found.get("benchmark") == "roofline":
            raise ValueError("expected measurements, got projections of this benchmark")
        around = {**around, **{key: found[key] for key in AROUND if key in found}}
        if "calibration" in found or _is_throughput(found) or set(ENTRY) <= set(found):
            yield around, found
        else:
            for part in found.values():
                yield from _reports(part, around)


def _is_throughput(report: dict[str, Any]) -> bool:
    return report.get("benchmark") == "throughput"


def _steps(
    source: str,
    around: dict[str, Any],
    report: dict[str, Any],
    beside: Sequence[dict[str, Any]],
    models: Sequence[str] | None,
) -> Iterator[Step]:
    cells: list[tuple[str, Load, float]]
    if _is_throughput(report):
        around = {"model": THROUGHPUT_MODEL, **around, "device": "cpu"}
        cells = _throughput_cells(report)
    elif "calibration" in report:
        rows = parse_rows(report.get("rows"))
        cells = [("step", Load(r.requests, r.context, r.width), r.total) for r in rows]
    else:
        cells = [("step", Load(*(report[key] for key in ENTRY[:3])), _positive("step_ms", report["step_ms"]))]
    model = _model(around, models)
    device, sizes = _where(model, around, beside)
    for what, load, ms in cells:
        yield Step(source, what, model, device, sizes, load, ms)


def _throughput_cells(report: dict[str, Any]) -> list[tuple[str, Load, float]]:
    """Steps of plain decoding, at the mean context of an answer, and passes over one block."""
    try:
        context, budget = (report["settings"][key] for key in ("context", "max_new_tokens"))
        plain = [
            ("step", Load(row["requests"], context + budget // 2, 1), _positive("step_ms", row["step_ms"]))
            for row in report["throughput"]
        ]
        passes = [
            ("pass", Load(1, context, row["rows"]), _positive("pass_ms", row["pass_ms"]))
            for row in report["passes"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"throughput: expected settings, throughput and passes, got {error!r}") from error
    return plain + passes


def _model(around: dict[str, Any], models: Sequence[str] | None) -> Model:
    named = around.get("model")
    if named is None and models is not None and len(models) == 1:
        named = models[0]
    if not isinstance(named, str):
        raise ValueError(f"model: expected its name in the file or one of --models, got {named!r}")
    return find_model(named.rsplit("/", 1)[-1].removesuffix("-Instruct"))


def _where(model: Model, around: dict[str, Any], beside: Sequence[dict[str, Any]]) -> tuple[Device, Sizes]:
    hardware = _hardware(around)
    on_cpu = around.get("device") == "cpu" or around.get("gpu") == "cpu"
    gpu = around.get("gpu") or next(iter(hardware["cuda"]), None)
    if not on_cpu:
        if gpu is None:
            raise ValueError("gpu: expected its name, or a CUDA device in hardware, got neither")
        return find_device(str(gpu)), _sizes(around)
    found = _read_speed(around, hardware, beside)
    matrices = (*model.target.matrices, model.head)
    value = _dtype_bytes(around)
    stored = str(around.get("weights")).startswith("stored")
    sizes = Sizes(found["weight_bytes"] / values(*matrices), Q8_0_BYTES if stored else value, value)
    return Device(str(hardware.get("cpu", "cpu")), found["bytes_per_s"], measured=True), sizes


def _hardware(around: dict[str, Any]) -> dict[str, Any]:
    found = around.get("hardware", {})
    if not isinstance(found, dict):
        raise ValueError(f"hardware: expected an object, got {found!r}")
    cuda = found.get("cuda") or []
    if not isinstance(cuda, list):
        raise ValueError(f"hardware.cuda: expected a list of names, got {cuda!r}")
    return found | {"cuda": cuda}


def _read_speed(
    around: dict[str, Any], hardware: dict[str, Any], beside: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Bandwidth and bytes of the weights, from around the measurement or a throughput report beside it."""
    for found in (around, *beside):
        cpu = _hardware(found).get("cpu")
        same = cpu == hardware.get("cpu") and found.get("weights") == around.get("weights")
        if same and "bytes_per_s" in found and "weight_bytes" in found:
            return {key: _positive(key, found[key]) for key in ("bytes_per_s", "weight_bytes")}
    raise ValueError(
        f"expected a CPU's bytes_per_s and weight_bytes in it, or a throughput report of {hardware.get('cpu')!r} "
        f"with {around.get('weights')!r} weights beside it, got none"
    )


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
    return float(value)


def _sizes(around: dict[str, Any]) -> Sizes:
    """Of a GPU's weights: a name of `--weights`, or the engine's "dense" in its dtype."""
    weights = around.get("weights", "bf16")
    if weights == "dense":
        value = _dtype_bytes(around)
        return Sizes(value, value, value)
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise ValueError(f"weights: expected dense, {', '.join(WEIGHTS)}, got {weights!r}")
    return WEIGHTS[weights]


def _dtype_bytes(around: dict[str, Any]) -> int:
    dtype = around.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return DTYPE_BYTES[dtype]
