"""`bench/run.py roofline`: bytes counted by hand, published sizes, order of costs, and what its report says."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest

import roofline
import run as bench_run
from blockpilot import bundled
from blockpilot.drafters.dflash_config import DFlashConfig
from roofline_devices import DEVICES, Device, find_device
from roofline_models import MODELS, find_model, values
from roofline_project import Settings, duration, project
from roofline_terms import WEIGHTS, Load, Term, policy_terms, resident_bytes, step_terms, verify_terms

BF16 = WEIGHTS["bf16"]
PARAMETERS = {  # as published with the checkpoints
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Llama-3.1-8B": 8_030_261_248,
    "SmolLM2-135M": 134_515_008,
}
LAYER_8B = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288
HEAD_8B = 151936 * 4096
KV_8B = 36 * 2 * 8 * 128 * 2  # bytes of a position


def sizes_of(terms):
    return {(term.phase, term.name): term.bytes for term in terms}


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_parameters_are_the_published_ones(model):
    embeddings = (model.head,) if model.tied else (model.head, model.head)
    total = values(*model.target.matrices, *embeddings) + model.target.norm_values
    assert total == PARAMETERS[model.name]


def test_bytes_of_a_plain_step_by_hand():
    found = sizes_of(step_terms(find_model("Qwen3-8B"), BF16, Load(1, 1024, 1)))
    assert found == {
        ("verify", "layers"): 36 * LAYER_8B * 2,
        ("verify", "attention"): (1024 + 2) * KV_8B,
        ("verify", "norms"): 4 * (36 * (2 * 4096 + 2 * 128) + 4096),
        ("verify", "embedding"): 4096 * 2,
        ("verify", "head"): HEAD_8B * 2,
        ("verify", "logits"): 2 * 4 * 151936,
        ("verify", "accept"): 0,
    }
    weights = found["verify", "layers"] + found["verify", "head"]
    assert weights == 15_136_194_560  # 15.1 GB: the embedding, 1.2 GB more, is not read whole


def test_bytes_of_drafting_and_commit_by_hand():
    found = sizes_of(step_terms(find_model("Qwen3-8B"), BF16, Load(2, 1024, 16)))
    draft_kv = KV_8B * 5 // 36
    assert {key: size for key, size in found.items() if key[0] != "verify"} == {
        ("draft", "layers"): 5 * LAYER_8B * 2,
        ("draft", "attention"): 2 * (1024 + 32) * draft_kv,
        ("draft", "norms"): 4 * (5 * (2 * 4096 + 2 * 128) + 4096),
        ("draft", "embedding"): 2 * 16 * 4096 * 2,
        ("draft", "head"): HEAD_8B * 2,
        ("draft", "logits"): 2 * 15 * 2 * 4 * 151936,
        ("commit", "fc, k and v"): 2 * (5 * 4096 * 4096 + 5 * 2 * 1024 * 4096) + 4 * 4096,
        ("commit", "context append"): 2 * 16 * draft_kv,
    }
    assert found["verify", "attention"] == 2 * (1024 + 32) * KV_8B
    (policy,) = policy_terms(find_model("Qwen3-8B"))
    assert policy.bytes == 2 * 2048 * (151936 + 2048 + 5)  # 0.63 GB


def test_arithmetic_by_hand():
    terms = {t.name: t.flops for t in verify_terms(find_model("Qwen3-8B"), BF16, Load(2, 100, 3))}
    pairs = 101 + 102 + 103
    assert terms["layers"] == 2 * 6 * 36 * LAYER_8B and terms["head"] == 2 * 6 * HEAD_8B
    assert terms["attention"] == 2 * pairs * 36 * 32 * 128 * 4


def test_weights_of_a_byte_have_a_scale_a_row():
    model, load = find_model("Qwen3-8B"), Load(1, 1024, 16)
    full, small = (sizes_of(step_terms(model, WEIGHTS[kind], load)) for kind in ("bf16", "int8"))
    assert small["verify", "head"] == full["verify", "head"] / 2 + 4 * 151936
    assert small["verify", "attention"] == full["verify", "attention"]


def test_the_bundled_drafter_has_this_shape():
    source = json.loads((bundled.drafter_path() / "config.json").read_text(encoding="utf-8"))
    model, config = find_model("smollm2-135m"), DFlashConfig.from_json(source)
    drafter = model.drafter
    fc = (drafter.hidden, model.features * model.target.hidden)
    total = values(*drafter.matrices, fc) + drafter.norm_values + drafter.hidden
    shapes = config.expected_tensors().values()
    assert total == sum(s[0] * (s[1] if len(s) > 1 else 1) for s in shapes)
    assert (model.block_size, model.vocab) == (config.block_size, config.model.vocab_size)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_more_work_never_costs_less(model, device):
    axes = {"requests": (1, 2, 64), "context": (0, 1, 4096), "width": (1, 2, 8, 16, 64)}
    for sizes in WEIGHTS.values():
        cost = {}
        for cell in itertools.product(*axes.values()):
            terms = step_terms(model, sizes, Load(*cell))
            cost[cell] = duration(terms, device, Settings())["ms"], resident_bytes(model, sizes, Load(*cell))
        for i, grid in enumerate(axes.values()):
            for less, more in itertools.pairwise(grid):
                for cell in (c for c in cost if c[i] == less):
                    above = (*cell[:i], more, *cell[i + 1 :])
                    assert cost[cell][0] < cost[above][0] and cost[cell][1] < cost[above][1], (cell, above)


def test_the_longer_of_memory_and_compute_counts():
    device, settings = Device("d", bandwidth=1e9, flops=1e12), Settings(efficiency=0.5, launch_us=10)
    terms = [Term("draft", "a", bytes=1e6, flops=1e6, launches=2), Term("verify", "b", bytes=1e3, flops=2e9)]
    found = duration(terms, device, settings)
    assert found["spent"] == pytest.approx({"memory": 2.0, "compute": 4.0, "launches": 0.02})
    assert found["bound"] == "compute" and found["ms"] == pytest.approx(6.02)
    assert found["phases"] == pytest.approx({"draft": 2.02, "verify": 4.0, "commit": 0.0})
    measured = replace(device, measured=True)
    assert duration(terms[:1], measured, settings)["ms"] == pytest.approx(1.0)


def test_many_rows_are_bound_by_compute():
    model, device = find_model("Qwen3-8B"), find_device("H200")
    few, many = (project(model, device, BF16, Load(r, 128, 16), Settings(), 4.0) for r in (1, 256))
    assert (few["bound"], many["bound"]) == ("memory", "compute")
    assert many["tokens_per_s"] == pytest.approx(256 * 4 / many["step_ms"] * 1e3)
    assert few["step_ms"] == pytest.approx(few["draft_ms"] + few["verify_ms"] + few["commit_ms"])
    assert few["draft_share"] == few["draft_ms"] / few["step_ms"] and few["limit_ms"] < few["step_ms"]


def test_a_published_tau_holds_at_its_own_width_alone():
    model, device = find_model("Qwen3-8B"), find_device("H200")
    wide, narrow, plain = (
        project(model, device, BF16, Load(1, 1024, w), Settings(), "math500") for w in (16, 8, 1)
    )
    assert (wide["tau"], wide["tau_source"]) == (7.87, "published, math500")
    assert narrow["tau"] is narrow["tokens_per_s"] is narrow["speedup"] is None
    assert plain["tau"] == plain["even_tau"] == plain["speedup"] == 1
    assert wide["speedup"] == pytest.approx(7.87 / wide["even_tau"])


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("h100-sxm", "H100-SXM"),
    ],
)
def test_names_of_gpus(reported, name):
    assert find_device(reported).name == name


@pytest.mark.parametrize(
    "other",
    ["NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA GB200", "NVIDIA GeForce RTX 4090 Laptop GPU"],
)
def test_other_gpus_are_refused(other):
    with pytest.raises(ValueError, match=rf"expected one of H200, .*, got '{other}'"):
        find_device(other)


def test_report(tmp_path, capsys):
    file = tmp_path / "roofline.json"
    options = ["--models", "qwen3-8b", "--gpus", "H200,RTX-4090", "--requests", "1,64", "--json", str(file)]
    assert bench_run.main(["roofline", *options]) == 0
    report = json.loads(file.read_text())
    assert report["ok"] is True and report["label"] == "projected" and report["measured"] == []
    assert {entry["label"] for entry in report["entries"] + report["policy"]} == {"projected"}
    cells = [(e["gpu"], e["requests"], e["width"]) for e in report["entries"]]
    assert cells == list(itertools.product(("H200", "RTX-4090"), (1, 64), (1, 8, 16)))
    assert [e["fits"] for e in report["entries"] if e["width"] == 16] == [True, True, True, False]
    shown = capsys.readouterr().out
    assert shown.startswith("projected: ") and "published by z-lab for gsm8k" in shown


def test_defaults_cover_every_model_and_gpu(capsys):
    report = roofline.run(False)
    assert len(report["policy"]) == len(MODELS) * len(DEVICES)
    assert len(report["entries"]) == len(DEVICES) * (3 * len(MODELS) - 1)
    assert report["too_wide"] == {"SmolLM2-135M": [16]}
    roofline.show(report)
    assert "SmolLM2-135M: left out, beyond twice its drafter's block: width 16" in capsys.readouterr().out
    quick = roofline.run(True)
    assert {(e["model"], e["gpu"]) for e in quick["entries"]} == {("Qwen3-8B", "H200")}


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    assert bench_run.main(["roofline", "--json", str(tmp_path / "r.json")]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "gpt-2"], "expected one of Qwen3-4B, .*, got 'gpt-2'"),
        (["--gpus", "H200,abacus"], "expected one of H200, .*, got 'abacus'"),
        (["--widths", "0,4"], "expected whole numbers >= 1, got '0'"),
        (["--contexts", "x"], "expected whole numbers >= 0, got 'x'"),
        (["--tau", "0.5"], "expected a number >= 1 or one of gsm8k, .*, got '0.5'"),
        (["--tau", "nan"], "expected a number >= 1 or one of gsm8k, .*, got 'nan'"),
        (["--weights", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_options_that_make_no_sense(options, message, capsys):
    with pytest.raises(SystemExit):
        bench_run.main(["roofline", *options])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--efficiency", "1.5"], "efficiency: expected a share in (0, 1], got 1.5"),
        (["--launch-us", "-1"], "launch_us: expected microseconds >= 0, got -1"),
        (["--widths", "33"], "--widths: expected one of at most 32, twice a drafter's block, got [33]"),
        (["--tau", "9"], "--tau: expected 1 to 8, what a step of width 8 can commit, got 9"),
    ],
)
def test_values_that_make_no_sense(options, message, capsys):
    assert bench_run.main(["roofline", "--quick", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ((0, 1, 1), "requests: expected an int >= 1, got 0"),
        ((1, -1, 1), "context: expected an int >= 0, got -1"),
        ((1, 1, True), "width: expected an int >= 1, got True"),
    ],
)
def test_loads_that_make_no_sense(cell, message):
    with pytest.raises(ValueError, match=message):
        Load(*cell)
