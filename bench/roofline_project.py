"""What a step should take: each group of kernels at the pace of its memory traffic or of its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roofline_devices import Device
from roofline_models import WORKLOADS, Model
from roofline_terms import PHASES, Load, Sizes, Term, policy_terms, resident_bytes, step_terms, verify_terms

LABEL = "projected"
EFFICIENCY, LAUNCH_US = 0.8, 1.0


@dataclass(frozen=True)
class Settings:
    """`efficiency`: share of a published peak that kernels reach. `launch_us`: what every launch adds."""

    efficiency: float = EFFICIENCY
    launch_us: float = LAUNCH_US

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency: expected a share in (0, 1], got {self.efficiency:g}")
        if not 0 <= self.launch_us < math.inf:
            raise ValueError(f"launch_us: expected microseconds >= 0, got {self.launch_us:g}")

    def on(self, device: Device) -> Settings:
        """These, or those of a device whose bandwidth was measured as kernels reach it."""
        return Settings(1.0, 0.0) if device.measured else self

    def milliseconds(self, term: Term, device: Device) -> tuple[float, float, float]:
        """Memory, compute and launches of one term; the longer of the first two hides the other."""
        memory = term.bytes / (device.bandwidth * self.efficiency) * 1e3
        compute = term.flops / (device.flops * self.efficiency) * 1e3
        return memory, compute, term.launches * self.launch_us / 1e3


def duration(terms: Sequence[Term], device: Device, settings: Settings) -> dict[str, Any]:
    """`ms` of the terms, `phases` of it, and `bound`: what most of it is spent on."""
    phases, spent = dict.fromkeys(PHASES, 0.0), {"memory": 0.0, "compute": 0.0, "launches": 0.0}
    for term in terms:
        memory, compute, launches = settings.on(device).milliseconds(term, device)
        spent["memory" if memory >= compute else "compute"] += max(memory, compute)
        spent["launches"] += launches
        phases[term.phase] = phases.get(term.phase, 0.0) + max(memory, compute) + launches
    bound = max(spent, key=lambda kind: spent[kind])
    return {"ms": sum(spent.values()), "phases": phases, "spent": spent, "bound": bound}


def limit_ms(terms: Sequence[Term], device: Device) -> float:
    """The bandwidth limit: the same bytes at the device's whole bandwidth, and nothing else."""
    return sum(term.bytes for term in terms) / device.bandwidth * 1e3


def project(
    model: Model, device: Device, sizes: Sizes, load: Load, settings: Settings, tau: float | str
) -> dict[str, Any]:
    """One entry of the report.

    Args:
        tau: tokens that a request commits in a step, or a workload whose published figure is taken.
    """
    terms = step_terms(model, sizes, load)
    found = duration(terms, device, settings)
    plain = duration(verify_terms(model, sizes, replace(load, width=1)), device, settings)["ms"]
    step, phases = found["ms"], found["phases"]
    tokens, source = tau_of(model, load.width, tau)
    return {
        "label": LABEL,
        "model": model.name,
        "gpu": device.name,
        "requests": load.requests,
        "context": load.context,
        "width": load.width,
        "step_ms": step,
        **{f"{phase}_ms": phases[phase] for phase in PHASES},
        "plain_ms": plain,
        "draft_share": phases["draft"] / step,
        "bytes": sum(term.bytes for term in terms),
        "flops": sum(term.flops for term in terms),
        "limit_ms": limit_ms(terms, device),
        "bound": found["bound"],
        "spent_ms": found["spent"],
        "fits": resident_bytes(model, sizes, load) <= device.memory,
        "even_tau": step / plain,
        "tau": tokens,
        "tau_source": source,
        "tokens_per_s": None if tokens is None else load.requests * tokens / step * 1e3,
        "speedup": None if tokens is None else tokens * plain / step,
    }


def tau_of(model: Model, width: int, tau: float | str) -> tuple[float | None, str | None]:
    """τ at a width and where it is from: a published figure holds at the drafter's own width alone.

    Raises:
        ValueError: more tokens a step than its width.
    """
    if width == 1:
        return 1.0, "plain"
    if isinstance(tau, str):
        found = model.published.get(tau) if width == model.block_size else None
        return found, None if found is None else f"published, {tau}"
    if not 1 <= tau <= width:
        raise ValueError(
            f"--tau: expected 1 to {width}, what a step of width {width} can commit, got {tau:g}"
        )
    return tau, "given"


def policy(model: Model, device: Device, settings: Settings) -> dict[str, Any]:
    """The predictor's milliseconds and bytes, once a request."""
    terms = policy_terms(model)
    found = duration(terms, device, settings)
    size = sum(term.bytes for term in terms)
    return {"label": LABEL, "model": model.name, "gpu": device.name, "policy_ms": found["ms"], "bytes": size}


def parse_tau(text: str) -> float | str:
    """A number of tokens, or the name of a published workload.

    Raises:
        ValueError: neither.
    """
    if text.lower() in WORKLOADS:
        return text.lower()
    try:
        tokens = float(text)
    except ValueError:
        tokens = 0.0
    if not tokens >= 1:
        raise ValueError(f"expected a number >= 1 or one of {', '.join(WORKLOADS)}, got {text!r}")
    return tokens
