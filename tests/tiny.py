"""Tiny random targets and DFlash drafters, saved to disk in exactly the published formats.

A random pair almost never agrees, so nothing beyond "everything rejected" would be tested. With `favourites`,
one hidden dimension is a large constant for every token and the LM head turns it into a preference for a few
ids. The drafter goes through the same embedding and head, so both models share the preference and agree on
many tokens, but not on all: over a few dozen steps every accepted count occurs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MASK = 1
EOS = 2
INIT_STD = 0.8


def save_target(
    folder: Path,
    family: str = "llama",
    *,
    vocab: int = 32,
    hidden: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
    favourites: int = 2,
    **config: Any,
) -> Path:
    """A causal LM of `family` ("llama" or "qwen3"), fp32, written by transformers' own save_pretrained.

    `favourites`: ids that target and drafter both prefer (3, 4, …); 0 for an entirely random, tied model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
    }
    ids = {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": None}
    made = AutoConfig.for_model(
        family,
        **{**sizes, **ids, "initializer_range": INIT_STD, "tie_word_embeddings": not favourites, **config},
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(made).float().eval()
    if favourites:
        _prefer(model.get_input_embeddings().weight, model.get_output_embeddings().weight, favourites)
    model.save_pretrained(folder)
    return folder


def _prefer(embedding: Tensor, head: Tensor, favourites: int) -> None:
    """Dimension 0 says "a favourite" louder than anything else; the others say which one."""
    with torch.no_grad():
        embedding *= 2 / INIT_STD
        head /= INIT_STD
        embedding[MASK] = 0
        embedding[:, 0] = 4.0
        head[:, 0] = -20.0
        head[3 : 3 + favourites, 0] = 20.0


def drafter_config(target: Path, *, layers: int = 2, block_size: int = 8, **over: Any) -> dict[str, Any]:
    """config.json of a drafter for `target`, as z-lab publishes it; `over` replaces or adds top keys."""
    t = json.loads((target / "config.json").read_text())
    # Not the last layer: transformers hands out its state after the final norm, this library before it.
    ids = over.pop("target_layer_ids", sorted({0, t["num_hidden_layers"] // 2, t["num_hidden_layers"] - 2}))
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": ids},
        "head_dim": t["head_dim"],
        "hidden_act": "silu",
        "hidden_size": t["hidden_size"],
        "intermediate_size": t["intermediate_size"],
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": t["max_position_embeddings"],
        "max_window_layers": layers,
        "num_attention_heads": t["num_attention_heads"],
        "num_hidden_layers": layers,
        "num_key_value_heads": t["num_key_value_heads"],
        "num_target_layers": t["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": t["vocab_size"],
    }
    return {**config, **over}


def with_value(config: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The config with a value at the top, or under dflash_config for "dflash.NAME"; None removes it."""
    top, nested = dict(config), dict(config["dflash_config"])
    place, key = (nested, name.removeprefix("dflash.")) if name.startswith("dflash.") else (top, name)
    place.pop(key, None)
    if value is not None:
        place[key] = value
    return {**top, "dflash_config": nested} if name != "dflash_config" else top


def drafter_tensors(config: dict[str, Any], seed: int = 3, std: float = 0.25) -> dict[str, Tensor]:
    """Random fp32 tensors of that drafter."""
    gen = torch.Generator().manual_seed(seed)
    h, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(config["dflash_config"]["target_layer_ids"]) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        for name, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q))):
            shapes[f"{at}self_attn.{name}_proj.weight"] = shape
            if config["attention_bias"]:
                shapes[f"{at}self_attn.{name}_proj.bias"] = shape[:1]
        for name, shape in (("gate", (inter, h)), ("up", (inter, h)), ("down", (h, inter))):
            shapes[f"{at}mlp.{name}_proj.weight"] = shape
        shapes |= {f"{at}self_attn.{n}_norm.weight": (dim,) for n in "qk"}
        shapes |= {f"{at}{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
    tensors = {name: torch.randn(shape, generator=gen) * std for name, shape in shapes.items()}
    return {name: t * _gain(name) + name.endswith("norm.weight") for name, t in tensors.items()}


def _gain(name: str) -> float:
    """Sharp attention and a small MLP, so that guesses depend on the context more than on the mask."""
    return 12.0 if name.endswith("q_norm.weight") else 0.5 if "down_proj" in name else 1.0


def save_drafter(folder: Path, target: Path, *, seed: int = 3, **over: Any) -> Path:
    """A DFlash drafter folder for `target`; `over` as for `drafter_config`."""
    config = drafter_config(target, **over)
    write_drafter(folder, config, drafter_tensors(config, seed))
    return folder


def write_drafter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """config.json and model.safetensors, whatever they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_drafter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_drafter` wrote."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
