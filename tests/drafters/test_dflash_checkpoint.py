"""The published format on disk: what loads, what is refused and why, and writing it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockpilot.drafters import load_drafter
from blockpilot.drafters.dflash_checkpoint import (
    CheckpointError,
    check_pair,
    load_dflash,
    save_dflash,
)
from blockpilot.drafters.folder import find_drafter
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.torch_target import TorchTarget
from tests.tiny import drafter_config, drafter_tensors, read_drafter, with_value, write_drafter


def test_what_a_drafter_exposes(drafter_for):
    target_folder, folder = drafter_for("llama", target_layer_ids=[0, 2], block_size=8)
    target = TorchTarget(load_checkpoint(target_folder), 2, 64)
    drafter = load_drafter(folder, target, 2)
    assert (drafter.kind, drafter.block_size, drafter.feature_layers) == ("dflash", 8, (1, 3))
    assert drafter.window == tuple(range(1, 17))
    assert drafter.fingerprint == load_dflash(folder).fingerprint


def damaged(name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Spoil the tensors in one way; returns what the error must say."""
    at = "layers.1.self_attn.k_proj.weight"
    if name == "missing":
        del tensors[at]
        return rf"tensor {at}: expected \[16, 32\], found nothing"
    if name == "shape":
        tensors[at] = torch.zeros(32, 16)
        return rf"model.safetensors: tensor {at}: expected \[16, 32\], found \[32, 16\]"
    if name == "extra":
        tensors["embed_tokens.weight"] = torch.zeros(32, 32)
        return r"tensor embed_tokens.weight: expected nothing by config.json, found \[32, 32\]"
    if name == "dtype":
        tensors[at] = torch.zeros(16, 32, dtype=torch.int32)
        return f"tensor {at}: expected F32, BF16, F16, found I32"
    if name == "feature count":
        tensors["fc.weight"] = torch.zeros(32, 96)
        return r"tensor fc.weight: expected \[32, 64\], found \[32, 96\]"
    tensors["candidate_selector.hidden_projection.weight"] = torch.zeros(4, 32)
    return "DFlash 2 drafters are not supported"


@pytest.mark.parametrize("name", ["missing", "shape", "extra", "dtype", "feature count", "DFlash 2"])
def test_bad_tensors_are_refused(tmp_path, config, name):
    tensors = drafter_tensors(config)
    message = damaged(name, tensors)
    write_drafter(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_dflash(tmp_path)


@pytest.mark.parametrize("cut", [1024, 8, 10**9])
def test_a_truncated_file_is_refused(tmp_path, config, cut):
    write_drafter(tmp_path, config, drafter_tensors(config))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: max(0, file.stat().st_size - cut)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_dflash(tmp_path)


def test_pickles_are_never_opened(tmp_path, config):
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "opened",))

    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="pickle"):
        load_dflash(tmp_path)
    assert not (tmp_path / "opened").exists()


def test_missing_files_are_named(tmp_path, config):
    with pytest.raises(CheckpointError, match=r"expected config\.json, found an empty folder"):
        load_dflash(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        load_dflash(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object"):
        load_dflash(tmp_path)


def shard(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write the drafter in two shards; returns the weight map."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    placed = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({n: tensors[n] for n, f in placed.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return placed


def test_shards_load_and_missing_ones_are_named(tmp_path, config):
    tensors = drafter_tensors(config)
    placed = shard(tmp_path / "d", config, tensors)
    loaded = load_dflash(tmp_path / "d")
    assert loaded.tensors.keys() == tensors.keys()
    assert all(torch.equal(loaded.tensors[n], t) for n, t in tensors.items())
    (tmp_path / "d" / placed["fc.weight"]).unlink()
    with pytest.raises(CheckpointError, match=placed["fc.weight"]):
        load_dflash(tmp_path / "d")


MISMATCHES = {
    "depth": ({"num_target_layers": 36}, "number of target layers 36 against 4 of this llama target"),
    "layers it reads": (
        {"num_target_layers": 36, "target_layer_ids": [0, 33]},
        r"reads target layers \[33\]",
    ),
    "hidden size": ({"hidden_size": 48}, "hidden size 48 against 32"),
    "vocabulary": ({"vocab_size": 40}, "vocabulary size 40 against 32"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_another_targets_drafter_is_refused_naming_both(tmp_path, targets, case):
    over, message = MISMATCHES[case]
    config = drafter_config(targets["llama"], **over)
    write_drafter(tmp_path, config, drafter_tensors(config))
    target = TorchTarget(load_checkpoint(targets["llama"]), 1, 64)
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(tmp_path, target, 1)
    assert str(tmp_path) in str(caught.value)


def test_its_own_target_is_accepted(targets, drafter_for):
    check_pair(load_dflash(drafter_for("llama")[1]), load_checkpoint(targets["llama"]).config)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_draft_temperatures_are_refused(drafter_for, temperature):
    target_folder, folder = drafter_for("llama")
    target = TorchTarget(load_checkpoint(target_folder), 1, 64)
    with pytest.raises(ValueError, match="draft_temperature: expected a number > 0"):
        load_drafter(folder, target, 1, temperature)


def test_an_unknown_source_is_refused(tmp_path):
    for source in ("nowhere", tmp_path / "nowhere", "a/b/c", str(tmp_path / "x")):
        with pytest.raises(ValueError, match="expected 'bundled', a folder"):
            find_drafter(source)


def test_the_bundled_drafter_is_complete():
    loaded = load_dflash(find_drafter("bundled"))
    assert loaded.config.target_layer_ids == (1, 8, 14, 20, 27)
    assert (loaded.config.block_size, loaded.config.mask_token_id) == (6, 0)
    assert {t.dtype for t in loaded.tensors.values()} == {torch.bfloat16}
    assert all(torch.isfinite(t).all() for t in loaded.tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_keeps_every_bit(tmp_path, config, dtype):
    tensors = {n: t.to(dtype) for n, t in drafter_tensors(config).items()}
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t()
    save_dflash(tmp_path / "a", config, tensors)
    first = load_dflash(tmp_path / "a")
    save_dflash(tmp_path / "b", first.config.source, first.tensors)
    assert read_drafter(tmp_path / "b")[0] == config
    for name, tensor in load_file(tmp_path / "b" / "model.safetensors").items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, tensors[name])
    assert load_dflash(tmp_path / "b").fingerprint == first.fingerprint
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_the_package_loads_what_is_saved(tmp_path, config):
    published = pytest.importorskip("dflash.model")
    tensors = drafter_tensors(config)
    save_dflash(tmp_path / "d", config, tensors)
    model, report = published.DFlashDraftModel.from_pretrained(
        tmp_path / "d", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(t, tensors[n]) for n, t in model.state_dict().items())


def test_saving_replaces_a_drafter_and_nothing_else(tmp_path, config):
    tensors = drafter_tensors(config)
    save_dflash(tmp_path / "d", config, tensors)
    save_dflash(tmp_path / "d", config, drafter_tensors(config, seed=9))
    assert not torch.equal(load_dflash(tmp_path / "d").tensors["fc.weight"], tensors["fc.weight"])
    (tmp_path / "d" / "notes.txt").write_text("mine")
    before = (tmp_path / "d" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"notes\.txt"):
        save_dflash(tmp_path / "d", config, tensors)
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_an_interrupted_save_leaves_the_old_one(tmp_path, config, monkeypatch):
    tensors = drafter_tensors(config)
    save_dflash(tmp_path / "d", config, tensors)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("blockpilot.drafters.folder._sync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_dflash(tmp_path / "d", config, drafter_tensors(config, seed=9))
    assert torch.equal(load_dflash(tmp_path / "d").tensors["fc.weight"], tensors["fc.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_what_would_not_load_is_not_saved(tmp_path, config):
    tensors = drafter_tensors(config)
    with pytest.raises(CheckpointError, match="found nothing"):
        save_dflash(tmp_path / "d", config, {n: t for n, t in tensors.items() if n != "fc.weight"})
    with pytest.raises(CheckpointError, match="float64"):
        save_dflash(tmp_path / "d", config, {**tensors, "norm.weight": tensors["norm.weight"].double()})
    with pytest.raises(CheckpointError, match="mask_token_id"):
        save_dflash(tmp_path / "d", with_value(config, "dflash.mask_token_id", None), tensors)
    assert not any(tmp_path.iterdir())


def test_the_fingerprint_sees_weights_and_meaning(tmp_path, config):
    def mark(name: str, config: dict[str, Any], seed: int = 1) -> str:
        write_drafter(tmp_path / name, config, drafter_tensors(config, seed))
        return load_dflash(tmp_path / name).fingerprint

    base = mark("base", config)
    assert mark("same", {**config, "transformers_version": "9"}) == base
    changed = [mark("seed", config, 2), mark("scale", {**config, "output_multiplier": 0.5})]
    changed += [
        mark("rope", {**config, "rope_theta": 5e5}),
        mark("mask", with_value(config, "dflash.mask_token_id", 0)),
    ]
    assert len({base, *changed}) == 5
