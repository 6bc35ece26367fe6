"""What a page is made of, read and checked: every input that names a pair must name the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockpilot.policies.contract import Pair
from blockpilot.training.acceptance import AcceptanceTable, label_table
from blockpilot.training.calibration import Calibration
from blockpilot.training.held_out import Group, HeldOutReport, Interval, Section, Seeds, SplitHalf
from blockpilot.training.label_rows import usable
from blockpilot.training.label_store import read_labels
from blockpilot.training.page.checks import check_number, read_object
from blockpilot.training.page.training_log import TrainingLog, read_training_log

_FIGURES = ("tau", "plain_tokens_per_s", "spec_tokens_per_s", "speedup")


@dataclass(frozen=True)
class Labels:
    """A label file: its τ as a table, its settings and its usable rows."""

    file: str
    table: AcceptanceTable
    settings: dict[str, Any]
    rows: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Bench:
    """What `blockpilot bench` wrote to a file."""

    file: str
    report: dict[str, Any]


@dataclass(frozen=True)
class PageInputs:
    """Everything a page shows. Files are named without their folders.

    Attributes:
        pair: fingerprints found in the inputs; None: none names them.
        files: (file, what it is) of every input.
    """

    labels: tuple[Labels, ...]
    policy: HeldOutReport | None
    calibration: Calibration | None
    log: TrainingLog | None
    bench: tuple[Bench, ...]
    pair: Pair | None
    files: tuple[tuple[str, str], ...]


def read_inputs(
    *,
    labels: Sequence[str | Path] = (),
    policy_report: str | Path | None = None,
    calibration: str | Path | None = None,
    training_log: str | Path | None = None,
    bench: Sequence[str | Path] = (),
) -> PageInputs:
    """Reads every input given.

    Raises:
        ValueError: none is given, one cannot be read or is malformed, or two are of different pairs.
    """
    single = (policy_report, calibration, training_log)
    if not (labels or bench or any(x is not None for x in single)):
        raise ValueError(
            "report: expected at least one of labels, a policy report, a calibration, a training log and a bench "
            "result, got none"
        )
    found_labels = tuple(_labels(Path(p)) for p in labels)
    found_bench = tuple(_bench(Path(p)) for p in bench)
    measured = None if calibration is None else Calibration.load(calibration)
    kinds = [*((p, "labels") for p in labels), (policy_report, "policy report"), (calibration, "calibration")]
    kinds += [(training_log, "training log"), *((p, "bench result") for p in bench)]
    return PageInputs(
        labels=found_labels,
        policy=None if policy_report is None else read_policy_report(policy_report),
        calibration=measured,
        log=None if training_log is None else read_training_log(training_log),
        bench=found_bench,
        pair=_one_pair(found_labels, measured, found_bench),
        files=tuple((Path(p).name, kind) for p, kind in kinds if p is not None),
    )


def read_policy_report(path: str | Path) -> HeldOutReport:
    """What `train-policy --report` wrote.

    Raises:
        ValueError: it is something else.
    """
    path = Path(path)
    found = read_object(path, "policy report")
    try:
        throughput = found["throughput"]
        return HeldOutReport(**{
            **found,
            "window": tuple(found["window"]),
            "acceptance": _section(found["acceptance"]),
            "throughput": None if throughput is None else _section(throughput),
            "tau_by_width": {int(w): _interval(v) for w, v in found["tau_by_width"].items()},
            "seeds": None if found.get("seeds") is None else Seeds(**found["seeds"]),
            "warnings": tuple(found.get("warnings", ())),
        })  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected what `blockpilot train-policy --report` writes, got {error!r} in it"
        ) from error


def _section(found: dict[str, Any]) -> Section:
    counts = {"best_widths": {int(w): int(n) for w, n in found["best_widths"].items()}}
    groups = {
        k: {name: Group(**_group(g)) for name, g in found.get(k, {}).items()}
        for k in ("by_family", "by_dataset", "evaluation")
    }
    halves = found.get("split_half")
    split = None if halves is None else SplitHalf(**_group(halves))
    section = Section(**{**_group(found), **counts, **groups, "split_half": split})
    for name in ("accuracy", "control_accuracy", "regret"):
        check_number(name, getattr(section, name))
    if "predictor" not in section.strategies or section.picks.keys() != section.best_widths.keys():
        raise ValueError("expected a predictor, and picks and best widths of the same widths")
    return section


def _group(found: dict[str, Any]) -> dict[str, Any]:
    """The same with its intervals and picks read."""
    read = {k: {n: _interval(v) for n, v in found[k].items()} for k in ("strategies", "gains")}
    picks = {"picks": {int(w): int(n) for w, n in found["picks"].items()}} if "picks" in found else {}
    return {**found, **read, **picks}


def _interval(found: dict[str, Any]) -> Interval:
    interval = Interval(**found)
    for name in ("mean", "low", "high"):
        check_number(name, getattr(interval, name))
    return interval


def _labels(path: Path) -> Labels:
    settings, rows = read_labels(path)
    try:
        Pair(**settings["pair"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected settings with a pair, got {settings.get('pair')!r}") from error
    table, kept = label_table(path), tuple(row for row in rows if usable(row))
    for row in kept:
        offsets = [w - 1 for w in table.widths]
        if any([len(x) for x in row[name]] != offsets for name in ("kept", "offered")):
            raise ValueError(
                f"{path}: prompt {row['id']!r}: expected kept and offered drafts at every offset"
            )
    return Labels(path.name, table, settings, kept)


def _bench(path: Path) -> Bench:
    report = read_object(path, "bench result")
    try:
        if not report["arms"]:
            raise ValueError("no arms")
        for figures in (
            f for arm in report["arms"].values() for f in (arm["overall"], *arm["datasets"].values())
        ):
            for name in _FIGURES:
                check_number(name, figures[name], optional=True)
            for name in ("acceptance_by_offset", "width"):
                for value in figures[name]:
                    check_number(name, value, optional=True)
            if not isinstance(figures["identical"], bool) or not figures["width"]:
                raise ValueError("identical or width")
            check_number("prompts", figures["prompts"])
        Pair(*report["settings"]["pair"].split("+"))
        dict(report["hardware"]), dict(report["versions"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: expected what `blockpilot bench` writes, got {error!r} in it") from error
    return Bench(path.name, report)


def _one_pair(
    labels: Sequence[Labels], calibration: Calibration | None, bench: Sequence[Bench]
) -> Pair | None:
    named = [(x.file, Pair(**x.settings["pair"])) for x in labels]
    named += [] if calibration is None else [("the calibration", calibration.pair)]
    named += [(x.file, Pair(*x.report["settings"]["pair"].split("+"))) for x in bench]
    for what, pair in named[1:]:
        if pair != named[0][1]:
            raise ValueError(
                f"report: expected inputs of one pair, got {named[0][1]} in {named[0][0]} and {pair} in {what}"
            )
    return named[0][1] if named else None
