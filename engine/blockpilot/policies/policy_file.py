"""Policy files: a safetensors file of the network whose metadata says what it was made for, from and with.

Metadata key "blockpilot_policy" is JSON: format, pair {target, drafter}, architecture {kind, input_kind,
input_size, hidden, window, dropout, depth (2 where missing)}, objective, cost {width: seconds} or null, report
(held out), training (settings). A fixed width is a file without tensors whose architecture is {kind: "fixed",
width} and, for trees, tree and node_cost (null: whole trees). No pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from blockpilot.policies.atomic import replacing
from blockpilot.policies.contract import Fixed, Pair
from blockpilot.policies.predictor import Architecture, Predictor, WidthNetwork

FORMAT = 1
METADATA_KEY = "blockpilot_policy"
OBJECTIVES = ("acceptance", "throughput")
_MAX_HEADER = 16 * 2**20


class PolicyFileError(ValueError):
    """A policy file that is not what it should be; the message names file, place, expected and found."""


@dataclass(frozen=True)
class PolicyFile:
    """A predictor, or a fixed width, with everything that says where it holds.

    Attributes:
        policy: what chooses the width.
        pair: fingerprints of target and drafter.
        objective: what the labels maximised, "acceptance" (τ) or "throughput" (τ / cost).
        cost: seconds of a step by width, where the objective needed it.
        report: held-out results, JSON-ready.
        training: settings and data, JSON-ready.
    """

    policy: Predictor | Fixed
    pair: Pair
    objective: str
    cost: dict[int, float] | None = None
    report: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective: expected one of {OBJECTIVES}, got {self.objective!r}")
        if self.objective == "throughput" and self.cost is None:
            raise ValueError("cost: expected a table {width: seconds} for the throughput objective, got none")
        if self.cost is not None:
            check_cost(self.cost, self.policy.window)

    @property
    def predictor(self) -> Predictor:
        """The policy; ValueError if it is a fixed width."""
        if isinstance(self.policy, Fixed):
            raise ValueError(f"policy: expected a predictor, got the fixed width {self.policy.width}")
        return self.policy


def check_cost(cost: Mapping[int, float], window: tuple[int, ...]) -> dict[int, float]:
    """The costs of the window's widths in seconds; ValueError unless each is there, finite and positive."""
    missing = [w for w in window if w not in cost]
    if missing:
        raise ValueError(f"cost: expected seconds for every width of {list(window)}, missing {missing}")
    for w in window:
        value = cost[w]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"cost: expected finite positive seconds for width {w}, got {value!r}")
    return {w: float(cost[w]) for w in window}


def save_policy(file: PolicyFile, path: str | Path) -> None:
    """Writes the policy file; it appears whole or not at all."""
    policy = file.policy
    head = {
        "format": FORMAT,
        "pair": asdict(file.pair),
        "architecture": _fixed_values(policy) if isinstance(policy, Fixed) else asdict(policy.architecture),
        "objective": file.objective,
        "cost": None if file.cost is None else {str(w): c for w, c in file.cost.items()},
        "report": file.report,
        "training": file.training,
    }
    text = json.dumps(head, allow_nan=False, sort_keys=True)
    state = {} if isinstance(policy, Fixed) else policy.network.state_dict()
    tensors = {k: v.detach().float().cpu().contiguous() for k, v in state.items()}
    with replacing(Path(path)) as temporary:
        save_file(tensors, temporary, metadata={METADATA_KEY: text})


def read_policy(path: str | Path) -> PolicyFile:
    """Reads and checks a policy file. PolicyFileError (a ValueError) says what is wrong with it."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PolicyFileError(
            f"{path}: expected a readable policy file, got {error.strerror or error}"
        ) from error
    header = _header(path, data)
    head = _metadata(path, header)
    policy = _fixed(path, header, head) or _predictor(path, data, header, head)
    try:
        pair = Pair(**head["pair"])
        cost = None if head["cost"] is None else {int(w): c for w, c in head["cost"].items()}
        return PolicyFile(policy, pair, head["objective"], cost, head["report"], head["training"])
    except (ValueError, TypeError, AttributeError) as error:
        raise PolicyFileError(f"{path}: {error}") from error


def _header(path: Path, data: bytes) -> dict[str, Any]:
    """The safetensors header, after checking that the file is one and is as long as it says."""
    if data[8:9] != b"{" and (data[:2] == b"PK" or data[:1] == b"\x80"):
        raise PolicyFileError(
            f"{path}: expected safetensors, found a pickle or zip archive, which is never loaded"
        )
    size = int.from_bytes(data[:8], "little")
    if len(data) >= 8 and size > _MAX_HEADER:
        raise PolicyFileError(
            f"{path}: expected a policy written by `blockpilot train-policy`, found a file that is not safetensors"
        )
    if len(data) < 8 or size > len(data) - 8:
        raise PolicyFileError(
            f"{path}: expected a safetensors header of {size} bytes, found a file of {len(data)} bytes"
        )
    try:
        header = json.loads(data[8 : 8 + size])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + size + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise PolicyFileError(
            f"{path}: expected a safetensors header, found unreadable JSON ({error})"
        ) from error
    if expected != len(data):
        raise PolicyFileError(
            f"{path}: expected {expected} bytes by its header, found {len(data)}; copy it again"
        )
    checked: dict[str, Any] = header
    return checked


def _metadata(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The policy's JSON with every key there and of the right type."""
    metadata = header.get("__metadata__")
    text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if text is None:
        raise PolicyFileError(
            f"{path}: expected metadata {METADATA_KEY!r}, found none; this is not a policy file"
        )
    try:
        head = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise PolicyFileError(f"{path}: expected JSON in metadata {METADATA_KEY!r}, found {error}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, dict) else head
        raise PolicyFileError(f"{path}: expected policy format {FORMAT}, found {found!r}")
    expected: dict[str, type | tuple[type, ...]] = {
        "pair": dict,
        "architecture": dict,
        "objective": str,
        "cost": (dict, type(None)),
        "report": dict,
        "training": dict,
    }
    for key, kind in expected.items():
        if not isinstance(head.get(key, Ellipsis), kind):
            raise PolicyFileError(
                f"{path}: expected metadata key {key!r} of type {kind}, found {head.get(key)!r}"
            )
    return head


def _fixed_values(policy: Fixed) -> dict[str, Any]:
    values: dict[str, Any] = {"kind": "fixed", "width": policy.width}
    return values | {"tree": policy.tree, "node_cost": policy.node_cost} if policy.tree else values


def _fixed(path: Path, header: dict[str, Any], head: dict[str, Any]) -> Fixed | None:
    """The fixed width of such a file; None for any other kind."""
    values = head["architecture"]
    if values.get("kind") != "fixed":
        return None
    tensors = sorted(set(header) - {"__metadata__"})
    sizes = {name: value for name, value in values.items() if name != "kind"}
    if set(sizes) not in ({"width"}, {"width", "tree", "node_cost"}) or tensors:
        raise PolicyFileError(
            f"{path}: expected kind and width, or tree and node_cost too, and no tensors in a fixed policy, found "
            f"{sorted(values)}, {tensors}"
        )
    try:
        return Fixed(**sizes)
    except (ValueError, TypeError) as error:
        raise PolicyFileError(f"{path}: {error}") from error


def _predictor(path: Path, data: bytes, header: dict[str, Any], head: dict[str, Any]) -> Predictor:
    architecture = _architecture(path, head["architecture"])
    tensors = _tensors(path, data, header, architecture)
    network = WidthNetwork(architecture, seed=None)
    network.load_state_dict(tensors, assign=True)
    return Predictor(network)


def _architecture(path: Path, values: dict[str, Any]) -> Architecture:
    names = {f.name for f in fields(Architecture)}
    values = {"depth": 2, **values}
    if set(values) != names:
        raise PolicyFileError(f"{path}: expected architecture keys {sorted(names)}, found {sorted(values)}")
    try:
        return Architecture(**values)
    except (ValueError, TypeError) as error:
        raise PolicyFileError(f"{path}: {error}") from error


def _tensors(
    path: Path, data: bytes, header: dict[str, Any], architecture: Architecture
) -> dict[str, Tensor]:
    """The network's tensors, each checked for presence, dtype, shape and finite values."""
    d, h, c = architecture.input_size, architecture.hidden, len(architecture.window)
    shapes = {"head.weight": [c, h], "head.bias": [c]}
    for name in architecture.layers:
        shapes |= {f"{name}.weight": [h, d if name == "first" else h], f"{name}.bias": [h]}
    for name in sorted(set(shapes) | set(header) - {"__metadata__"}):
        expected = f"F32 {shapes[name]}" if name in shapes else "no such tensor"
        entry = header.get(name)
        found = f"{entry.get('dtype')} {entry.get('shape')}" if isinstance(entry, dict) else "none"
        if expected != found:
            raise PolicyFileError(f"{path}: tensor {name!r}: expected {expected}, found {found}")
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise PolicyFileError(f"{path}: expected valid safetensors, found {error}") from error
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise PolicyFileError(f"{path}: tensor {name!r}: expected finite values, found NaN or infinity")
    return tensors
