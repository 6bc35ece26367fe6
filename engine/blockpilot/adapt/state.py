"""What was learned, kept between starts in one safetensors file: the weights, and as JSON what decisions rest on.

No text of a request is in it: feedback is gathered anew.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.adapt.bandit import Bandit
from blockpilot.adapt.learner import Learner
from blockpilot.adapt.pulse import Pulse
from blockpilot.policies.atomic import replacing

if TYPE_CHECKING:
    from blockpilot.adapt.adapter import Adapter

FORMAT = 1
_WEIGHT = "weight."


def save(adapter: Adapter, path: Path) -> None:
    """Write the state, with no update under way; the file appears whole or not at all."""
    tensors, learner = {"format": torch.tensor(FORMAT)}, adapter.learner  # a file has at least one
    if learner is not None:
        named = learner.model.named_parameters()
        tensors |= {_WEIGHT + n: p.detach().cpu().clone().contiguous() for n, p in named}
        tensors |= {"scale": learner.model.scale.cpu(), "generator": learner.generator.get_state()}
    known = {
        "drafter": adapter.drafter.fingerprint,
        "changed": adapter.changed,
        "bandit": adapter.bandit.to_dict(),
        "pulse": adapter.pulse.to_dict(),
        "counts": dict(adapter.counts),
        "seconds": adapter.seconds,
    }
    with replacing(path) as temporary:
        text = json.dumps(known)
        save_file(tensors, temporary, metadata={"state": text, "seal": _seal(text, tensors)})


def restore(adapter: Adapter, path: Path) -> None:
    """Go on from a `save`.

    Raises:
        ValueError: a damaged file, or one of another drafter.
    """
    try:
        known, tensors = _read(path)
        if known["drafter"] != adapter.drafter.fingerprint:
            raise ValueError(
                f"{path}: expected the state of drafter {adapter.drafter.fingerprint[:12]}, found that of "
                f"{known['drafter'][:12]}; name another file for this drafter"
            )
        bandit, pulse = Bandit.from_dict(known["bandit"]), Pulse.from_dict(known["pulse"])
        counts, seconds, changed = Counter(known["counts"]), float(known["seconds"]), str(known["changed"])
        learner = _learner(adapter, tensors) if "scale" in tensors else None
    except (SafetensorError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"{path}: expected what adapting saved, found {error!r}; delete the file to begin again"
        ) from error
    adapter.bandit, adapter.pulse, adapter.learner = bandit, pulse, learner
    adapter.counts, adapter.seconds = counts, seconds
    if changed:
        adapter.install(changed)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    if metadata["seal"] != _seal(metadata["state"], tensors):
        raise KeyError("a file as it was saved")
    return json.loads(metadata["state"]), tensors


def _seal(text: str, tensors: dict[str, Tensor]) -> str:
    """Hex SHA-256 of everything in a file and of its format: what fits it is what `save` wrote."""
    digest = hashlib.sha256(f"{FORMAT} {text}".encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.inference_mode(False)
def _learner(adapter: Adapter, tensors: dict[str, Tensor]) -> Learner:
    made = adapter.twin(tensors["scale"])
    made.generator.set_state(tensors["generator"])
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            parameter.copy_(tensors[_WEIGHT + name])
    return made
