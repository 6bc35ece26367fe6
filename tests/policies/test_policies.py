"""Fixed widths and the choice of a policy by name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blockpilot.bundled
from blockpilot.policies import BlockPolicy, Fixed, Pair, load_policy
from blockpilot.policies.policy_file import PolicyFile, read_policy, save_policy
from blockpilot.policies.predictor import Architecture, Predictor, WidthNetwork
from tests.training.calibrations import calibration, row

WIDTHS = tuple(range(1, 9))
CELLS = [(requests, context, 4) for requests in (1, 4) for context in (100, 300)]


@pytest.fixture
def policy_path(tmp_path):
    network = WidthNetwork(Architecture("compact", "mean_likely_embedding", 16, 16, (1, 3, 5)))
    path = tmp_path / "policy.safetensors"
    save_policy(PolicyFile(Predictor(network), Pair("target-a", "drafter-a"), "acceptance"), path)
    return path


def test_fixed_answers_its_width_for_every_row():
    policy = Fixed(5)
    policy.bind(torch.zeros(4, 2))
    widths = policy.choose(torch.randn(3, 4))
    assert policy.window == (5,)
    assert widths.dtype == torch.int64 and widths.tolist() == [5, 5, 5]
    assert policy.choose(torch.randn(0, 4)).shape == (0,)
    assert isinstance(policy, BlockPolicy)


@pytest.mark.parametrize("width", [0, -1, 1.5, True, "4", None])
def test_fixed_refuses_what_is_no_width(width):
    with pytest.raises(ValueError, match="expected 1 to 64 ascending widths"):
        Fixed(width)


@pytest.mark.parametrize("source", [4, "4"])
def test_a_number_is_a_fixed_width(source):
    policy = load_policy(source, "t", "d", WIDTHS)
    assert isinstance(policy, Fixed) and policy.width == 4


def test_fixed_trees():
    policy = Fixed(6, 16, [3, 4.5])
    assert (policy.trees, policy.node_cost) == ({6: 16}, (3.0, 4.5))
    assert (Fixed(6).trees, Fixed(6).node_cost) == ({}, None)
    assert [repr(p) for p in (Fixed(6), Fixed(6, 16), policy)] == [
        "Fixed(6)",
        "Fixed(6, tree=16)",
        "Fixed(6, tree=16, cut by cost)",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((6, 5), "got 5 at width 6"),
        ((1, 2), "widths above 1"),
        ((2, True), "got True at width 2"),
        ((2, 2.0), r"got 2\.0 at width 2"),
        ((2, 4, []), "finite costs above zero"),
        ((2, 4, [1.0, 0.0]), "finite costs above zero"),
        ((2, 4, [1.0, float("inf")]), "finite costs above zero"),
        ((2, 4, ["1"]), "finite costs above zero"),
    ],
)
def test_fixed_refuses_what_is_no_tree(given, message):
    with pytest.raises(ValueError, match=message):
        Fixed(*given)


def test_trees_by_name(tmp_path):
    policy = load_policy("4/9", "t", "d", WIDTHS, 16)
    assert isinstance(policy, Fixed) and (policy.width, policy.trees, policy.node_cost) == (4, {4: 9}, None)
    file = tmp_path / "costs.json"
    calibration(trees=tuple(row(*cell, nodes=n) for cell in CELLS for n in (1, 4, 9))).save(file)
    policy = load_policy(f"4/8@{file}", "some-target", "some-drafter", WIDTHS, 16)
    assert policy.trees == {4: 8} and len(policy.node_cost) == 8
    with pytest.raises(ValueError, match=r"expected trees of at most 16 nodes, .* got 17"):
        load_policy("4/17", "t", "d", WIDTHS, 16)
    with pytest.raises(ValueError, match="with drafter d"):
        load_policy(f"4/8@{file}", "t", "d", WIDTHS, 16)
    with pytest.raises(ValueError, match="blockpilot calibrate --trees 4/10"):
        load_policy(f"4/10@{file}", "some-target", "some-drafter", WIDTHS, 16)


@pytest.mark.parametrize(
    ("trees", "expected"), [({"3": 9, "8": 12}, {3: 9}), ({}, {}), ({"3": 2}, None), ([3], None)]
)
def test_a_predictor_of_labels_with_trees(policy_path, tmp_path, trees, expected):
    """Its widths stand for the trees that the labels were made with."""
    file = read_policy(policy_path)
    path = tmp_path / "trees.safetensors"
    save_policy(replace(file, training={"labels": {"trees": trees}}), path)
    if expected is None:
        with pytest.raises(ValueError, match=r"trees\.safetensors: training labels"):
            load_policy(path, "target-a", "drafter-a", WIDTHS, 16)
        return
    assert load_policy(path, "target-a", "drafter-a", WIDTHS, 16).trees == expected


def test_width_one_never_drafts_and_is_always_allowed():
    assert load_policy(1, "t", "d", (2, 3)).window == (1,)


def test_a_file_of_the_pair_is_loaded(policy_path):
    policy = load_policy(policy_path, "target-a", "drafter-a", WIDTHS)
    assert isinstance(policy, Predictor) and policy.window == (1, 3, 5)
    assert load_policy(str(policy_path), "target-a", "drafter-a", WIDTHS).window == (1, 3, 5)


@pytest.mark.parametrize(
    ("training", "sampled"),
    [
        ({}, None),
        ({"labels": {"temperature": 0.0}}, False),
        ({"labels": {"temperature": 0.7}}, True),
        ({"labels": {"temperature": "hot"}}, None),
        ({"labels": None}, None),
    ],
)
def test_a_file_says_which_requests_it_is_for(tmp_path, training, sampled):
    path, pair = tmp_path / "policy.safetensors", Pair("target-a", "drafter-a")
    save_policy(PolicyFile(Fixed(3), pair, "acceptance", training=training), path)
    assert load_policy(path, "target-a", "drafter-a", WIDTHS).sampled is sampled
    assert load_policy(3, "target-a", "drafter-a", WIDTHS).sampled is None


@pytest.mark.parametrize("pair", [("target-b", "drafter-a"), ("target-a", "drafter-b")])
def test_another_pair_is_refused_by_naming_both(policy_path, pair):
    with pytest.raises(ValueError) as error:
        load_policy(policy_path, *pair, WIDTHS)
    for name in (*pair, "target-a", "drafter-a", "policy.safetensors"):
        assert name in str(error.value)


def test_bundled_is_the_file_that_ships(policy_path, monkeypatch):
    monkeypatch.setattr(blockpilot.bundled, "policy_path", lambda: policy_path)
    assert load_policy("bundled", "target-a", "drafter-a", WIDTHS).window == (1, 3, 5)


def test_a_path_is_a_file_whatever_its_name(policy_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bundled").write_bytes(Path(policy_path).read_bytes())
    assert load_policy(Path("bundled"), "target-a", "drafter-a", WIDTHS).window == (1, 3, 5)


def test_the_predictor_that_ships_beside_a_fixed_policy(policy_path, tmp_path, monkeypatch):
    fixed = tmp_path / "fixed.safetensors"
    save_policy(PolicyFile(Fixed(3), Pair("target-a", "drafter-a"), "acceptance"), fixed)
    monkeypatch.setattr(blockpilot.bundled, "POLICY", fixed)
    monkeypatch.setattr(blockpilot.bundled, "PREDICTOR", tmp_path / "absent.safetensors")
    with pytest.raises(ValueError, match=r"fixed\.safetensors is Fixed\(3\) and no predictor ships"):
        load_policy("predictor", "target-a", "drafter-a", WIDTHS)
    monkeypatch.setattr(blockpilot.bundled, "PREDICTOR", policy_path)
    assert load_policy("bundled", "target-a", "drafter-a", WIDTHS).window == (3,)
    assert load_policy("predictor", "target-a", "drafter-a", WIDTHS).window == (1, 3, 5)


def test_the_predictor_is_the_policy_where_that_is_one(policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr(blockpilot.bundled, "POLICY", policy_path)
    monkeypatch.setattr(blockpilot.bundled, "PREDICTOR", tmp_path / "absent.safetensors")
    assert load_policy("predictor", "target-a", "drafter-a", WIDTHS).window == (1, 3, 5)


def test_widths_that_cannot_be_drafted_are_refused(policy_path):
    with pytest.raises(ValueError, match=r"are drafted here, 2 to 4, got \[5\]"):
        load_policy(policy_path, "target-a", "drafter-a", (2, 3, 4))
    with pytest.raises(ValueError, match=r"policy 9: .* here, 1 to 8, got \[9\]; use one of these") as error:
        load_policy(9, "t", "d" * 64, WIDTHS)
    assert "d" * 64 not in str(error.value)


def test_an_object_passes_through_and_its_window_is_checked():
    policy = Fixed(3)
    assert load_policy(policy, "t", "d", WIDTHS) is policy
    with pytest.raises(ValueError, match=r"only \[2\], got \[3\]"):
        load_policy(policy, "t", "d", (2,))


@pytest.mark.parametrize("source", [True, None, 3.5, [3], 0, -1, "0", "4/0", "0/4"])
def test_other_things_are_refused(source):
    with pytest.raises(ValueError, match="expected 'bundled', 'predictor', a policy file"):
        load_policy(source, "t", "d", WIDTHS)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.safetensors: expected a readable policy file"):
        load_policy("nowhere.safetensors", "t", "d", WIDTHS)


def test_importing_policies_and_prompts_does_not_import_torch():
    code = "import sys, blockpilot.policies, blockpilot.training.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
