"""The paper's ablations (arXiv 2606.31315): one thing changed at a time, each network judged held out.

The JSON: ablation (the format, 1), setup (objective, cost, settings, labels and prompts of the training), and
cells, one per variant in `GRID` order: factor ("k", "hidden", "depth" or "input"), value, window, input_kind,
hidden, depth, skipped (why there is no result, or null) and result (null where skipped): parameters, epoch,
train_accuracy, accuracy, best_fixed_width, and as {"mean", "low", "high"} predictor, best_fixed, oracle and gain
(predictor − best_fixed), under the objective, all on the same held-out prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blockpilot.policies.atomic import replacing
from blockpilot.policies.predictor import Predictor
from blockpilot.training.costs import Cost
from blockpilot.training.dataset import LabelSet, best, worth
from blockpilot.training.evaluation import compare
from blockpilot.training.fitting import TrainSettings, fit_network, torch_threads
from blockpilot.training.held_out import Bootstrap
from blockpilot.training.losses import targets
from blockpilot.training.policy_training import Files, TrainingData, load_data, part

FORMAT = 1
COMPACT = "mean_likely_embedding"
GRID: dict[str, tuple[Any, ...]] = {
    "k": (1, 2, 3),
    "hidden": (1024, 2048, 4096),
    "depth": (1, 2, 3),
    "input": ("raw", "probabilities", "normalised", "top_k", COMPACT),
}
PAPER = {"k": 2, "hidden": 2048, "depth": 2}
HEADINGS = ("network", "widths", "acc.", "pred.", "fixed", "oracle", "pred. - fixed")


@dataclass(frozen=True)
class Variant:
    """One cell: the factor that differs from the paper's network, its value, and the network itself."""

    factor: str
    value: int | str
    window: tuple[int, ...]
    input_kind: str
    hidden: int
    depth: int
    skipped: str | None


def ablate(
    labels: Files,
    output: str | Path,
    *,
    settings: TrainSettings | None = None,
    objective: str = "acceptance",
    cost: Cost | None = None,
    progress: Callable[[int, str], None] = lambda done, doing: None,
) -> dict[str, Any]:
    """Trains every variant and writes the JSON after each; a file of the same setup is continued.

    The settings are the paper's but for what a variant changes. Where the labels hold no raw logits, the input is
    the compact one throughout, and the inputs that need raw logits are skipped. Windows are B ± k of the labelled
    widths; where B ± 2 has fewer than two, the other factors use all labelled widths.

    Args:
        labels, objective, cost: as in `train_policy`.
        output: JSON file.
        settings: epochs, learning rate, batch, loss, split, seed and threads to use; network and input are ignored.
        progress: told how many cells have just been finished, 0 or 1, and what comes next.

    Raises:
        ValueError: bad labels, or `output` holds another setup.
    """
    base = settings or TrainSettings(kind="full", patience=TrainSettings.epochs)
    base = replace(base, kind="full", input_kind=None, hidden=None, depth=2, seeds=1).resolved()
    data = load_data(labels, COMPACT, objective, cost)
    setup = _setup(data, base)
    done = _continued(Path(output), setup)
    cells: list[dict[str, Any]] = []
    for variant in variants(data.labels):
        cell = _jsonable({**asdict(variant), "result": None})
        progress(0, f"{variant.factor} = {variant.value}")
        if variant.skipped is None:
            known = done.get(_key(cell)) or next(
                (c for c in cells if _key(c) == _key(cell) and c["result"]), None
            )
            cell["result"] = known["result"] if known else _judge(labels, variant, base, objective, cost)
        cells.append(cell)
        ahead = [c for c in done.values() if _key(c) not in {_key(x) for x in cells}]
        _write(Path(output), {"ablation": FORMAT, "setup": setup, "cells": cells + ahead})
        progress(1, f"{variant.factor} = {variant.value}")
    return {"ablation": FORMAT, "setup": setup, "cells": cells}


def variants(labels: LabelSet) -> list[Variant]:
    """The cells for these labels, skipped ones with the reason."""
    labelled = tuple(w for w in labels.settings["window"])
    raw = bool(labels.settings.get("raw_logits"))
    return list(_variants(labelled, labels.block_size, raw))


def _variants(labelled: tuple[int, ...], block: int, raw: bool) -> Iterator[Variant]:
    def near(k: int) -> tuple[int, ...]:
        return tuple(w for w in labelled if abs(w - block) <= k)

    window = near(PAPER["k"]) if len(near(PAPER["k"])) > 1 else labelled
    base = Variant("", 0, window, "raw" if raw else COMPACT, PAPER["hidden"], PAPER["depth"], None)
    for k in GRID["k"]:
        few = None if len(near(k)) > 1 else f"labels hold {len(near(k))} width within {k} of {block}"
        yield replace(base, factor="k", value=k, window=near(k), skipped=few)
    for hidden in GRID["hidden"]:
        yield replace(base, factor="hidden", value=hidden, hidden=hidden)
    for depth in GRID["depth"]:
        yield replace(base, factor="depth", value=depth, depth=depth)
    for kind in GRID["input"]:
        lacking = None if raw or kind == COMPACT else "labels hold no raw logits"
        yield replace(base, factor="input", value=kind, input_kind=kind, skipped=lacking)


def _judge(
    labels: Files, variant: Variant, base: TrainSettings, objective: str, cost: Cost | None
) -> dict[str, Any]:
    kind = "compact" if variant.input_kind == COMPACT else "full"
    settings = replace(
        base, kind=kind, input_kind=variant.input_kind, hidden=variant.hidden, depth=variant.depth
    )
    data = load_data(labels, variant.input_kind, objective, cost, variant.window)
    train, held_out = part(data.labels.examples, settings.held_out, settings.seed, settings.split)
    values = worth(train.tau, train.window, data.objective_cost)
    architecture = settings.architecture(train.inputs.shape[1], train.window)
    with torch_threads(settings.threads):
        fit = fit_network(train, targets(settings.loss, values), architecture, settings)
        predictor = Predictor(fit.network)
        chosen, fitted = (best(predictor.scores(x.inputs)) for x in (held_out, train))
    section = compare(
        train,
        held_out,
        chosen,
        chosen,
        block_size=data.labels.block_size,
        cost=data.objective_cost,
        bootstrap=Bootstrap(len(held_out), settings.bootstrap, settings.seed),
    )
    figures = {name: asdict(section.strategies[name]) for name in ("predictor", "best_fixed", "oracle")}
    return {
        "parameters": sum(p.numel() for p in fit.network.parameters()),
        "epoch": fit.epoch,
        "train_accuracy": float((fitted == best(values)).double().mean()),
        "accuracy": section.accuracy,
        "best_fixed_width": section.best_fixed_width,
        **figures,
        "gain": asdict(section.gains["predictor - best_fixed"]),
    }


def _setup(data: TrainingData, settings: TrainSettings) -> dict[str, Any]:
    examples = data.labels.examples
    content = repr((examples.ids, examples.families, examples.tau.tolist()))
    return _jsonable({
        "objective": data.objective,
        "cost": data.cost,
        "settings": {k: v for k, v in asdict(settings).items() if k not in ("kind", "input_kind", "hidden", "depth")},
        "labels": data.labels.settings,
        "prompts": len(examples),
        "prompts_hash": hashlib.sha256(content.encode()).hexdigest()[:16],
    })  # fmt: skip


def _continued(path: Path, setup: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Finished cells of an earlier run by network; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known, cells = found["setup"], found["cells"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected an ablation to continue, found another file ({error})") from error
    if known != setup:
        differing = sorted(k for k in setup if known.get(k) != setup[k])
        raise ValueError(
            f"{path}: the ablation there has another setup ({', '.join(differing)}); use another output file"
        )
    return {_key(cell): cell for cell in cells if cell["result"] is not None}


def _key(cell: dict[str, Any]) -> str:
    """A cell's network as text."""
    return json.dumps([cell[name] for name in ("window", "input_kind", "hidden", "depth")])


def _write(path: Path, found: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _jsonable(value: dict[str, Any]) -> dict[str, Any]:
    """The same as JSON would read it back."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    return found


def rows(found: dict[str, Any]) -> list[Sequence[str]]:
    """A table of the cells that have a result, under `HEADINGS`."""
    return [_row(cell) for cell in found["cells"] if cell["result"] is not None]


def skipped(found: dict[str, Any]) -> list[str]:
    """A line for every cell without a result."""
    cells = [cell for cell in found["cells"] if cell["result"] is None]
    return [f"{cell['factor']} = {cell['value']} skipped: {cell['skipped']}" for cell in cells]


def _row(cell: dict[str, Any]) -> Sequence[str]:
    result, gain = cell["result"], cell["result"]["gain"]
    return (
        f"{cell['factor']} = {cell['value']}",
        ",".join(map(str, cell["window"])),
        f"{result['train_accuracy']:.0%}/{result['accuracy']:.0%}",
        *(f"{result[key]['mean']:.4g}" for key in ("predictor", "best_fixed", "oracle")),
        f"{gain['mean']:+.2g} ({gain['low']:.2g} to {gain['high']:.2g})",
    )
