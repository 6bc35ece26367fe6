"""Labels with a planted rule, and a policy trained on them."""

from __future__ import annotations

import pytest

from blockpilot.training.policy_training import TrainSettings, train_policy
from tests.training.fakes import (
    planted,
    write_labels,
)
from tests.training.policy_runs import COUNT, QUICK


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    return write_labels(tmp_path_factory.mktemp("labels") / "labels.jsonl", *planted(COUNT))


@pytest.fixture(scope="module")
def trained(labels, tmp_path_factory):
    """(report, policy path) of a policy trained on the planted rule."""
    path = tmp_path_factory.mktemp("policy") / "policy.safetensors"
    return train_policy(labels, path, settings=TrainSettings(**QUICK)), path
