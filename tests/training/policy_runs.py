"""Quick training runs that the tests of policies share."""

from __future__ import annotations

import torch

from blockpilot.policies.policy_file import read_policy
from blockpilot.training.policy_training import TrainSettings, predictor_file, train_policy

QUICK = {"hidden": 32, "epochs": 40, "learning_rate": 3e-3, "bootstrap": 500}
COUNT = 400


def train(labels, path, objective="acceptance", cost=None, window=None, pair=None, **settings):
    settings = TrainSettings(**{**QUICK, **settings})
    return train_policy(
        labels, path, settings=settings, objective=objective, cost=cost, window=window, pair=pair
    )


def weights(path) -> dict[str, torch.Tensor]:
    return read_predictor(path).predictor.network.state_dict()


def read_predictor(path):
    """The predictor's file: `path`, or the one beside it where the report supports no predictor."""
    beside = predictor_file(path)
    return read_policy(beside if beside.exists() else path)
