"""Training a width predictor on labels and judging it on prompts held out from everything that was chosen."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.policies.contract import Pair
from blockpilot.policies.policy_file import OBJECTIVES, PolicyFile, check_cost, save_policy
from blockpilot.policies.predictor import DEFAULT_HIDDEN, INPUT_KINDS, Architecture, Predictor, WidthNetwork
from blockpilot.training.calibration import Calibration
from blockpilot.training.dataset import Examples, LabelSet, best, equally_best, load_examples, worth
from blockpilot.training.evaluation import Bootstrap, HeldOutReport, Section, compare, conclude, tau_by_width
from blockpilot.training.prompts import split_rows
from blockpilot.training.randomness import Draw

_DEFAULT_RATE = {"full": 1e-5, "compact": 1e-3}
_DEFAULT_THREADS = {"full": None, "compact": 1}


@dataclass(frozen=True)
class TrainSettings:
    """How to train; the defaults of `full` are the paper's.

    Attributes:
        kind, input_kind, hidden, dropout: the network (`Architecture`); None takes the kind's default.
        epochs, learning_rate, batch: Adam on cross-entropy.
        patience: epochs without a better validation loss before stopping.
        validation: share of the training part that only decides when to stop.
        held_out, split: share of the prompts that only the report sees; "random" or whole "family".
        seed: of the split, the weights, the batches, dropout and the bootstrap.
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

    def __post_init__(self) -> None:
        if self.kind not in INPUT_KINDS:
            raise ValueError(f"TrainSettings.kind: expected one of {sorted(INPUT_KINDS)}, got {self.kind!r}")
        for name in ("epochs", "batch", "patience", "bootstrap"):
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
        return Architecture(s.kind, str(s.input_kind), input_size, int(s.hidden or 0), window, s.dropout)


@dataclass(frozen=True)
class Fit:
    """A trained network and the epoch (from 1) and validation loss it was taken from."""

    network: WidthNetwork
    epoch: int
    validation_loss: float


def train_policy(
    labels: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    settings: TrainSettings | None = None,
    objective: str = "acceptance",
    cost: Mapping[int, float] | str | Path | None = None,
    window: Sequence[int] | None = None,
    pair: Pair | None = None,
) -> HeldOutReport:
    """Trains a predictor, writes the policy file and returns its held-out report.

    Args:
        labels: label files of one pair.
        output: policy file to write.
        objective: "acceptance" labels a prompt with argmax τ, "throughput" with argmax τ / cost.
        cost: seconds of a step by width, a JSON file of them, or a calibration file; needed for throughput,
            reported when given.
        window: widths to choose from, a subset of the labelled ones.
        pair: if given, the pair the labels must come from.

    Raises:
        ValueError: bad settings or files, too few prompts, a missing cost, another pair.
    """
    settings = (settings or TrainSettings()).resolved()
    _check_objective(objective, cost)
    files = [labels] if isinstance(labels, (str, Path)) else list(labels)
    data = load_examples(files, str(settings.input_kind), window)
    if pair is not None and data.pair != pair:
        raise ValueError(f"labels: expected labels of {pair}, got labels of {data.pair}")
    costs = None if cost is None else check_cost(_read_cost(cost, data), data.examples.window)
    with _threads(settings.threads):
        fit, report = _train_and_judge(data, settings, objective, costs)
    training = {
        **asdict(settings),
        "best_epoch": fit.epoch,
        "validation_loss": fit.validation_loss,
        "unusable_prompts": data.unusable,
        "labels": data.settings,
    }
    save_policy(
        PolicyFile(Predictor(fit.network), data.pair, objective, costs, report.to_dict(), training), output
    )
    return report


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Torch's thread count inside the block; None leaves it alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_objective(objective: str, cost: object) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: expected one of {OBJECTIVES}, got {objective!r}")
    if objective == "throughput" and cost is None:
        raise ValueError(
            "cost: expected seconds of a step by width for the throughput objective, got none; measure them with "
            "`blockpilot calibrate` and give the file with --cost"
        )


def _read_cost(cost: Mapping[int, float] | str | Path, data: LabelSet) -> dict[int, float]:
    """Seconds by width: given, from a JSON object, or from a calibration of the labels' pair (its smallest cell)."""
    if isinstance(cost, Mapping):
        return dict(cost)
    try:
        table = json.loads(Path(cost).read_text(encoding="utf-8"))
        if isinstance(table, dict) and "calibration" in table:
            measured = Calibration.load(Path(cost))
            measured.check_pair(data.pair.target, data.pair.drafter)
            context, requests = measured.contexts[0], measured.requests[0]
            return {w: measured.cost(w, context, requests) / 1000 for w in data.examples.window}
        return {int(w): seconds for w, seconds in table.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{cost}: expected a JSON object of seconds by width, got {error}") from error


def _train_and_judge(
    data: LabelSet, settings: TrainSettings, objective: str, cost: Mapping[int, float] | None
) -> tuple[Fit, HeldOutReport]:
    train, held_out = part(data.examples, settings.held_out, settings.seed, settings.split)
    values = worth(train.tau, train.window, cost if objective == "throughput" else None)
    target = equally_best(values)
    architecture = settings.architecture(train.inputs.shape[1], train.window)
    order = torch.tensor(Draw(f"shuffle:{settings.seed}").shuffled(range(len(train))))
    fit = fit_network(train, target, architecture, settings)
    control = fit_network(train, target[order], architecture, settings)
    picks = [best(Predictor(f.network).scores(held_out.inputs)) for f in (fit, control)]
    bootstrap = Bootstrap(len(held_out), settings.bootstrap, settings.seed)

    def section(costs: Mapping[int, float] | None) -> Section:
        size = data.block_size
        return compare(train, held_out, picks[0], picks[1], block_size=size, cost=costs, bootstrap=bootstrap)

    acceptance = section(None)
    throughput = None if cost is None else section(cost)
    judged = throughput if objective == "throughput" and throughput is not None else acceptance
    report = HeldOutReport(
        objective=objective,
        window=train.window,
        block_size=data.block_size,
        train=len(train),
        held_out=len(held_out),
        split=settings.split,
        acceptance=acceptance,
        throughput=throughput,
        tau_by_width=tau_by_width(held_out, bootstrap),
        conclusion=conclude(judged),
    )
    return fit, report


def part(examples: Examples, share: float, seed: int, by: str = "random") -> tuple[Examples, Examples]:
    """(rest, share of the examples), seeded."""
    rest, taken = split_rows(examples.families, share, seed, by)
    return examples.select(rest), examples.select(taken)


def fit_network(train: Examples, target: Tensor, architecture: Architecture, settings: TrainSettings) -> Fit:
    """Adam on cross-entropy; the weights of the epoch with the lowest loss on a validation share of `train`.

    Args:
        target: label of each row as shares of the widths, [N, C] float32.
    """
    rows = split_rows(train.families, settings.validation, settings.seed + 1, "random")
    fitted, checked = (train.inputs[r] for r in rows)
    fitted_target, checked_target = (target[r] for r in rows)
    network = WidthNetwork(architecture, settings.seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=float(settings.learning_rate or 0))
    order = torch.Generator().manual_seed(settings.seed)
    chosen = Fit(network, 0, float("inf"))
    with torch.random.fork_rng(devices=[]):  # dropout draws from the global stream
        torch.manual_seed(settings.seed)
        for epoch in range(1, settings.epochs + 1):
            for batch in torch.split(torch.randperm(len(fitted), generator=order), settings.batch):
                _update(network, optimiser, fitted[batch], fitted_target[batch])
            now = _loss(network, checked, checked_target)
            if now < chosen.validation_loss:
                chosen = Fit(copy.deepcopy(network), epoch, now)
            if epoch - chosen.epoch >= settings.patience:
                break
    if chosen.epoch == 0:
        raise ArithmeticError("training diverged: no validation loss was a number; lower the learning rate")
    return chosen


def _update(network: WidthNetwork, optimiser: torch.optim.Adam, inputs: Tensor, target: Tensor) -> None:
    network.train()
    loss = F.cross_entropy(network(inputs), target)
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    optimiser.step()


def _loss(network: WidthNetwork, inputs: Tensor, target: Tensor) -> float:
    network.eval()
    with torch.no_grad():
        return float(F.cross_entropy(network(inputs), target))
