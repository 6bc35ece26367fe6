"""Files that ship with the package: a drafter and a policy for SmolLM2-135M-Instruct, demo prompts."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
DRAFTER = FOLDER / "smollm2-135m-dflash-b6"
POLICY = FOLDER / "smollm2-135m-dflash-b6-policy.safetensors"
PREDICTOR = FOLDER / "smollm2-135m-dflash-b6-policy.predictor.safetensors"
PROMPTS = FOLDER / "demo_prompts.jsonl"


def _present(path: Path, what: str) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            f"the bundled {what} is not in this installation: expected {path.name} in {FOLDER}; "
            "reinstall blockpilot, or name one of your own"
        )
    return path


def drafter_path() -> Path:
    """Folder of the bundled DFlash drafter (`config.json`, `model.safetensors`)."""
    return _present(DRAFTER, "drafter")


def policy_path() -> Path:
    """The bundled block-width policy file: what is best by its held-out report, a predictor or a fixed width."""
    return _present(POLICY, "policy")


def predictor_path() -> Path:
    """The bundled predictor: a file of its own where the policy is a fixed width, else the policy."""
    return PREDICTOR if PREDICTOR.exists() else policy_path()


def demo_prompts() -> list[dict[str, str]]:
    """The bundled prompts in file order, as `{"id", "dataset", "prompt"}`."""
    lines = _present(PROMPTS, "prompt set").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
