"""Packed weights kept between starts: the same bytes, the right file, and no harm from a wrong one."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockpilot.targets import packed_cache
from blockpilot.targets.packed_cache import Packed, PackedKey, cache_folder, cached, contents
from blockpilot_kernels.packed_decoder import LAYOUT

KEY = PackedKey("target", ("fingerprint", "stored", "torch.float32"), "[[1, 2]]")
PACKED = Packed(torch.arange(256, dtype=torch.uint8).repeat(3), {"plan": [1, -2, 1 << 40], "records": []})


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(packed_cache.ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"


def never() -> Packed:
    raise AssertionError("packed although the cache has it")


def again() -> Packed:
    return Packed(PACKED.blob + 1, PACKED.words)


def same(a: Packed, b: Packed) -> bool:
    return torch.equal(a.blob, b.blob) and a.words == b.words


def test_what_is_kept_comes_back_aligned_and_private(folder):
    assert same(cached(KEY, lambda: PACKED), PACKED)
    found = cached(KEY, never)
    assert same(found, PACKED) and found.blob.data_ptr() % 64 == 0
    found.blob.zero_()  # neither the file nor another reader sees it
    assert same(cached(KEY, never), PACKED)
    assert [p.name for p in folder.iterdir()] == [KEY.file]


@pytest.mark.parametrize("key", [KEY, None])
def test_packing_stays_on_one_thread(folder, key):
    before, seen = torch.get_num_threads(), []

    def pack() -> Packed:
        seen.append(torch.get_num_threads())
        return PACKED

    torch.set_num_threads(3)
    try:
        assert same(cached(key, pack), PACKED)
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_models_that_are_packed_at_once_leave_every_thread_its_count():
    """The second begins while the first packs, in a thread that has not used torch, and ends last."""
    usual, begun, ended, seen = torch.get_num_threads(), threading.Event(), threading.Event(), []

    def load(first: bool) -> None:
        if not first:
            begun.wait(10)
        cached(None, lambda: _packing(first))
        seen.append(torch.get_num_threads())

    def _packing(first: bool) -> Packed:
        if first:
            begun.set()
            ended.wait(10)
        else:
            ended.set()
            threads[0].join(10)
        return PACKED

    torch.set_num_threads(3)
    try:
        threads = [threading.Thread(target=load, args=(first,)) for first in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        fresh = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        fresh.start()
        fresh.join(10)
        assert seen == [3, 3, 3]
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, kind="drafter"),
        replace(KEY, model=("another", *KEY.model[1:])),
        replace(KEY, model=(*KEY.model[:1], "dense", KEY.model[2])),
    ],
)
def test_another_model_or_format_is_another_file(folder, other, caplog):
    cached(KEY, lambda: PACKED)
    assert same(cached(other, again), again())
    assert same(cached(KEY, never), PACKED)
    assert len(contents(folder)) == 2 and not caplog.text


def test_changed_source_files_replace_the_entry(folder, caplog):
    cached(KEY, lambda: PACKED)
    changed = replace(KEY, source="[[1, 3]]")
    assert same(cached(changed, again), again())
    assert "other size or time" in one_line(caplog)
    assert same(cached(changed, never), again())
    assert len(contents(folder)) == 1


def test_safetensors_reads_the_file(folder):
    from safetensors.torch import load_file

    cached(KEY, lambda: PACKED)
    assert torch.equal(load_file(folder / KEY.file)["blob"], PACKED.blob)


def flip(position: int):
    def change(data: bytes) -> bytes:
        at = position % len(data)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return change


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-64],
    "cut inside the header": lambda data: data[:100],
    "longer": lambda data: data + bytes(64),
    "a bit of the weights": flip(-100),
    "a bit of the header": flip(30),
    "zeros": lambda data: bytes(len(data)),
    "another program's": lambda data: (24).to_bytes(8, "little") + b'{"__metadata__": {}}    ',
    "a list": lambda data: (8).to_bytes(8, "little") + b"[1, 2]  ",
    "other words": lambda data: data.replace(b"[1, -2, ", b"[1, -3, "),
    "another model's": lambda data: data,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_wrong_file_is_packed_anew_with_one_line(folder, how, caplog):
    cached(KEY, lambda: PACKED)
    key = replace(KEY, model=("other",)) if how == "another model's" else KEY
    (folder / key.file).write_bytes(DAMAGE[how]((folder / KEY.file).read_bytes()))
    assert same(cached(key, again), again())
    assert str(folder / key.file) in one_line(caplog)
    assert same(cached(key, never), again())


def test_an_unusable_folder_costs_one_line(folder, caplog):
    folder.write_text("a file")
    assert same(cached(KEY, lambda: PACKED), PACKED)
    assert "BLOCKPILOT_CACHE=off" in one_line(caplog) and folder.read_text() == "a file"


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_costs_one_line(folder, error, caplog, monkeypatch):
    def refuse(path):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(packed_cache, "replacing", refuse)
    assert same(cached(KEY, lambda: PACKED), PACKED)
    assert os.strerror(error) in one_line(caplog)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_not_filled_further(folder, caplog, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9999, 9000, 999))
    assert same(cached(KEY, lambda: PACKED), PACKED)
    assert "999" in one_line(caplog) and list(folder.iterdir()) == []


def test_a_file_that_cannot_be_read_costs_one_line(folder, caplog):
    (folder / KEY.file).mkdir(parents=True)
    assert same(cached(KEY, lambda: PACKED), PACKED)
    assert "cannot be read" in one_line(caplog)


def one_line(caplog) -> str:
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    return record.getMessage()


def test_a_replaced_or_deleted_file_stays_whole_for_those_who_mapped_it(folder):
    cached(KEY, lambda: PACKED)
    mapped = cached(KEY, never)
    cached(replace(KEY, source="new"), again)
    assert same(mapped, PACKED)
    (folder / KEY.file).unlink()
    assert same(mapped, PACKED)


def contend(seed: int, barrier) -> None:
    """Readers and writers of one entry, whose source changes all the time."""
    blobs = [Packed(torch.full((1 << 16,), i, dtype=torch.uint8), {"plan": [i]}) for i in range(3)]
    barrier.wait()
    for round in range(40):
        i = (seed + round // 4) % 3
        found = cached(replace(KEY, source=str(i)), lambda i=i: blobs[i])
        assert same(found, blobs[i])


def test_processes_at_once_read_whole_files(folder):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    running = [context.Process(target=contend, args=(seed, barrier)) for seed in range(4)]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0, 0, 0, 0]
    assert [p.name for p in folder.iterdir()] == [KEY.file]


def test_older_layouts_and_what_dead_writers_left_are_deleted(folder):
    folder.mkdir()
    stem = KEY.file.partition(".")[0]
    other = replace(KEY, model=("other",)).file.partition(".")[0]
    old, newer, foreign = f"{stem}.v0.packed", f"{stem}.v{LAYOUT + 1}.packed", f"{other}.v0.packed"
    dead, alive = f".{KEY.file}.0a1b2c3d.tmp", f".{KEY.file}.4e5f6a7b.tmp"
    kept = ["mine.packed", "model.safetensors", f"{stem}.v0.packed.bak", newer, foreign, alive]
    for name in (old, dead, *kept):
        (folder / name).write_bytes(b"x")
    for name in (dead, "mine.packed"):
        os.utime(folder / name, (time.time() - 7200,) * 2)
    cached(KEY, lambda: PACKED)
    assert sorted(p.name for p in folder.iterdir()) == sorted([KEY.file, *kept])


def test_the_least_recently_used_go_when_the_limit_is_reached(folder, monkeypatch):
    keys = [replace(KEY, model=(str(i),)) for i in range(3)]
    for age, key in zip((300, 200), keys, strict=False):
        cached(key, lambda: PACKED)
        os.utime(folder / key.file, (time.time() - age,) * 2)
    size = contents(folder)[0].st_size
    cached(keys[0], never)  # now the second is the oldest
    monkeypatch.setattr(packed_cache, "LIMIT", 2 * size)
    cached(keys[2], lambda: PACKED)
    assert {p.name for p in folder.iterdir()} == {keys[0].file, keys[2].file}


def test_weights_beyond_the_limit_are_not_kept(folder, caplog, monkeypatch):
    monkeypatch.setattr(packed_cache, "LIMIT", 700)
    assert same(cached(KEY, lambda: PACKED), PACKED)
    assert "whole cache" in one_line(caplog) and not folder.exists()


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv(packed_cache.ENVIRONMENT)
    assert cache_folder() == tmp_path / ".cache/blockpilot"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/blockpilot")
    monkeypatch.setenv(packed_cache.ENVIRONMENT, "~/here")
    assert cache_folder() == tmp_path / "here"
    monkeypatch.setenv(packed_cache.ENVIRONMENT, "off")
    assert cache_folder() is None and same(cached(KEY, lambda: PACKED), PACKED)
    for wrong in ("0", "OFF", "here"):
        monkeypatch.setenv(packed_cache.ENVIRONMENT, wrong)
        with pytest.raises(ValueError, match=f"absolute path of a folder, got '{wrong}'"):
            cached(KEY, never)
