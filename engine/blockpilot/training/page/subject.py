"""What was measured on what, as far as the inputs say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from blockpilot.training.page.inputs import PageInputs
from blockpilot.training.page.parts import Part, Table

_SHORT = 12
_NAMED = ("blockpilot", "torch", "python")
_SETTINGS = ("dtype", "weights", "temperature", "max_new_tokens", "block_size", "window", "seed")


def subject(inputs: PageInputs) -> Part:
    """The page's first line, then fingerprints, versions and files in full."""
    measured: list[tuple[Any, Any]] = [(x.report["hardware"], x.report["versions"]) for x in inputs.bench]
    if (calibration := inputs.calibration) is not None:
        measured.insert(0, ({**calibration.hardware, "threads": calibration.threads}, calibration.versions))
    machines = _machines([hardware for hardware, _ in measured])
    versions = _unique(_versions(found, _NAMED) for _, found in measured)
    line = f"{_pair(inputs)}; {machines or 'no input names the machine'}; {versions or 'nor the versions'}."
    if machines and not versions:
        line = f"{_pair(inputs)}; {machines}; no input names the versions."
    rows = [[kind, file] for file, kind in inputs.files]
    if inputs.pair is not None:
        rows += [["target", inputs.pair.target], ["drafter", inputs.pair.drafter]]
    rows += [[f"settings of {x.file}", _versions(x.settings, _SETTINGS)] for x in inputs.labels]
    rows += [["versions", text] for text in dict.fromkeys(_versions(v, tuple(v)) for _, v in measured)]
    return Part(
        "inputs", "Inputs", [line], tables=[Table("What this page was made from", ["", ""], rows, names=2)]
    )


def _pair(inputs: PageInputs) -> str:
    if inputs.pair is None:
        return "Measured on a pair that no input names"
    return f"Measured: target {inputs.pair.target[:_SHORT]} with drafter {inputs.pair.drafter[:_SHORT]}"


def _machines(found: Iterable[dict[str, Any]]) -> str:
    """Each machine once, with every number of threads it ran with."""
    threads: dict[str, set[int]] = {}
    for hardware in found:
        facts = [hardware.get("cpu"), hardware.get("cpu_capability"), *(hardware.get("cuda") or ())]
        machine = threads.setdefault(", ".join(str(f) for f in facts if f), set())
        machine |= {hardware["threads"]} if hardware.get("threads") else set()
    return "; ".join(", ".join([name, *_threads(counts)]) for name, counts in threads.items() if name)


def _threads(counts: set[int]) -> list[str]:
    text = " and ".join(map(str, sorted(counts)))
    return [f"{text} thread{'' if counts == {1} else 's'}"] if counts else []


def _versions(found: dict[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {found[name]}" for name in names if found.get(name) is not None)


def _unique(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(text for text in texts if text))
