"""Safetensors folders written by transformers, and damaged in every way a download or a merge can."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from blockpilot.errors import BlockPilotError
from blockpilot.targets.checkpoint import Checkpoint, expected_tensors, load_checkpoint
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.stored import INDEX, WEIGHTS, CheckpointError, fingerprint

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
NORM = "model.layers.1.input_layernorm.weight"


def save(folder: Path, family: str = "llama", shard: str = "1GB", dtype: Any = None, **over: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **over}))
    for tensor in model.parameters():  # norms and biases are constant at first
        torch.nn.init.normal_(tensor)
    model.to(dtype or torch.float32).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tmp_path_factory.mktemp("sharded"), shard="4KB")
    assert (folder / INDEX).is_file() and len(list(folder.glob("*.safetensors"))) >= 3
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def rewrite(path: Path, change: Any) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, **over: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **over}))


@pytest.mark.parametrize(
    ("family", "over"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"head_dim": 4}),
        ("qwen2", {"head_dim": 4, "tie_word_embeddings": True, "shard": "4KB"}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"dtype": torch.bfloat16}),
    ],
)
def test_tensors_equal_transformers(family: str, over: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = load_checkpoint(save(tmp_path, family, **over))
    state = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    if over.get("tie_word_embeddings"):
        state.pop("lm_head.weight")
    assert checkpoint.tensors.keys() == state.keys()
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name
    assert checkpoint.kind == "safetensors" and checkpoint.path == checkpoint.tokenizer_source == tmp_path
    assert checkpoint.config.eos_token_ids == (2,)


def test_expected_tensors_are_what_is_loaded(pristine: Path) -> None:
    checkpoint = load_checkpoint(str(pristine))
    assert {n: tuple(t.shape) for n, t in checkpoint.tensors.items()} == dict(
        expected_tensors(checkpoint.config)
    )


def test_generation_config_adds_stop_ids(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[2, 5])
    assert load_checkpoint(folder).config.eos_token_ids == (2, 5)


def test_the_index_decides_where_a_tensor_comes_from(shards: Path) -> None:
    """A stray file, and the wrong shard, hold tensors of the same names."""
    right = dict(load_checkpoint(shards).tensors)
    wrong = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
    save_file(wrong, shards / WEIGHTS)
    save_file(wrong, shards / "model-extra.safetensors")
    placed = json.loads((shards / INDEX).read_text())["weight_map"]
    other = next(name for name in set(placed.values()) if name != placed[NORM])
    rewrite(shards / other, lambda tensors: tensors.update({NORM: torch.zeros(16)}))
    again = load_checkpoint(shards)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in right.items())


def test_missing_shard(shards: Path) -> None:
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"missing shards \['{gone.name}'\].*download"):
        load_checkpoint(shards)


def test_tensor_absent_from_its_shard(shards: Path) -> None:
    file = shards / json.loads((shards / INDEX).read_text())["weight_map"][NORM]
    rewrite(file, lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError, match=f"{file.name}: tensor {NORM}: expected in this shard"):
        load_checkpoint(shards)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 3])
def test_index_cannot_leave_the_folder(shards: Path, name: Any) -> None:
    edit_json(shards / INDEX, weight_map={NORM: name})
    with pytest.raises(CheckpointError, match="a file in this folder"):
        load_checkpoint(shards)


@pytest.mark.parametrize("cut", [1, 1024, 4000])
def test_truncated_file(folder: Path, cut: int) -> None:
    file = folder / WEIGHTS
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(
        CheckpointError, match=f"{WEIGHTS}: truncated .* says {size} bytes, found {size - cut}"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize("text", [b"[]", b'{"a":1}', b'{"a":{"dtype":"F32"', b"[" * 100_000, b"\xff\xfe"])
@pytest.mark.parametrize("length", [None, 0, 2**63, 10**9])
def test_damaged_header(folder: Path, text: bytes, length: int | None) -> None:
    data = (len(text) if length is None else length).to_bytes(8, "little") + text
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(CheckpointError, match=WEIGHTS):
        load_checkpoint(folder)


@pytest.mark.parametrize("data", [b"", b"\x04"])
def test_nearly_empty_file(folder: Path, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(CheckpointError, match=WEIGHTS):
        load_checkpoint(folder)


@pytest.mark.parametrize("offsets", [[0, 8], [-64, 0], [0], "ab"])
def test_header_offsets_must_fit_the_shape(folder: Path, offsets: Any) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": offsets}}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: tensor a: "):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"tensor {NORM}: expected \\[16\\], found nothing"),
        (lambda t: t.update({NORM: torch.zeros(17)}), f"tensor {NORM}: expected \\[16\\], found \\[17\\]"),
        (
            lambda t: t.update({NORM: torch.zeros(16, dtype=torch.int8)}),
            f"tensor {NORM}: expected F32, BF16, F16, found I8",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(41, 16)}),
            r"tensor model.embed_tokens.weight: expected \[40, 16\], found \[41, 16\]",
        ),
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight: expected"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(24, 16)}),
            r"found also \['model.layers.2.mlp.up_proj.weight'\] .*config and weights disagree",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            r"found also \['model.layers.0.self_attn.q_proj.bias'\]",
        ),
    ],
)
def test_wrong_tensors(folder: Path, change: Any, message: str) -> None:
    rewrite(folder / WEIGHTS, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_harmless_leftovers_are_ignored(folder: Path) -> None:
    before = load_checkpoint(folder)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "score.weight": torch.zeros(2)}
    rewrite(folder / WEIGHTS, lambda tensors: tensors.update(extra))
    after = load_checkpoint(folder)
    assert after.tensors.keys() == before.tensors.keys() and after.fingerprint == before.fingerprint


def test_a_tied_head_may_be_stored_but_not_differ(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight: expected the embedding .* found other values"
    ):
        load_checkpoint(folder)

    def same(tensors) -> None:
        tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})

    rewrite(folder / WEIGHTS, same)
    assert "lm_head.weight" not in load_checkpoint(folder).tensors


class _Exploit:
    def __reduce__(self) -> Any:
        return (sys.exit, ("opened a pickle",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(folder: Path, name: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(_Exploit()))
    with pytest.raises(CheckpointError, match=rf"pickle checkpoints are not loaded.*{WEIGHTS}.*{name}"):
        load_checkpoint(folder)


def test_folders_without_a_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"expected config.json, found an empty folder"):
        load_checkpoint(tmp_path / "empty")
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"expected {WEIGHTS} or {INDEX}, found .*adapter_model"):
        load_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\ud83d"])
def test_damaged_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config.json: expected a JSON object"):
        load_checkpoint(folder)


def test_config_errors_name_the_file(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="gpt2")
    with pytest.raises(CheckpointError, match=r"config.json: unsupported model_type 'gpt2'") as caught:
        load_checkpoint(folder)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, BlockPilotError)


def test_fingerprint_depends_on_weights_config_and_names(pristine: Path) -> None:
    checkpoint: Checkpoint = load_checkpoint(pristine)
    config, tensors = checkpoint.config, checkpoint.tensors
    assert checkpoint.fingerprint == fingerprint(config, dict(reversed(list(tensors.items()))))
    seen = {checkpoint.fingerprint}
    for name in ("model.embed_tokens.weight", NORM):
        for at in (0, -1):  # the first and the last value are always in the sample
            changed = tensors[name].clone()
            changed.flatten()[at] += 1
            seen.add(fingerprint(config, {**tensors, name: changed}))
    seen.add(fingerprint(config, {name: tensor.bfloat16() for name, tensor in tensors.items()}))
    seen.add(fingerprint(config, {**tensors, NORM: tensors[NORM].reshape(4, 4)}))
    seen.add(fingerprint(ModelConfig(**{**vars(config), "rms_norm_eps": 1e-3}), tensors))
    assert len(seen) == 8
