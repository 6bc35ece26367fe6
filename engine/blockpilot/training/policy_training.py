"""Training a width predictor on labels and judging it on prompts held out from everything that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from blockpilot.policies.contract import Fixed, Pair, Table, trees_of
from blockpilot.policies.policy_file import OBJECTIVES, PolicyFile, save_policy
from blockpilot.policies.predictor import Predictor
from blockpilot.training.costs import Cost, read_cost
from blockpilot.training.dataset import Examples, LabelSet, best, load_examples, part, worth
from blockpilot.training.evaluation import Picked, compare, conclude, supported, tau_by_width, warnings_of
from blockpilot.training.fitting import Fit, TrainSettings, fit_network, torch_threads
from blockpilot.training.held_out import Bootstrap, HeldOutReport, Section, Seeds
from blockpilot.training.losses import targets
from blockpilot.training.randomness import Draw

__all__ = ["Fit", "TrainSettings", "TrainingData", "load_data", "part", "predictor_file", "train_policy"]

Files = str | Path | Sequence[str | Path]
_TIMED_CALLS = 20


@dataclass(frozen=True)
class TrainingData:
    """Labels with the seconds of a step by width, and prompts of evaluation sets.

    Attributes:
        repeated: prompts of the evaluation sets that are left out because they are among the labels.
    """

    labels: LabelSet
    objective: str
    cost: Mapping[int, float] | None
    evaluation: Examples | None = None
    repeated: int = 0

    @property
    def objective_cost(self) -> Mapping[int, float] | None:
        """The cost by which the objective divides τ; None for acceptance."""
        return self.cost if self.objective == "throughput" else None


def train_policy(
    labels: Files,
    output: str | Path,
    *,
    settings: TrainSettings | None = None,
    objective: str = "acceptance",
    cost: Cost | None = None,
    window: Sequence[int] | None = None,
    pair: Pair | None = None,
    evaluation: Files = (),
    time_calls: bool | Tensor | Table = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> HeldOutReport:
    """Trains a predictor, writes the policy that its held-out report supports and returns the report.

    `output` gets the predictor if its interval over the best fixed width is above zero. Otherwise it gets that
    fixed width, and the predictor is written beside it (`predictor_file`).

    Args:
        labels: label files of one pair.
        output: policy file to write.
        objective: "acceptance" labels a prompt with argmax τ, "throughput" with argmax τ / cost.
        cost: seconds of a step by width, a JSON file of them, or a calibration file; needed for throughput,
            reported when given.
        window: widths to choose from, of the labelled ones and 1. None: the labelled ones, and for throughput
            also 1, plain decoding, where its cost is known.
        pair: if given, the pair the labels must come from.
        evaluation: label files of evaluation sets, made with the same pair, which only the report sees.
        time_calls: also time a call of the predictor, on the target's embedding if that is given, else on a float
            table of its size; the figure is in the report returned, not in the file.
        progress: told what comes next.

    Raises:
        ValueError: bad settings or files, too few prompts, a missing cost, another pair.
    """
    settings = (settings or TrainSettings()).resolved()
    if Path(output).is_dir():
        raise ValueError(f"output: expected a policy file to write, got the folder {output}")
    data = load_data(labels, str(settings.input_kind), objective, cost, window, pair, evaluation)
    with torch_threads(settings.threads):
        fit, report = _train_and_judge(data, settings, progress)
        predictor = Predictor(fit.network)
        table = None if isinstance(time_calls, bool) else time_calls
        spent = None if time_calls is False else _call_us(predictor, data.labels, table)
    _save(predictor, data, report, output, _training(fit, data, settings))
    return replace(report, predictor_us=spent)


def predictor_file(output: str | Path) -> Path:
    """Where the predictor goes when the policy file holds a fixed width: policy.predictor.safetensors."""
    return Path(output).with_suffix(".predictor.safetensors")


def load_data(
    labels: Files,
    input_kind: str,
    objective: str = "acceptance",
    cost: Cost | None = None,
    window: Sequence[int] | None = None,
    pair: Pair | None = None,
    evaluation: Files = (),
) -> TrainingData:
    """Reads and checks everything training needs; arguments as in `train_policy`."""
    _check_objective(objective, cost)
    data = load_examples(_files(labels), input_kind, window)
    if pair is not None and data.pair != pair:
        raise ValueError(f"labels: expected labels of {pair}, got labels of {data.pair}")
    trees = trees_of(data.settings, data.examples.window)
    costs = None if cost is None else read_cost(cost, data.examples.window, data.pair, trees)
    if objective == "throughput" and window is None and costs is not None and 1 in costs:
        data = replace(data, examples=data.examples.with_plain())
    sets, repeated = _evaluation(_files(evaluation), input_kind, data)
    return TrainingData(data, objective, costs, sets, repeated)


def _files(files: Files) -> list[str | Path]:
    return [files] if isinstance(files, (str, Path)) else list(files)


def _evaluation(files: Sequence[str | Path], input_kind: str, data: LabelSet) -> tuple[Examples | None, int]:
    """The evaluation sets' prompts, and how many were left out because training may see them.

    A prompt whose label names no set counts to a set named like its file.
    """
    parts, seen, repeated = [], set(data.examples.hashes), 0
    for file in files:
        found = load_examples([file], input_kind, data.examples.window, least=1)
        if found.pair != data.pair or found.examples.inputs.shape[1] != data.examples.inputs.shape[1]:
            raise ValueError(f"{file}: expected labels of {data.pair}, got labels of {found.pair}")
        names = tuple(name or Path(file).stem for name in found.examples.datasets)
        fresh = [i for i, text in enumerate(found.examples.hashes) if text not in seen]
        repeated += len(names) - len(fresh)
        if fresh:
            parts.append(replace(found.examples, datasets=names, halves=None).select(fresh))
    if not parts:
        return None, repeated
    whole = replace(
        parts[0],
        ids=tuple(i for p in parts for i in p.ids),
        families=tuple(f for p in parts for f in p.families),
        datasets=tuple(d for p in parts for d in p.datasets),
        hashes=tuple(h for p in parts for h in p.hashes),
        inputs=torch.cat([p.inputs for p in parts]),
        tau=torch.cat([p.tau for p in parts]),
    )
    return whole, repeated


def _check_objective(objective: str, cost: object) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: expected one of {OBJECTIVES}, got {objective!r}")
    if objective == "throughput" and cost is None:
        raise ValueError(
            "cost: expected seconds of a step by width for the throughput objective, got none; measure them with "
            "`blockpilot calibrate` and give the file with --cost"
        )


def _train_and_judge(
    data: TrainingData, settings: TrainSettings, progress: Callable[[str], None]
) -> tuple[Fit, HeldOutReport]:
    train, held_out = part(data.labels.examples, settings.held_out, settings.seed, settings.split)
    seeds = tuple(range(settings.seed, settings.seed + settings.seeds))
    fits, control = _fit_all(train, data, settings, seeds, progress)
    bootstrap = Bootstrap(len(held_out), settings.bootstrap, settings.seed)

    def section(fit: Fit, cost: Mapping[int, float] | None) -> Section:
        mine = _picked(fit, control, held_out)
        sets = None
        if data.evaluation is not None and fit is fits[0]:
            sets = _picked(fit, control, data.evaluation)
        size = data.labels.block_size
        picks = (mine.chosen, mine.control)
        return compare(
            train, held_out, *picks, block_size=size, cost=cost, bootstrap=bootstrap, evaluation=sets
        )

    progress("judging on held-out prompts")
    judged = [section(fit, data.objective_cost) for fit in fits]
    acceptance = judged[0] if data.objective_cost is None else section(fits[0], None)
    throughput = None if data.cost is None else section(fits[0], data.cost)
    report = HeldOutReport(
        objective=data.objective,
        window=train.window,
        block_size=data.labels.block_size,
        train=len(train),
        held_out=len(held_out),
        split=settings.split,
        acceptance=acceptance,
        throughput=throughput,
        tau_by_width=tau_by_width(held_out, bootstrap),
        conclusion=conclude(judged[0]),
        loss=settings.loss,
        seeds=Seeds.of(seeds, judged),
        saved=_default(judged[0]),
        warnings=warnings_of(
            held_out,
            (acceptance, throughput),
            len(data.labels.examples) - len(train) - len(held_out),
            data.repeated,
        ),
    )
    return fits[0], report


def _fit_all(
    train: Examples,
    data: TrainingData,
    settings: TrainSettings,
    seeds: Sequence[int],
    progress: Callable[[str], None],
) -> tuple[list[Fit], Fit]:
    """A network for every seed, and the control, trained on shuffled labels."""
    target = targets(settings.loss, worth(train.tau, train.window, data.objective_cost))
    architecture = settings.architecture(train.inputs.shape[1], train.window)
    fits = []
    for i, seed in enumerate(seeds, 1):
        progress(f"training seed {seed}, {i} of {len(seeds)}")
        fits.append(fit_network(train, target, architecture, replace(settings, seed=seed)))
    progress("training the control on shuffled labels")
    order = torch.tensor(Draw(f"shuffle:{settings.seed}").shuffled(range(len(train))))
    return fits, fit_network(train, target[order], architecture, settings)


def _picked(fit: Fit, control: Fit, examples: Examples) -> Picked:
    chosen, shuffled = (best(Predictor(f.network).scores(examples.inputs)) for f in (fit, control))
    return Picked(examples, chosen, shuffled)


def _default(section: Section) -> dict[str, Any]:
    """What the default policy is by the section of the objective."""
    fixed = {"kind": "fixed", "width": section.best_fixed_width}
    return {"kind": "predictor"} if supported(section) else fixed


def _training(fit: Fit, data: TrainingData, settings: TrainSettings) -> dict[str, Any]:
    return {
        **asdict(settings),
        "best_epoch": fit.epoch,
        "validation_loss": fit.validation_loss,
        "unusable_prompts": data.labels.unusable,
        "labels": data.labels.settings,
    }


def _save(
    predictor: Predictor,
    data: TrainingData,
    report: HeldOutReport,
    output: str | Path,
    training: dict[str, Any],
) -> None:
    """The predictor first: the default policy appears only beside a whole predictor."""
    window = data.labels.examples.window
    cost = None if data.cost is None else {w: data.cost[w] for w in window}
    file = PolicyFile(predictor, data.labels.pair, data.objective, cost, report.to_dict(), training)
    if report.fixed_width is None:
        save_policy(file, output)
        return
    save_policy(file, predictor_file(output))
    tree = trees_of(data.labels.settings, window).get(report.fixed_width, 0)
    save_policy(replace(file, policy=Fixed(report.fixed_width, tree)), output)


def _call_us(predictor: Predictor, labels: LabelSet, table: Tensor | Table | None) -> float:
    """Median microseconds of `choose` for one request on random logits: the call that the loop makes."""
    vocabulary, size = labels.settings["vocabulary"], labels.settings["input_size"]
    generator = torch.Generator().manual_seed(0)
    timed = Predictor(predictor.network)
    timed.bind(
        torch.randn(vocabulary, size, dtype=torch.float32, generator=generator) if table is None else table
    )
    seconds = []
    for _ in range(_TIMED_CALLS + 2):  # the first two warm up
        logits = torch.randn(1, vocabulary, dtype=torch.float32, generator=generator)
        start = perf_counter()
        timed.choose(logits)
        seconds.append(perf_counter() - start)
    return median(seconds[2:]) * 1e6
