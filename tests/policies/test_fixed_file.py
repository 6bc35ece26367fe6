"""Policy files of a fixed width or tree: numbers without tensors."""

from __future__ import annotations

import pytest
import torch

from blockpilot.policies import Fixed
from blockpilot.policies.policy_file import read_policy, save_policy
from tests.policies.test_policy_file import PAIR, parts, policy, refused, rewrite


@pytest.fixture
def path(tmp_path):
    return tmp_path / "policy.safetensors"


def test_a_fixed_width_is_a_file_without_tensors(path):
    save_policy(policy(policy=Fixed(5)), path)
    read = read_policy(path)
    assert isinstance(read.policy, Fixed) and read.policy.width == 5
    assert (read.pair, read.cost, read.report) == (PAIR, policy().cost, policy().report)
    tensors, head = parts(path)
    assert tensors == {} and head["architecture"] == {"kind": "fixed", "width": 5}
    with pytest.raises(ValueError, match="expected a predictor, got the fixed width 5"):
        _ = read.predictor
    before = path.read_bytes()
    save_policy(read, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("cost", [None, (1.0, 1.5, 1.75)])
def test_a_fixed_tree_is_kept_with_its_costs(path, cost):
    save_policy(policy(policy=Fixed(5, 9, cost)), path)
    read = read_policy(path).policy
    assert isinstance(read, Fixed) and (read.width, read.trees, read.node_cost) == (5, {5: 9}, cost)


@pytest.mark.parametrize(
    ("architecture", "tensors", "message"),
    [
        ({"kind": "fixed"}, {}, "expected kind and width"),
        ({"kind": "fixed", "width": 0}, {}, "an int >= 1"),
        ({"kind": "fixed", "width": "5"}, {}, "an int >= 1"),
        ({"kind": "fixed", "width": 9}, {}, r"missing [9]"),
        ({"kind": "fixed", "width": 5, "hidden": 3}, {}, "expected kind and width"),
        ({"kind": "fixed", "width": 5, "tree": 9}, {}, "expected kind and width"),
        ({"kind": "fixed", "width": 5, "tree": 4, "node_cost": None}, {}, "got 4 at width 5"),
        ({"kind": "fixed", "width": 5, "tree": 9, "node_cost": [0]}, {}, "finite costs above zero"),
        ({"kind": "fixed", "width": 5, "tree": 9, "node_cost": 3}, {}, "not iterable"),
        ({"kind": "fixed", "width": 5}, {"x": torch.zeros(1)}, "no tensors"),
    ],
)
def test_a_wrong_fixed_policy_is_named(path, architecture, tensors, message):
    save_policy(policy(policy=Fixed(5)), path)
    rewrite(path, tensors, {**parts(path)[1], "architecture": architecture})
    refused(path, message)
