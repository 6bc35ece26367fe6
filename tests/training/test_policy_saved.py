"""Training: what the report says, and which policy it leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from blockpilot.policies import Pair, load_policy
from blockpilot.policies.policy_file import read_policy
from blockpilot.training.label_store import read_labels
from blockpilot.training.policy_training import TrainSettings, predictor_file, train_policy
from tests.training.calibrations import calibration, modelled
from tests.training.fakes import (
    HIDDEN,
    VOCAB,
    WINDOW,
    planted,
    write_labels,
)
from tests.training.policy_runs import COUNT, QUICK, read_predictor, train, weights


def test_what_the_report_does_not_support_is_not_the_default(tmp_path):
    labels, path = (
        write_labels(tmp_path / "labels.jsonl", *planted(COUNT, rule=False)),
        tmp_path / "p.safetensors",
    )
    report = train(labels, path)
    fixed = report.acceptance.best_fixed_width
    assert report.saved == {"kind": "fixed", "width": fixed}
    policy = load_policy(path, "fake-target", "fake-drafter", range(1, 9))
    assert policy.choose(torch.zeros(2, VOCAB)).tolist() == [fixed] * 2
    assert read_policy(path).report == read_policy(predictor_file(path)).report
    assert predictor_file(path) == tmp_path / "p.predictor.safetensors"
    assert read_policy(predictor_file(path)).predictor.window == WINDOW
    for file in (path, predictor_file(path)):
        with pytest.raises(ValueError, match="expected a policy made for"):
            load_policy(file, "fake-target", "another", range(1, 9))


def test_a_supported_predictor_is_the_default_and_alone(trained):
    report, path = trained
    assert report.saved == {"kind": "predictor"} and report.fixed_width is None
    assert read_policy(path).predictor.window == WINDOW and not predictor_file(path).exists()


def test_plain_decoding_is_a_candidate_for_throughput(tmp_path):
    """Steps that draft cost thrice: plain decoding is best, though no label was made at width 1."""
    inputs, tau = planted(COUNT)
    labels, path = write_labels(tmp_path / "labels.jsonl", inputs, tau), tmp_path / "policy.safetensors"
    cost = {1: 1.0, **dict.fromkeys(WINDOW, 3.0)}
    report = train(labels, path, "throughput", cost, epochs=5)
    assert report.window == (1, *WINDOW) and report.fixed_width == 1
    assert report.throughput.best_widths[1] == 100 and report.throughput.strategies["best_fixed"].mean == 1
    assert load_policy(path, "fake-target", "fake-drafter", WINDOW).window == (1,)
    assert read_policy(predictor_file(path)).cost == cost
    chosen = train(labels, path, "throughput", cost, window=(2, 4), epochs=2)
    assert chosen.window == (2, 4) and chosen.throughput.strategies["plain"].mean == 1
    assert train(labels, path, cost=cost, epochs=2).window == WINDOW  # it can never be best in τ
    assert train(labels, path, window=(1, 4), epochs=2).tau_by_width[1].mean == 1


def test_a_calibration_always_has_plain_decoding(labels, tmp_path):
    pair, path = read_labels(labels)[0]["pair"], tmp_path / "calibration.json"
    calibration(pair=Pair(pair["target"], pair["drafter"]), widths=(1, 2, 4, 8)).save(path)
    report = train(labels, tmp_path / "policy.safetensors", "throughput", path, epochs=1)
    assert report.window == (1, *WINDOW)
    assert report.throughput.strategies["plain"].mean == pytest.approx(1000 / modelled(1, 100, 1))


def test_expected_gain_learns_the_planted_rule(labels, tmp_path):
    report = train(labels, tmp_path / "policy.safetensors", loss="expected_gain")
    assert report.loss == "expected_gain" and report.saved == {"kind": "predictor"}
    assert report.acceptance.gains["predictor - best_fixed"].low > 0.1
    assert read_policy(tmp_path / "policy.safetensors").training["loss"] == "expected_gain"


def test_seeds_share_the_split_and_the_first_is_saved(labels, tmp_path):
    one = train(labels, tmp_path / "one.safetensors", epochs=2)
    many = train(labels, tmp_path / "many.safetensors", epochs=2, seeds=3)
    assert one.seeds.seeds == (0,) and many.seeds.seeds == (0, 1, 2)
    assert many.seeds.gain[0] == one.seeds.gain[0] and len(set(many.seeds.gain)) > 1 and many.seeds.spread > 0
    assert many.acceptance == one.acceptance and many.held_out == one.held_out
    first, second = (read_predictor(tmp_path / f"{n}.safetensors").predictor for n in ("one", "many"))
    assert torch.equal(first.network.head.weight, second.network.head.weight)


def test_evaluation_sets_are_reported_by_name_and_never_trained_on(labels, trained, tmp_path):
    inputs, tau = planted(30, seed=9)
    rows = {"name": "e", "dataset": "code"}
    sets = [
        write_labels(tmp_path / "sums.jsonl", inputs[:10], tau[:10], {"name": "s"}),
        write_labels(tmp_path / "rest.jsonl", inputs, tau, rows, max_new_tokens=99),
    ]
    path = tmp_path / "policy.safetensors"
    settings = TrainSettings(**QUICK)
    report = train_policy(labels, path, settings=settings, evaluation=[*sets, labels])
    groups = report.acceptance.evaluation
    assert {name: g.prompts for name, g in groups.items()} == {"code": 30, "sums": 10}
    assert groups["code"].gains["predictor - best_fixed"].mean > 0.2
    assert f"{COUNT} evaluation prompts are also among the labels" in " ".join(report.warnings)
    assert all(
        torch.equal(a, b) for a, b in zip(weights(path).values(), weights(trained[1]).values(), strict=True)
    )
    foreign = write_labels(tmp_path / "f.jsonl", inputs, tau, rows, pair={"target": "a", "drafter": "b"})
    with pytest.raises(ValueError, match=r"f\.jsonl: expected labels of"):
        train_policy(labels, path, settings=settings, evaluation=foreign)


def test_few_prompts_and_missing_halves_are_said(labels, trained, tmp_path):
    few = write_labels(tmp_path / "labels.jsonl", *planted(80))
    report = train(few, tmp_path / "policy.safetensors", epochs=1)
    assert [w.partition(" ")[0] for w in report.warnings] == ["only", "no"]
    assert "20 prompts" in report.warnings[0] and "split-half" in report.warnings[1]
    assert len(trained[0].warnings) == 1
    halves = [[[10, 5], [10, 4]]] * 4
    whole = write_labels(tmp_path / "whole.jsonl", *planted(COUNT), {"halves": halves})
    found = train(whole, tmp_path / "policy.safetensors", epochs=1)
    assert found.warnings == () and found.acceptance.split_half.strategies["predictor"].mean == 2.5


def test_plain_ahead_of_the_best_fixed_width_is_said(tmp_path):
    labels = write_labels(tmp_path / "labels.jsonl", *planted(COUNT))
    costs = dict.fromkeys((1, *WINDOW), 1.0)
    for slow, said in ((1.0, False), (9.0, True)):
        cost = costs | dict.fromkeys(WINDOW, slow)
        report = train(labels, tmp_path / "policy.safetensors", epochs=1, cost=cost)
        assert any(w.startswith("plain decoding is faster") for w in report.warnings) == said


def test_a_call_is_timed_when_asked_and_not_kept_in_the_file(labels, tmp_path):
    path = tmp_path / "policy.safetensors"
    table = torch.zeros(VOCAB, HIDDEN)
    for timed in (True, table):
        report = train_policy(
            labels, path, settings=TrainSettings(**{**QUICK, "epochs": 1}), time_calls=timed
        )
        assert report.predictor_us > 0 and read_predictor(path).report["predictor_us"] is None
    with pytest.raises(ValueError, match="embedding: expected"):
        train_policy(
            labels,
            tmp_path / "new.safetensors",
            settings=TrainSettings(**{**QUICK, "epochs": 1}),
            time_calls=table[:, 1:],
        )
    assert not (tmp_path / "new.safetensors").exists()


def test_a_prompt_in_both_parts_is_not_held_out(tmp_path):
    """The same text under two ids is one prompt: its label would be known."""
    from blockpilot.training.dataset import load_examples
    from blockpilot.training.policy_training import part

    whole = load_examples([write_labels(tmp_path / "labels.jsonl", *planted(40))]).examples
    twice = replace(whole, hashes=tuple(str(min(i, 30)) for i in range(40)))
    train_part, held_out = part(twice, 0.25, 0)
    assert len(train_part) == 30 and 0 < len(held_out) < 10
    assert not set(train_part.hashes) & set(held_out.hashes)
    with pytest.raises(ValueError, match="every prompt that is to be held out"):
        part(replace(whole, hashes=("same",) * 40), 0.25, 0)


def test_left_out_prompts_are_counted(tmp_path, monkeypatch):
    text_hash = "same"
    path = write_labels(tmp_path / "labels.jsonl", *planted(60))
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines[1:]]
    for row in rows[:20]:
        row["prompt_hash"] = text_hash
    path.write_text("\n".join([lines[0], *(json.dumps(r) for r in rows)]) + "\n")
    report = train(path, tmp_path / "p.safetensors", epochs=1)
    (found,) = [w for w in report.warnings if "also in the training part" in w]
    assert report.train + report.held_out + int(found.split()[0]) == 60 and report.held_out < 15


def test_a_few_prompts_support_no_predictor(labels, tmp_path):
    """One prompt's interval has no width."""
    report = train(labels, tmp_path / "p.safetensors", held_out=0.02, seed=1)
    assert report.held_out == 8 and report.acceptance.gains["predictor - best_fixed"].low > 0
    assert report.fixed_width is not None and "too few held-out prompts (8)" in report.headline


def test_a_folder_is_no_policy_file(labels, tmp_path):
    with pytest.raises(ValueError, match="expected a policy file to write, got the folder"):
        train(labels, tmp_path)
