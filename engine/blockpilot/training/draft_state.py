"""A training run's state in one safetensors file: weights, moments and generator, and as JSON its recipe and place."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.policies.atomic import replacing

if TYPE_CHECKING:
    from blockpilot.training.draft_training import DraftTrainer

MOMENTS = ("exp_avg", "exp_avg_sq")
PLACE = ("blocks", "steps", "tokens", "seconds")
ORDER = ("size", "epoch", "at")
FREE = ("blocks", "decay", "rate")  # of a recipe: what a run that goes on may change
MOST = 1 << 53  # above every count; as a float, exact below
BEGIN_AGAIN = "delete the file to begin again"


def save_state(trainer: DraftTrainer, path: Path) -> None:
    """See `DraftTrainer.save`."""
    tensors = {"generator": trainer.generator.get_state(), "scale": trainer.model.scale}
    for name, parameter in trainer.model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key in MOMENTS if trainer.steps else ():
            tensors[f"{key}.{name}"] = trainer.optimiser.state[parameter][key]
    place = {k: getattr(trainer, k) for k in PLACE}
    order = {k: getattr(trainer.order, k) for k in ORDER}
    metadata = {"recipe": asdict(trainer.recipe), "place": place, "order": order}
    with replacing(path) as temporary:
        save_file(
            {k: v.contiguous().clone() for k, v in tensors.items()},
            temporary,
            metadata={k: json.dumps(v) for k, v in metadata.items()},
        )


def load_state(trainer: DraftTrainer, path: Path) -> None:
    """See `DraftTrainer.load`; a file that is refused changes nothing."""
    try:
        with safe_open(path, "pt") as file:
            metadata = {k: json.loads(v) for k, v in file.metadata().items()}
        tensors = load_file(path)
        recipe, place, order = (dict(metadata[k]) for k in ("recipe", "place", "order"))
    except (
        SafetensorError,
        AttributeError,
        KeyError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"{path}: expected the state of a run, found {error!r}; {BEGIN_AGAIN}") from error
    _check_recipe(trainer, path, recipe)
    for name, found, known in (("place", place, PLACE), ("order", order, ORDER)):
        _check_numbers(f"{path}: {name}", found, known)
    if order["size"] > len(trainer.readers):
        raise ValueError(
            f"{path}: order: expected at most the {len(trainer.readers)} answers there are, got {order['size']}; "
            f"{BEGIN_AGAIN}"
        )
    _check_tensors(trainer, path, tensors, place["steps"])
    try:
        trainer.generator.set_state(tensors["generator"])
    except RuntimeError as error:
        raise ValueError(
            f"{path}: expected the state of a generator, found {error!r}; {BEGIN_AGAIN}"
        ) from error
    _take(trainer, tensors, place["steps"])
    for key in PLACE:
        setattr(trainer, key, place[key])
    for key in ORDER:
        setattr(trainer.order, key, order[key])


@torch.no_grad()
def _take(trainer: DraftTrainer, tensors: dict[str, Tensor], steps: int) -> None:
    for name, parameter in trainer.model.named_parameters():
        parameter.copy_(tensors[f"model.{name}"])
        if steps:
            moments = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in MOMENTS}
            taken = torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)
            trainer.optimiser.state[parameter] = {"step": taken, **moments}
    trainer.model.scale.copy_(tensors["scale"])


def _check_recipe(trainer: DraftTrainer, path: Path, found: dict[str, Any]) -> None:
    ours = json.loads(json.dumps(asdict(trainer.recipe)))
    if other := [k for k in ours if k not in FREE and ours[k] != found.get(k)]:
        changes = "; ".join(f"{k}: {found.get(k)!r}, not {ours[k]!r}" for k in other)
        raise ValueError(f"{path}: the run there has another recipe ({changes}); use another folder")


def _check_numbers(where: str, found: dict[str, Any], known: tuple[str, ...]) -> None:
    """Whole numbers under the known names and no others; `seconds` may have a fraction."""
    types = {"seconds": (int, float)}
    good = [type(v) in types.get(k, (int,)) and 0 <= v < MOST for k, v in found.items()]
    if set(found) != set(known) or not all(good):
        raise ValueError(
            f"{where}: expected numbers of 0 or more named {list(known)}, got {found}; {BEGIN_AGAIN}"
        )


def _check_tensors(trainer: DraftTrainer, path: Path, found: dict[str, Tensor], steps: int) -> None:
    """Those of this model, its moments once it has taken a step, and no others."""
    expected = {"generator": trainer.generator.get_state(), "scale": trainer.model.scale}
    for name, parameter in trainer.model.named_parameters():
        expected |= {f"{kind}.{name}": parameter for kind in ("model", *(MOMENTS if steps else ()))}
    for name in sorted({*expected, *found}):
        wanted, got = _words(expected.get(name)), _words(found.get(name))
        if wanted != got:
            raise ValueError(
                f"{path}: {name}: expected {wanted}, got {got}; the state of another drafter or a damaged one: use "
                f"another folder, or {BEGIN_AGAIN}"
            )


def _words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
