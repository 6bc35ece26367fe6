"""The published EAGLE-3 formats on disk: what loads, what is refused and why, and writing them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockpilot.drafters import load_drafter
from blockpilot.drafters.eagle3_checkpoint import load_eagle3, save_eagle3
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.stored import CheckpointError
from blockpilot.targets.torch_target import TorchTarget
from tests.eagle3 import IDS, as_speculators, eagle3_config, eagle3_tensors, save_eagle3_drafter
from tests.tiny import read_drafter, write_drafter

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def published(tmp_path, targets) -> Path:
    return save_eagle3_drafter(tmp_path / "published", targets["llama"])


def test_what_a_drafter_exposes(targets, published):
    target = TorchTarget(load_checkpoint(targets["llama"]), 2, 64)
    drafter = load_drafter(published, target, 2)
    assert (drafter.kind, drafter.block_size, drafter.feature_layers) == ("eagle3", 8, (2, 2, 1))
    assert drafter.window == tuple(range(1, 17))
    assert drafter.fingerprint == load_eagle3(published).fingerprint
    assert load_eagle3(published).vocabulary.tolist() == IDS


@pytest.mark.parametrize(
    ("over", "states"),
    [
        ({"eagle_config": {LAYER_IDS: [0, 2, 3], "use_aux_hidden_state": True}}, (1, 3, 4)),
        ({LAYER_IDS: [0, 2, 3]}, (0, 2, 3)),
        ({LAYER_IDS: [4]}, (4,)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 2, 1)),
        ({LAYER_IDS: None, "eagle_config": None}, (2, 2, 1)),
    ],
)
def test_the_layers_it_names(tmp_path, targets, over, states):
    """SpecForge counts layers whose outputs are read, speculators hidden states."""
    save = {k: v for k, v in over.items() if v is not None}
    folder = save_eagle3_drafter(tmp_path / "d", targets["llama"], **save)
    (folder / "config.json").write_text(json.dumps(eagle3_config(targets["llama"], **over)))
    target = TorchTarget(load_checkpoint(targets["llama"]), 1, 64)
    assert load_drafter(folder, target, 1).feature_layers == states


def test_speculators_format_is_the_same_drafter(tmp_path, published):
    config, tensors = read_drafter(published)
    as_speculators(tmp_path / "s", tensors, config)
    ours, theirs = load_eagle3(published), load_eagle3(tmp_path / "s")
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[n], t) for n, t in theirs.tensors.items())
    assert ours.fingerprint == theirs.fingerprint


def damaged(name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Spoil the tensors in one way; returns what the error must say."""
    at = "midlayer.self_attn.k_proj.weight"
    if name == "missing":
        del tensors[at]
        return rf"tensor {at}: expected \[16, 64\], found nothing"
    if name == "shape":
        tensors[at] = torch.zeros(16, 32)
        return rf"tensor {at}: expected \[16, 64\], found \[16, 32\]"
    if name == "extra":
        tensors["fc.bias"] = torch.zeros(32)
        return r"tensor fc.bias: expected nothing by config.json, found \[32\]"
    if name == "twice":
        tensors["layers.0.hidden_norm.weight"] = torch.zeros(32)
        return r"tensor midlayer.hidden_norm.weight: expected once"
    if name == "feature count":
        tensors["fc.weight"] = torch.zeros(32, 64)
        return r"tensor fc.weight: expected \[32, 96\], found \[32, 64\]"
    if name == "no map":
        del tensors["d2t"]
        return r"tensor d2t: expected \[18\], the ids of a head of 18 of 32 rows, found nothing"
    if name == "map dtype":
        tensors["d2t"] = tensors["d2t"].int()
        return r"tensor d2t: expected I64 \[18\], found I32 \[18\]"
    if name == "map length":
        tensors["t2d"] = tensors["t2d"][:-1].clone()
        return r"tensor t2d: expected BOOL \[32\], found BOOL \[31\]"
    if name == "maps disagree":
        tensors["t2d"] = tensors["t2d"].roll(1)
        return "d2t and t2d: expected the same ids"
    if name == "map beyond":
        tensors["d2t"][-1] += 7
        return "expected ids of 0 to 31, got 38"
    tensors["d2t"][3] = 0
    return "expected sorted ids, none of them twice"


@pytest.mark.parametrize(
    "name",
    [
        "missing", "shape", "extra", "twice", "feature count", "no map", "map dtype", "map length", "maps disagree",
        "map beyond", "map twice",
    ],
)  # fmt: skip
def test_bad_tensors_are_refused(published, name):
    config, tensors = read_drafter(published)
    message = damaged(name, tensors)
    write_drafter(published, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_eagle3(published)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "expected architectures to be one of"),
        ({"num_hidden_layers": 2}, "expected num_hidden_layers to be 1, got 2"),
        ({"fc_norm": True}, "drafters with fc_norm are not supported"),
        ({"norm_output": True}, "drafters with norm_output are not supported"),
        ({"norm_before_residual": 1}, "expected norm_before_residual to be true or false, got 1"),
        ({"draft_vocab_size": 40}, r"expected draft_vocab_size to be an integer in 1\.\.32, got 40"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state to be true"),
        ({"eagle_config": [1]}, "expected eagle_config to be a dictionary"),
        ({LAYER_IDS: [1, -1, 2]}, "a list of integers >= 0"),
        ({LAYER_IDS: [1], "eagle_config": {LAYER_IDS: [0]}}, "which count differently; keep one"),
        ({"block_size": 1}, "expected block_size to be an integer in 2"),
        ({"transformer_layer_config": 3}, "expected transformer_layer_config to be a dictionary"),
    ],
)
def test_bad_configs_are_refused(published, over, message):
    config, tensors = read_drafter(published)
    write_drafter(published, {**config, **over}, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_eagle3(published)


def test_an_unknown_architecture_is_named_with_those_that_are_known(targets, published):
    config, tensors = read_drafter(published)
    write_drafter(published, {**config, "architectures": ["LlamaForCausalLM"]}, tensors)
    target = TorchTarget(load_checkpoint(targets["llama"]), 1, 64)
    with pytest.raises(ValueError, match="DFlashDraftModel', 'LlamaForCausalLMEagle3'"):
        load_drafter(published, target, 1)


def test_pickles_are_never_opened_and_conversion_is_told(published):
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (published / "opened",))

    (published / "model.safetensors").unlink()
    (published / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(
        CheckpointError, match=r"pickle checkpoints are not loaded.*safetensors\.torch\.save_file"
    ):
        load_eagle3(published)
    assert not (published / "opened").exists()


MISMATCHES = {
    "hidden size": ({"hidden_size": 48}, "hidden size 48 against 32 of this llama target with 4 layers"),
    "vocabulary": ({"vocab_size": 40}, "vocabulary size 40 against 32"),
    "layers": ({LAYER_IDS: [2, 9, 30]}, r"hidden states \[9, 30\] against 0\.\.4"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_another_targets_drafter_is_refused_naming_both(tmp_path, targets, case):
    over, message = MISMATCHES[case]
    config = eagle3_config(targets["llama"], **over)
    tensors = eagle3_tensors(config, targets["llama"])
    tensors["lm_head.weight"] = torch.zeros(len(IDS), config["hidden_size"])
    write_drafter(tmp_path, config, tensors)
    target = TorchTarget(load_checkpoint(targets["llama"]), 1, 64)
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(tmp_path, target, 1)
    assert str(tmp_path) in str(caught.value)


def test_a_target_too_shallow_for_the_default_layers_is_refused(tmp_path):
    from tests.tiny import save_target

    shallow = save_target(tmp_path / "target", layers=2)
    folder = save_eagle3_drafter(tmp_path / "d", shallow)
    with pytest.raises(ValueError, match=r"hidden states \[-1\] against 0\.\.2"):
        load_drafter(folder, TorchTarget(load_checkpoint(shallow), 1, 64), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [IDS, None])
def test_a_round_trip_keeps_every_bit(tmp_path, targets, dtype, ids):
    config = eagle3_config(targets["llama"], ids)
    made = eagle3_tensors(config, targets["llama"], ids)
    tensors = {n: t.to(dtype) for n, t in made.items() if n not in ("d2t", "t2d")}
    vocabulary = None if ids is None else torch.tensor(ids)
    save_eagle3(tmp_path / "a", config, tensors, vocabulary)
    first = load_eagle3(tmp_path / "a")
    save_eagle3(tmp_path / "b", first.config.source, first.tensors, first.vocabulary)
    assert read_drafter(tmp_path / "b")[0] == config
    kept = load_file(tmp_path / "b" / "model.safetensors")
    assert kept.keys() == made.keys()
    for name, tensor in kept.items():
        expected = made[name] if name in ("d2t", "t2d") else tensors[name]
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
    assert load_eagle3(tmp_path / "b").fingerprint == first.fingerprint


def test_what_would_not_load_is_not_saved(tmp_path, targets):
    config = eagle3_config(targets["llama"])
    tensors = eagle3_tensors(config, targets["llama"])
    floats = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}
    for given, ids, message in (
        ({n: t for n, t in floats.items() if n != "fc.weight"}, torch.tensor(IDS), "found nothing"),
        ({**floats, "norm.weight": floats["norm.weight"].double()}, torch.tensor(IDS), "float64"),
        (floats, torch.tensor(IDS[::-1]), "expected sorted ids"),
        (floats, torch.tensor(IDS[1:]), r"tensor d2t: expected I64 \[18\], found I64 \[17\]"),
        (floats, None, "tensor d2t: expected"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_eagle3(tmp_path / "d", config, given, ids)
    assert not any(tmp_path.iterdir())


def test_the_fingerprint_sees_weights_meaning_and_ids(tmp_path, targets):
    def mark(name: str, ids=IDS, seed: int = 3, **over: Any) -> str:
        return load_eagle3(
            save_eagle3_drafter(tmp_path / name, targets["llama"], ids, seed=seed, **over)
        ).fingerprint

    base = mark("base")
    assert mark("same", torch_dtype="bfloat16") == base
    others = [mark("seed", seed=4), mark("ids", [1, *IDS[1:]]), mark("rope", rope_theta=1e4)]
    others += [mark("residual", norm_before_residual=True), mark("layers", **{LAYER_IDS: [1, 2, 3]})]
    assert len({base, *others}) == 6
