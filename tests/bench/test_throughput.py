"""`bench/run.py throughput`: a tiny model through the real measurement, and the figures made of it."""

from __future__ import annotations

import json

import pytest
import torch

import run as bench_run
import throughput
from blockpilot_kernels import dispatch
from blockpilot_kernels.packed_decoder import FORMATS, Blocks, Weights
from tests.engine.pair import tiny_folder, tiny_llm
from tests.implementations import require

SIZES = ["--requests", "3,1", "--rows", "1,2", "--context", "9", "--max-new-tokens", "6", "--repeats", "1"]


@pytest.fixture
def tiny(monkeypatch):
    """The tiny target in place of SmolLM2, and a buffer that is read in no time."""
    require("cpp")
    monkeypatch.setattr(throughput, "TARGET", tiny_folder())
    monkeypatch.setattr(throughput, "BUFFER_BYTES", 1 << 16)


def test_report(tiny, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert bench_run.main(["throughput", *SIZES, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["ok"] is True and report["weights"] == "dense"
    assert [r["requests"] for r in report["throughput"]] == [1, 3]
    assert [r["rows"] for r in report["passes"]] == [1, 2]
    for row in report["throughput"]:
        assert row["step_ms"] == pytest.approx(row["pass_ms"] + row["host_ms"])
        assert row["tokens_per_s"] == pytest.approx(row["requests"] / row["step_ms"] * 1e3)
        assert min(row["pass_ms"], row["host_ms"]) > 0
    assert all(min(r["products_ms"], r["pass_ms"], r["host_ms"]) > 0 for r in report["passes"])
    assert report["floor_ms"] == pytest.approx(report["weight_bytes"] / report["bytes_per_s"] * 1e3)
    shown = capsys.readouterr().out
    assert "pass / floor" in shown and shown.rstrip().endswith(
        "answers the same at any number of requests: yes"
    )


def test_answers_that_depend_on_their_neighbours_are_told(tiny, monkeypatch, capsys):
    real = throughput.decode

    def decode(llm, count, context, budget):
        found = real(llm, count, context, budget)
        found["token_ids"][0][-1] += count
        return found

    monkeypatch.setattr(throughput, "decode", decode)
    assert bench_run.main(["throughput", *SIZES]) == 1
    assert capsys.readouterr().out.rstrip().endswith("NO")


def test_agreement():
    assert throughput.agree([[[1, 2]], [[1, 2], [3]], [[1, 2], [3], [4]]])
    assert not throughput.agree([[[1, 2]], [[1, 2], [3]], [[1, 2], [4], [4]]])
    assert not throughput.agree([[[1, 9]], [[1, 2], [3]]])


def test_a_failed_request_is_an_error(tiny, monkeypatch):
    llm = tiny_llm(max_requests=2)
    monkeypatch.setattr(llm.target, "verify_commit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        throughput.decode(llm, 2, 5, 4)


@pytest.mark.parametrize("kind", FORMATS)
def test_bytes_of_a_matrix(kind):
    weights = Weights(torch.bfloat16 if kind == "BF16" else torch.float32)
    rows, columns = 49, 96
    dense = torch.zeros(rows, columns)
    width = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}.get(kind)
    if width:
        record = weights.linear(Blocks(kind, torch.zeros(rows, columns // 32, width, dtype=torch.uint8)))
    else:
        record = weights.linear(dense)
    assert throughput.record_bytes(record) == weights.formats[kind] == sum(weights.formats.values())


def test_the_products_are_those_of_a_pass(tiny):
    """Every packed byte but norms and the embedding, which a pass does not read whole."""
    target = throughput.packed_target(tiny_llm())
    c = target.config
    layer = c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.hidden_size * 48
    names = sum(r[2] * r[3] for r in target.matrices)
    assert names == c.num_layers * layer + c.vocab_size * c.hidden_size


def test_what_cannot_be_measured(tiny, capsys):
    assert bench_run.main(["throughput", "--max-new-tokens", "2"]) == 2
    with dispatch.forced("reference"):
        assert bench_run.main(["throughput", *SIZES]) == 2
    assert "C++ decoder" in capsys.readouterr().err
    for wrong in (["--requests", "0"], ["--rows", "1,x"], ["--context", "-1"]):
        with pytest.raises(SystemExit):
            bench_run.main(["throughput", *wrong])
