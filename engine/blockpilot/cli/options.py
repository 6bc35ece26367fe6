"""Options shared by the commands, and the step from their words to an engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockpilot.policies import parse_fixed

if TYPE_CHECKING:
    from blockpilot.llm import LLM
    from blockpilot.params import SamplingParams
    from blockpilot.policies import BlockPolicy

BUNDLED_TARGET = "smollm2"
BUNDLED_DRAFTER = "bundled+lookup"  # the one that the bundled policy is for

TargetOption = Annotated[
    str,
    typer.Option(
        "--target", "-t", help="smollm2, a safetensors folder, a .gguf file or a hub id (owner/name)."
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="bundled, a folder or a hub id, with +lookup behind it to copy what repeats; lookup alone, or none; "
        "default: bundled+lookup for smollm2, none otherwise.",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="bundled, predictor (the one that ships), fixed:N, fixed:N/M for trees of M nodes, fixed:N/M@FILE with "
        "the calibration that cuts them, a policy file, or none for the drafter's own block size; "
        "default: bundled with bundled+lookup, none otherwise.",
    ),
]
DType = Literal["float32", "bfloat16"]
Weights = Literal["auto", "stored", "stored-int16", "stored-int8", "dense"]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Arithmetic of the matrix products.")]
WeightsOption = Annotated[
    Weights,
    typer.Option(
        "--weights",
        help="stored: a GGUF file's blocks; stored-int16, stored-int8: inputs of products rounded to 16-bit codes or "
        "bytes as well; dense: floats. auto: stored-int16 where file and kernels allow it, else dense.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; default: what torch chooses.")
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option("--max-length", min=2, help="Positions per request; default: the model's, up to 2048."),
]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=0, help="Tokens per answer.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 is greedy; otherwise at least 1e-5.")
]
TopKOption = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 is off.")]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Keep the likeliest tokens of this mass; 1 is off.")
]
MinPOption = Annotated[float, typer.Option("--min-p", help="Keep p >= min_p * the largest p; 0 is off.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")
]


@dataclass(frozen=True)
class Engine:
    """What a command opens: names as the user wrote them, defaults applied.

    Attributes:
        drafter: as `LLM` takes it, None for plain decoding.
        policy: as `LLM` takes it.
    """

    target: str
    drafter: str | None
    policy: str | int | None
    dtype: str = "float32"
    weights: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    max_length: int | None = None

    @classmethod
    def resolve(cls, target: str, drafter: str | None, policy: str | None, **rest: Any) -> Engine:
        """Apply the defaults and refuse an unknown policy; the engine refuses unknown models."""
        drafter = drafter or (BUNDLED_DRAFTER if target == BUNDLED_TARGET else "none")
        policy = policy or ("bundled" if drafter == BUNDLED_DRAFTER else "none")
        return cls(target, None if drafter == "none" else drafter, parse_policy(policy), **rest)

    def open(self, max_requests: int = 1, policy: BlockPolicy | None = None) -> LLM:
        """Load the models, with `policy` in place of the named one. Refusals: `ValueError`, `OSError`."""
        from blockpilot.llm import LLM

        check_device(self.device)
        check_backend(self.device)
        return LLM(
            self.target,
            drafter=self.drafter,
            policy=self.policy if policy is None else policy,
            device=self.device,
            dtype=self.dtype,
            weights=self.weights,
            max_requests=max_requests,
            max_length=self.max_length,
            threads=self.threads,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; a policy file is named with the hash of its content."""
        policy = self.policy
        if isinstance(policy, str) and policy not in ("bundled", "predictor"):
            spelt = parse_fixed(policy)
            file = policy if spelt is None else spelt.costs
            if file is not None:
                policy = f"{policy} sha256:{hashlib.sha256(Path(file).read_bytes()).hexdigest()}"
        return {**vars(self), "policy": policy}


def parse_policy(text: str) -> str | int | None:
    """`bundled`, `predictor`, `none`, `fixed:N`, `fixed:N/M`, `fixed:N/M@FILE` or a file → what `LLM` takes."""
    if text in ("bundled", "predictor", "none"):
        return None if text == "none" else text
    kind, _, shape = text.partition(":")
    if kind == "fixed":
        spelt = parse_fixed(shape)
        if spelt is None or spelt.width < 1 or spelt.tree == 0:
            raise ValueError(
                "--policy: expected fixed:N, fixed:N/M for trees of M nodes or fixed:N/M@FILE with the calibration "
                f"that cuts them, N >= 1, got {text!r}"
            )
        if spelt.costs is not None and not Path(spelt.costs).is_file():
            raise ValueError(
                f"--policy: expected a calibration behind @, found no file {spelt.costs!r}; see `calibrate`"
            )
        return spelt.width if spelt.tree is None else shape
    if Path(text).is_file():
        return text
    raise ValueError(
        f"--policy: expected bundled, predictor, none, fixed:N, fixed:N/M or an existing policy file, got {text!r}"
    )


def parse_window(option: str, text: str, what: str = "widths") -> tuple[int, ...]:
    """`1,2,3` → (1, 2, 3), sorted and without repeats; `what` they are, for the refusal."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and int(item) >= 1 for item in items):
        raise ValueError(f"{option}: expected {what} >= 1, as in 1,2,3, got {text!r}")
    return tuple(sorted({int(item) for item in items}))


def parse_trees(option: str, text: str) -> dict[int, int]:
    """`6/12,8/16` → {6: 12, 8: 16}, nodes by width; empty for no text."""
    found: dict[int, int] = {}
    for item in text.split(",") if text else ():
        numbers = item.strip().split("/")
        if len(numbers) != 2 or not all(n.isdecimal() for n in numbers) or int(numbers[0]) in found:
            raise ValueError(f"{option}: expected widths, each once, and nodes, as in 6/16, got {text!r}")
        found[int(numbers[0])] = int(numbers[1])
    return found


def parse_layers(option: str, text: str) -> tuple[int, ...]:
    """`0,8,14` → (0, 8, 14), in the order given."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() for item in items):
        raise ValueError(f"{option}: expected layer numbers, as in 0,8,14, got {text!r}")
    return tuple(int(item) for item in items)


def check_backend(device: str) -> None:
    """Turn a kernel backend that is forced but absent into a user's mistake."""
    from blockpilot_kernels import dispatch

    try:
        dispatch.explain(device.partition(":")[0])
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def check_device(name: str) -> None:
    """Refuse a device that is not one of torch's or not there."""
    import torch

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in devices and not (name == "cuda" and len(devices) > 1):
        raise ValueError(f"--device: expected one of {', '.join(devices)} on this machine, got {name!r}")


def sampling_params(**options: Any) -> SamplingParams:
    """`SamplingParams`, which raises `ValueError` for what it cannot accept."""
    from blockpilot.params import SamplingParams

    return SamplingParams(**options)
