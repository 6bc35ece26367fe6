"""`bench/run.py roofline --measured`: which files are read, what they are compared with, what is refused."""

from __future__ import annotations

import json

import pytest

import run as bench_run
from blockpilot.training.calibration_rows import PHASES
from roofline_devices import find_device
from roofline_measured import compare, read_measured
from roofline_models import find_model
from roofline_project import Settings, project
from roofline_terms import WEIGHTS, Load

CPU = {"cpu": "a CPU", "cuda": []}
THROUGHPUT = {
    "benchmark": "throughput",
    "settings": {"context": 128, "max_new_tokens": 64},
    "weights": "stored-int16",
    "dtype": "float32",
    "weight_bytes": 96e6,
    "bytes_per_s": 20e9,
    "throughput": [{"requests": 4, "step_ms": 12.0}],
    "passes": [{"rows": 8, "pass_ms": 9.6}],
    "hardware": CPU,
}


def calibration(device, weights, hardware, dtype="float32", **more):
    rows = []
    for width, ms in ((1, 5.0), (16, 6.0)):
        spread = dict.fromkeys(("median", "p10", "p90"), ms)
        counts = {"requests": 2, "context": 1024, "width": width, "sum_width": 2 * width, "steps": 9}
        rows.append({**counts, "ms": dict.fromkeys(PHASES, spread)})
    about = {"device": device, "weights": weights, "dtype": dtype, "hardware": hardware}
    return {"calibration": 1, **about, "rows": rows, **more}


@pytest.fixture
def write(tmp_path):
    def put(content, name="results.json"):
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return path

    return put


def test_a_throughput_report_brings_its_own_bandwidth(write):
    step, one_pass = read_measured([write(THROUGHPUT)])
    assert (step.what, step.load, step.ms) == ("step", Load(4, 160, 1), 12.0)
    assert (one_pass.what, one_pass.load) == ("pass", Load(1, 128, 8))
    row = compare(one_pass, Settings(efficiency=0.5, launch_us=100))
    cached = (128 + 2 * 8) * 30 * 2 * 3 * 64 * 4
    known = 96e6 + cached + 8 * 2 * 4 * 49152  # norms and embedding rows are little beside them
    assert row["limit_ms"] == row["step_ms"] == pytest.approx(known / 20e9 * 1e3, rel=5e-3)
    assert row["ratio"] == 9.6 / row["step_ms"] and row["label"] == "projected"
    assert row["gpu"] == "a CPU" and row["published_peaks"] is False


def test_a_calibration_of_a_cpu_takes_the_bandwidth_beside_it(write):
    path = write(calibration("cpu", "stored-int16", CPU))
    plain, wide = read_measured([path, write(THROUGHPUT, "t.json")], ["SmolLM2-135M"])[:2]
    assert (plain.load, wide.load) == (Load(2, 1024, 1), Load(2, 1024, 16))
    assert plain.device.bandwidth == 20e9 and plain.sizes.drafter == 34 / 32
    for other in ({"weights": "dense"}, {"hardware": {"cpu": "another"}}):
        beside = write({**THROUGHPUT, **other}, "t.json")
        with pytest.raises(ValueError, match=r"results\.json: expected a CPU's bytes_per_s .*, got none"):
            read_measured([path, beside], ["SmolLM2-135M"])


def test_results_of_a_gpu(write):
    measured = calibration("cuda", "dense", {"cpu": "x", "cuda": ["NVIDIA H200"]}, dtype="bfloat16")
    entry = {"requests": 1, "context": 512, "width": 8, "step_ms": 6.0}
    path = write({"model": "Qwen/Qwen3-8B", "runs": [measured, {"gpu": "NVIDIA B200", "cells": [entry]}]})
    plain, wide, other = read_measured([path])
    assert plain.device.name == "H200" and other.device.name == "B200" and other.ms == 6.0
    row = compare(wide, Settings())
    model, device = find_model("Qwen3-8B"), find_device("H200")
    expected = project(model, device, WEIGHTS["bf16"], Load(2, 1024, 16), Settings(), "gsm8k")
    assert row["step_ms"] == expected["step_ms"] and row["limit_ms"] == expected["limit_ms"]
    assert row["ratio"] == 6.0 / expected["step_ms"] and row["published_peaks"] is True


def test_report(write, capsys):
    entry = {"requests": 1, "context": 512, "width": 1, "step_ms": 5.0, "model": "Qwen3-8B", "gpu": "H200"}
    arguments = ["roofline", "--quick", "--measured", str(write(THROUGHPUT, "t.json"))]
    assert bench_run.main([*arguments, str(write(entry))]) == 0
    shown = capsys.readouterr().out
    assert "measured / projected" in shown and "than its bandwidth: yes" in shown
    assert "bandwidth of a throughput report" in shown
    assert bench_run.main([*arguments, str(write({**entry, "step_ms": 3.0}))]) == 1
    assert "than its bandwidth: NO" in capsys.readouterr().out


ENTRY = {"requests": 1, "context": 1, "width": 1, "step_ms": 1.0, "model": "Qwen3-8B", "gpu": "H200"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected measurements, such as entries with requests, .*, got none"),
        ({"benchmark": "roofline", "entries": [ENTRY]}, "expected measurements, got projections"),
        ({**ENTRY, "model": None}, "model: expected its name in the file or one of --models, got None"),
        ({**ENTRY, "model": "gpt-2"}, "model: expected one of Qwen3-4B, .*, got 'gpt-2'"),
        ({**ENTRY, "gpu": None}, "gpu: expected its name, or a CUDA device in hardware, got neither"),
        ({**ENTRY, "gpu": "abacus"}, "GPU: expected one of H200, .*, got 'abacus'"),
        ({**ENTRY, "weights": "q3"}, "weights: expected dense, bf16, .*, got 'q3'"),
        ({**ENTRY, "weights": "dense"}, "dtype: expected one of float32, .*, got None"),
        ({**ENTRY, "weights": ["bf16"]}, r"weights: expected dense, bf16, .*, got \['bf16'\]"),
        ({**ENTRY, "weights": "dense", "dtype": {}}, r"dtype: expected one of float32, .*, got \{\}"),
        ({**ENTRY, "gpu": None, "hardware": {"cuda": 5}}, "hardware.cuda: expected a list of names, got 5"),
        (
            {**ENTRY, "gpu": None, "hardware": {"cuda": "NVIDIA H200"}},
            "hardware.cuda: expected a list of names, got 'NVIDIA H200'",
        ),
        ({**ENTRY, "gpu": "NVIDIA H200 MIG 1g.18gb"}, "GPU: expected one of H200, .*, got 'NVIDIA H200 MIG"),
        ({**ENTRY, "hardware": 3}, "hardware: expected an object, got 3"),
        ({**ENTRY, "width": "8"}, "width: expected an int >= 1, got '8'"),
        ({**ENTRY, "step_ms": 0}, "step_ms: expected a finite number > 0, got 0"),
        ({**ENTRY, "step_ms": True}, "step_ms: expected a finite number > 0, got True"),
        ({**THROUGHPUT, "passes": None}, "throughput: expected settings, throughput and passes"),
        ({**THROUGHPUT, "bytes_per_s": -1}, "bytes_per_s: expected a finite number > 0, got -1"),
        (
            {**calibration("cuda", "dense", CPU), "rows": 1, "model": "Qwen3-8B"},
            "rows: expected a list, got int",
        ),
    ],
)
def test_files_that_say_too_little(write, content, message):
    with pytest.raises(ValueError, match=rf"results\.json: {message}"):
        read_measured([write(content)])


def test_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("broken.json", "deep.json", "absent.json"):
        assert bench_run.main(["roofline", "--quick", "--measured", str(tmp_path / name)]) == 2
        assert "expected a readable JSON file" in capsys.readouterr().err.replace("\n", " ")
