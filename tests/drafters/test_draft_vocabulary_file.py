"""The ids' file beside a drafter: what is read, what is refused, and that the published format stays as it is."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockpilot.drafters.dflash_checkpoint import (
    CheckpointError,
    load_dflash,
    save_dflash,
    write_draft_vocabulary,
)
from blockpilot.drafters.draft_vocabulary import DRAFT_VOCABULARY, most_frequent
from tests.tiny import drafter_tensors, write_drafter

IDS = torch.tensor([0, 3, 30, 31])


@pytest.fixture
def folder(tmp_path, config):
    write_drafter(tmp_path / "d", config, drafter_tensors(config))
    return tmp_path / "d"


def test_ids_are_read_as_written(folder):
    assert load_dflash(folder).vocabulary is None
    for ids in (IDS, IDS.tolist(), range(32), [31]):
        write_draft_vocabulary(folder, ids)
        found = load_dflash(folder).vocabulary
        assert found.dtype == torch.int64 and found.tolist() == list(ids)
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", DRAFT_VOCABULARY}
    assert load_file(folder / DRAFT_VOCABULARY)["ids"].tolist() == [31]


BAD = {
    "twice": ({"ids": [3, 3]}, "expected sorted ids, none of them twice"),
    "falling": ({"ids": [5, 3]}, "expected sorted ids, none of them twice"),
    "below": ({"ids": [-1, 3]}, "expected ids of 0 to 31, got -1"),
    "above": ({"ids": [3, 32]}, "expected ids of 0 to 31, got 32"),
    "none": ({"ids": torch.zeros(0, dtype=torch.long)}, "expected 1 to 32 ids, got 0"),
    "int32": (
        {"ids": torch.tensor([3], dtype=torch.int32)},
        r"expected I64 of one dimension, found I32 \[1\]",
    ),
    "a table": ({"ids": [[3]]}, r"expected I64 of one dimension, found I64 \[1, 1\]"),
    "another name": ({"d2t": [3]}, r"expected one tensor, ids, found \['d2t'\]"),
    "one too many": ({"ids": [3], "t2d": [3]}, r"expected one tensor, ids, found \['ids', 't2d'\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_other_files_are_refused(folder, case):
    tensors, message = BAD[case]
    path = folder / DRAFT_VOCABULARY
    save_file({n: torch.as_tensor(t) for n, t in tensors.items()}, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_dflash(folder)
    assert str(path) in str(caught.value)


def test_a_damaged_file_is_refused(folder):
    write_draft_vocabulary(folder, IDS)
    path = folder / DRAFT_VOCABULARY
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_dflash(folder)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=DRAFT_VOCABULARY):
        load_dflash(folder)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4, 3], "torch.unique"),
        ([32], "take those of the drafter's own target"),
        ([], "expected torch.int64 of one dimension, got torch.float32"),
        (torch.tensor([1.0]), "expected torch.int64 of one dimension, got torch.float32"),
        (torch.tensor([[1]]), r"got torch.int64 \[1, 1\]"),
    ],
)
def test_what_would_not_load_is_not_written(folder, config, ids, message):
    write_draft_vocabulary(folder, IDS)
    with pytest.raises(CheckpointError, match=message):
        write_draft_vocabulary(folder, ids)
    with pytest.raises(CheckpointError, match=message):
        save_dflash(folder, config, drafter_tensors(config), ids)
    assert torch.equal(load_dflash(folder).vocabulary, IDS)
    assert [p.name for p in folder.parent.iterdir()] == ["d"] and len(list(folder.iterdir())) == 3


def test_a_folder_without_a_drafter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected config\.json"):
        write_draft_vocabulary(tmp_path, IDS)


def test_a_drafter_is_saved_with_its_ids_and_replaced_with_them(tmp_path, config):
    tensors = drafter_tensors(config)
    save_dflash(tmp_path / "d", config, tensors, IDS)
    assert torch.equal(load_dflash(tmp_path / "d").vocabulary, IDS)
    save_dflash(tmp_path / "d", config, tensors, IDS[1:])
    assert torch.equal(load_dflash(tmp_path / "d").vocabulary, IDS[1:])
    save_dflash(tmp_path / "d", config, tensors)
    assert load_dflash(tmp_path / "d").vocabulary is None


def test_the_fingerprint_sees_the_ids(folder):
    marks = [load_dflash(folder).fingerprint]
    for ids in (range(32), IDS, IDS[1:]):
        write_draft_vocabulary(folder, ids)
        marks.append(load_dflash(folder).fingerprint)
    assert len(set(marks)) == 4


def test_the_package_loads_the_rest(tmp_path, config):
    published = pytest.importorskip("dflash.model")
    tensors = drafter_tensors(config)
    save_dflash(tmp_path / "d", config, tensors, IDS)
    model, report = published.DFlashDraftModel.from_pretrained(
        tmp_path / "d", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(t, tensors[n]) for n, t in model.state_dict().items())


def test_the_most_frequent_ids():
    counts = torch.tensor([0.0, 2, 5, 0, 2, 9, 0, 2])
    assert most_frequent(counts, 3, ()).tolist() == [1, 2, 5]  # 1, 4 and 7 are equals
    assert most_frequent(counts, 4, (6, 99)).tolist() == [1, 2, 5, 6]
    assert most_frequent(counts, 7, ()).tolist() == [0, 1, 2, 3, 4, 5, 7]  # filled up with the lowest
    assert most_frequent(counts, 1, (6, 0, 6)).tolist() == [0, 6]
    assert most_frequent(torch.zeros(5000), 2000, ()).tolist() == list(range(2000))
