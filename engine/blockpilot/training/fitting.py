"""How a width network is fitted: settings and the loop over epochs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockpilot.errors import TrainingDivergedError
from blockpilot.policies.predictor import DEFAULT_HIDDEN, INPUT_KINDS, Architecture, WidthNetwork
from blockpilot.training.dataset import Examples
from blockpilot.training.losses import LOSSES, loss_of
from blockpilot.training.prompts import split_rows

_DEFAULT_RATE = {"full": 1e-5, "compact": 1e-3}
_DEFAULT_THREADS = {"full": None, "compact": 1}


@dataclass(frozen=True)
class TrainSettings:
    """How to train; the defaults of `full` are the paper's.

    Attributes:
        kind, input_kind, hidden, dropout, depth: the network (`Architecture`); None takes the kind's default.
        epochs, learning_rate, batch: Adam.
        loss: "cross_entropy" or "expected_gain" (`losses`).
        patience: epochs without a better validation loss before stopping.
        validation: share of the training part that only decides when to stop.
        held_out, split: share of the prompts that only the report sees; "random" or whole "family".
        seed: of the split, the weights, the batches, dropout and the bootstrap.
        seeds: networks to train on the same split, with the weights, batches and dropout of seed, seed + 1, …; the
            first is the one that is kept.
        bootstrap: resamples of an interval.
        threads: torch threads while training; None: 1 for compact (too small to share), torch's for full.
    """

    kind: str = "compact"
    input_kind: str | None = None
    hidden: int | None = None
    dropout: float = 0.2
    epochs: int = 100
    learning_rate: float | None = None
    batch: int = 32
    patience: int = 20
    validation: float = 0.2
    held_out: float = 0.25
    split: str = "random"
    seed: int = 0
    bootstrap: int = 2000
    threads: int | None = None
    depth: int = 2
    loss: str = "cross_entropy"
    seeds: int = 1

    def __post_init__(self) -> None:
        if self.kind not in INPUT_KINDS:
            raise ValueError(f"TrainSettings.kind: expected one of {sorted(INPUT_KINDS)}, got {self.kind!r}")
        if self.loss not in LOSSES:
            raise ValueError(f"TrainSettings.loss: expected one of {LOSSES}, got {self.loss!r}")
        for name in ("epochs", "batch", "patience", "bootstrap", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainSettings.{name}: expected an int >= 1, got {getattr(self, name)!r}")
        for name in ("validation", "held_out"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"TrainSettings.{name}: expected a share between 0 and 1, got {getattr(self, name)!r}"
                )
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise ValueError(
                f"TrainSettings.learning_rate: expected a number in (0, 1), got {self.learning_rate!r}"
            )

    def resolved(self) -> TrainSettings:
        """The same with the kind's defaults filled in."""
        return replace(
            self,
            input_kind=self.input_kind or INPUT_KINDS[self.kind][0],
            hidden=self.hidden or DEFAULT_HIDDEN[self.kind],
            learning_rate=self.learning_rate or _DEFAULT_RATE[self.kind],
            threads=self.threads or _DEFAULT_THREADS[self.kind],
        )

    def architecture(self, input_size: int, window: tuple[int, ...]) -> Architecture:
        """The network these settings ask for."""
        s = self.resolved()
        hidden = int(s.hidden or 0)
        return Architecture(s.kind, str(s.input_kind), input_size, hidden, window, s.dropout, s.depth)


@dataclass(frozen=True)
class Fit:
    """A trained network and the epoch (from 1) and validation loss it was taken from."""

    network: WidthNetwork
    epoch: int
    validation_loss: float


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Torch's thread count inside the block; None leaves it alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fit_network(train: Examples, target: Tensor, architecture: Architecture, settings: TrainSettings) -> Fit:
    """Adam; the weights of the epoch with the lowest loss on a validation share of `train`.

    Args:
        target: what the loss compares the scores with, [N, C] float32 (`losses.targets`).
    """
    rows = split_rows(train.families, settings.validation, settings.seed + 1, "random")
    fitted, checked = (train.inputs[r] for r in rows)
    fitted_target, checked_target = (target[r] for r in rows)
    network = WidthNetwork(architecture, settings.seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=float(settings.learning_rate or 0), fused=True)
    order = torch.Generator().manual_seed(settings.seed)
    chosen = Fit(network, 0, float("inf"))
    with torch.random.fork_rng(devices=[]):  # dropout draws from the global stream
        torch.manual_seed(settings.seed)
        for epoch in range(1, settings.epochs + 1):
            for batch in torch.split(torch.randperm(len(fitted), generator=order), settings.batch):
                _update(network, optimiser, settings.loss, fitted[batch], fitted_target[batch])
            now = _loss(network, settings.loss, checked, checked_target)
            if now < chosen.validation_loss:
                chosen = Fit(copy.deepcopy(network), epoch, now)
            if epoch - chosen.epoch >= settings.patience:
                break
    if chosen.epoch == 0:
        raise TrainingDivergedError(
            "training diverged: no validation loss was a number; lower the learning rate"
        )
    return chosen


def _update(
    network: WidthNetwork, optimiser: torch.optim.Adam, loss: str, inputs: Tensor, target: Tensor
) -> None:
    network.train()
    value = loss_of(loss, network(inputs), target)
    optimiser.zero_grad()
    torch.autograd.backward(value)
    optimiser.step()


def _loss(network: WidthNetwork, loss: str, inputs: Tensor, target: Tensor) -> float:
    network.eval()
    with torch.no_grad():
        return float(loss_of(loss, network(inputs), target))
