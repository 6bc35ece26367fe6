"""A model file that changes between the look at its header and the reading of its weights is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockpilot import LLM
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.stored import CheckpointError, OnDemand
from tests.engine.pair import tiny_config, tiny_tensors, write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    write_tokenizer(tmp_path)
    save_file(tiny_tensors(0), tmp_path / "model.safetensors")
    return tmp_path


def replaced(tensors: dict, folder: Path) -> None:
    save_file(tensors, folder / "new")
    os.replace(folder / "new", folder / "model.safetensors")


@pytest.mark.parametrize("change", ["norm", "values", "truncated", "deleted"])
def test_a_file_that_changed_is_refused(folder: Path, change: str) -> None:
    checkpoint = load_checkpoint(folder)
    path = folder / "model.safetensors"
    if change == "norm":
        replaced({**load_file(path), "model.norm.weight": torch.ones(4)}, folder)
    elif change == "values":
        replaced(tiny_tensors(1), folder)
    elif change == "truncated":
        os.truncate(path, path.stat().st_size - 100)
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match="changed while it was being loaded"):
        LLM(checkpoint, max_length=64)


def test_asking_for_a_name_reads_nothing() -> None:
    read: list[str] = []
    tensors = OnDemand(["a", "b"], lambda name: read.append(name) or name)
    assert "a" in tensors and "c" not in tensors and len(tensors) == 2 and tensors.get("c") is None
    assert not read
    assert tensors["b"] == "b" and read == ["b"]
