"""config.json of a drafter: where values may sit, what they default to, and what is refused."""

from __future__ import annotations

import pytest

from blockpilot.drafters.dflash_checkpoint import CheckpointError, load_dflash
from blockpilot.drafters.dflash_config import DFlashConfig, default_layer_ids
from tests.tiny import MASK, drafter_tensors, with_value, write_drafter


def test_values_may_sit_in_either_place(config):
    nested = with_value(with_value(config, "block_size", None), "dflash.block_size", 8)
    top = with_value(with_value(config, "dflash.mask_token_id", None), "mask_token_id", MASK)
    both = with_value(config, "dflash.block_size", 8)
    plain = with_value(
        with_value(top, "target_layer_ids", config["dflash_config"]["target_layer_ids"]),
        "dflash_config",
        None,
    )
    for same in (nested, top, both, plain):
        parsed = DFlashConfig.from_json(same)
        assert (parsed.block_size, parsed.mask_token_id, parsed.target_layer_ids) == (8, MASK, (0, 2))


def test_layer_ids_default_to_an_even_spread(config):
    parsed = DFlashConfig.from_json(
        {**with_value(config, "dflash.target_layer_ids", None), "num_target_layers": 36}
    )
    assert parsed.target_layer_ids == (1, 33)
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(30, 1) == (15,)


def test_layer_ids_default_as_in_the_package():
    published = pytest.importorskip("dflash.model")
    for target in range(4, 70):
        for draft in range(1, 9):
            assert list(default_layer_ids(target, draft)) == published.build_target_layer_ids(target, draft)


BAD_CONFIGS = {
    "conflict": ("dflash.block_size", 4, "block_size is 8 at the top of the config but 4 in dflash_config"),
    "no mask id": ("dflash.mask_token_id", None, "mask_token_id is missing"),
    "mask id beyond the vocabulary": ("dflash.mask_token_id", 32, r"mask_token_id .* in 0..31, got 32"),
    "negative mask id": ("dflash.mask_token_id", -1, r"mask_token_id .* got -1"),
    "no block size": ("block_size", None, "block_size is missing"),
    "block of one": ("block_size", 1, "block_size to be an integer >= 2, got 1"),
    "block size true": ("block_size", True, "block_size to be an integer >= 2, got True"),
    "no target depth": ("num_target_layers", None, "num_target_layers is missing"),
    "layer id beyond the target": ("dflash.target_layer_ids", [0, 4], r"\[4\] lie outside 0..3"),
    "layer ids not a list": (
        "dflash.target_layer_ids",
        3,
        "target_layer_ids to be a list of integers, got 3",
    ),
    "no layer ids": ("dflash.target_layer_ids", [], "target_layer_ids to be a list of integers"),
    "nested not a dictionary": ("dflash_config", [1], "dflash_config to be a dictionary"),
    "another model": (
        "architectures",
        ["Qwen3ForCausalLM"],
        r"expected architectures to be \['DFlashDraftModel'\]",
    ),
    "no architecture": ("architectures", None, "expected architectures"),
    "DFlash 2 by name": ("architectures", ["DFlash2DraftModel"], "DFlash 2 drafters are not supported"),
    "DFlash 2 by convolution": ("conv_kernel_size", 4, "DFlash 2 drafters are not supported"),
    "DFlash 2 by selector": ("dflash.selector_rank", 8, "DFlash 2 drafters are not supported"),
    "unknown layer type": ("layer_types", ["full_attention", "linear_attention"], "layer_types"),
    "too few layer types": ("layer_types", ["full_attention"], "layer_types"),
    "odd heads": ("num_key_value_heads", 3, "cannot share"),
    "activation": ("hidden_act", "gelu", "gelu"),
    "scale is text": ("output_multiplier", "2", "output_multiplier to be a finite number, got '2'"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs_are_refused(tmp_path, config, case):
    name, value, message = BAD_CONFIGS[case]
    write_drafter(tmp_path / "d", with_value(config, name, value), drafter_tensors(config))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_dflash(tmp_path / "d")
    assert str(tmp_path / "d" / "config.json") in str(caught.value)
