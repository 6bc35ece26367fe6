"""Policy files: bit-equal round trip, and a named refusal of everything else."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file

from blockpilot.policies import Pair
from blockpilot.policies.policy_file import (
    METADATA_KEY,
    PolicyFile,
    PolicyFileError,
    read_policy,
    save_policy,
)
from blockpilot.policies.predictor import Architecture, Predictor, WidthNetwork

PAIR = Pair("target-fingerprint", "drafter-fingerprint")


def policy(**over) -> PolicyFile:
    network = WidthNetwork(Architecture("compact", "mean_likely_embedding", 24, 16, (2, 3, 5)), seed=4)
    values = {
        "policy": Predictor(network),
        "pair": PAIR,
        "objective": "throughput",
        "cost": {2: 0.01, 3: 0.012, 5: 0.02},
        "report": {"conclusion": "none", "held_out": 3},
        "training": {"seed": 1},
    }
    return PolicyFile(**{**values, **over})


@pytest.fixture
def path(tmp_path):
    save_policy(policy(), tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"


def parts(path):
    """(tensors, metadata JSON) of a policy file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return load(data), json.loads(json.loads(data[8 : 8 + size])["__metadata__"][METADATA_KEY])


def rewrite(path, tensors=None, head=None):
    old_tensors, old_head = parts(path)
    text = json.dumps(old_head if head is None else head)
    save_file(old_tensors if tensors is None else tensors, path, metadata={METADATA_KEY: text})


def test_round_trip_is_bit_equal(path):
    wrote, read = policy(), read_policy(path)
    for name, tensor in wrote.predictor.network.state_dict().items():
        assert torch.equal(tensor, read.predictor.network.state_dict()[name])
    x = torch.randn(9, 24)
    assert torch.equal(wrote.predictor.scores(x), read.predictor.scores(x))
    assert read.predictor.architecture == wrote.predictor.architecture
    assert (read.pair, read.objective, read.cost) == (PAIR, "throughput", wrote.cost)
    assert (read.report, read.training) == (wrote.report, wrote.training)


def test_writing_what_was_read_gives_the_same_bytes(path, tmp_path):
    save_policy(read_policy(path), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path):
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        save_policy(policy(report={"mean": float("nan")}), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def refused(path, *fragments):
    with pytest.raises(PolicyFileError) as error:
        read_policy(path)
    assert isinstance(error.value, ValueError)
    for fragment in (path.name, *fragments):
        assert fragment in str(error.value)


def test_a_missing_tensor_is_named(path):
    tensors, _ = parts(path)
    del tensors["second.bias"]
    rewrite(path, tensors)
    refused(path, "'second.bias'", "expected F32 [16]", "found none")


def test_a_foreign_tensor_is_named(path):
    tensors, _ = parts(path)
    rewrite(path, {**tensors, "third.bias": torch.zeros(2)})
    refused(path, "'third.bias'", "expected no such tensor", "found F32 [2]")


@pytest.mark.parametrize(
    ("tensor", "found"), [(torch.zeros(4, 16), "F32 [4, 16]"), (torch.zeros(3, 16).half(), "F16 [3, 16]")]
)
def test_a_wrong_shape_or_dtype_is_named(path, tensor, found):
    tensors, _ = parts(path)
    rewrite(path, {**tensors, "head.weight": tensor})
    refused(path, "'head.weight'", "expected F32 [3, 16]", f"found {found}")


def test_nan_weights_are_refused(path):
    tensors, _ = parts(path)
    tensors["first.weight"][0, 0] = float("nan")
    rewrite(path, tensors)
    refused(path, "'first.weight'", "expected finite values")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "expected policy format 1, found 2"),
        ({"pair": {"target": "a"}}, "drafter"),
        ({"pair": {"target": "a", "drafter": ""}}, "Pair.drafter: expected a non-empty fingerprint"),
        ({"pair": None}, "'pair'"),
        ({"objective": "speed"}, "objective: expected one of"),
        ({"objective": 3}, "'objective'"),
        ({"cost": None}, "cost: expected a table"),
        ({"cost": {"2": 0.1, "3": 0.1}}, "missing [5]"),
        ({"cost": {"2": 0.1, "3": 0.1, "5": 0}}, "finite positive seconds for width 5"),
        ({"cost": {"two": 0.1}}, "two"),
        ({"report": []}, "'report'"),
        ({"architecture": {"kind": "compact"}}, "expected architecture keys"),
    ],
)
def test_wrong_metadata_is_named(path, change, message):
    _, head = parts(path)
    rewrite(path, head={**head, **change})
    refused(path, message)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("depth", 0),
        ("depth", 5),
        ("depth", 2.5),
        ("depth", True),
        ("kind", "tall"),
        ("window", [5, 3, 2]),
        ("window", "235"),
        ("hidden", -1),
        ("input_size", 1e9),
    ],
)
def test_a_wrong_architecture_is_refused(path, key, value):
    _, head = parts(path)
    rewrite(path, head={**head, "architecture": {**head["architecture"], key: value}})
    refused(path, "expected")


def test_a_huge_declared_network_is_refused_before_memory_is_taken(path):
    _, head = parts(path)
    rewrite(path, head={**head, "architecture": {**head["architecture"], "hidden": 10**9}})
    refused(path, "expected F32 [1000000000]", "found F32 [16]")


def test_safetensors_without_policy_metadata_are_refused(path):
    path.write_bytes(save({"x": torch.zeros(2)}))
    refused(path, "this is not a policy file")


def test_pickles_and_archives_are_never_loaded(path):
    class Bomb:
        def __reduce__(self):
            return (path.with_name("ran").write_text, ("yes",))

    path.write_bytes(pickle.dumps(Bomb()))
    refused(path, "pickle or zip archive")
    torch.save({"x": torch.zeros(2)}, path)
    refused(path, "pickle or zip archive")
    assert not path.with_name("ran").exists()


def test_folders_missing_and_empty_files_are_refused(path):
    refused(path.parent / "none.safetensors", "expected a readable policy file")
    folder = path.parent / "folder"
    folder.mkdir()
    refused(folder, "expected a readable policy file")
    path.write_bytes(b"")
    refused(path, "found a file of 0 bytes")
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    refused(path, "expected a policy written by `blockpilot train-policy`")


def test_a_truncated_file_is_refused_with_both_sizes(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1024])
    refused(path, f"expected {len(data)} bytes", f"found {len(data) - 1024}")
    path.write_bytes(data + b"\0")
    refused(path, f"found {len(data) + 1}")


@pytest.mark.parametrize("length", range(0, 256, 8))
def test_any_header_length_is_read(path, length):
    save_policy(policy(report={"note": "x" * length}), path)
    assert read_policy(path).report == {"note": "x" * length}


@given(
    cut=st.floats(0, 1, exclude_max=True),
    flips=st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 255)), max_size=3),
)
@settings(max_examples=80, deadline=None)
def test_damage_ends_in_a_policy_file_error_or_in_a_sound_policy(tmp_path_factory, cut, flips):
    path = tmp_path_factory.mktemp("fuzz") / "policy.safetensors"
    save_policy(policy(), path)
    data = bytearray(path.read_bytes())
    for at, mask in flips:
        data[at] ^= mask
    cut_data = data if flips else data[: int(cut * len(data))]
    path.write_bytes(cut_data)
    try:
        read = read_policy(path)
    except PolicyFileError:
        return
    assert flips and read.predictor.scores(torch.zeros(2, 24)).shape == (2, len(read.predictor.window))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_depth_comes_back_and_decides_alike(path, depth):
    made = Architecture("compact", "mean_likely_embedding", 24, 16, (2, 3, 5), depth=depth)
    wrote = Predictor(WidthNetwork(made, seed=1))
    save_policy(policy(policy=wrote), path)
    read, x = read_policy(path).predictor, torch.randn(9, 24)
    assert read.architecture == made and len(parts(path)[0]) == 2 * depth + 2
    assert torch.equal(read.scores(x), wrote.scores(x))
    assert torch.allclose(read.scores(x), wrote.network(x), atol=1e-5)


def test_files_without_a_depth_have_two_layers(path):
    _, head = parts(path)
    del head["architecture"]["depth"]
    rewrite(path, head=head)
    assert read_policy(path).predictor.architecture.depth == 2


def test_a_policy_file_must_be_consistent():
    with pytest.raises(ValueError, match="cost: expected a table"):
        policy(cost=None)
    with pytest.raises(ValueError, match=r"missing \[5\]"):
        policy(cost={2: 1.0, 3: 1.0})
    assert policy(objective="acceptance", cost=None).cost is None


def test_others_may_read_what_an_ordinary_file_lets_them_read(path):
    plain = path.with_name("plain")
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
