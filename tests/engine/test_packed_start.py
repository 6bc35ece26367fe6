"""Starts from cached packed weights: the same decoder, from whatever checkpoint, in whatever process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot import LLM, SamplingParams
from blockpilot.drafters.dflash_checkpoint import load_dflash
from blockpilot.drafters.dflash_cpp import CppDFlashDrafter
from blockpilot.targets import packed_cache
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.cpp_target import CppTarget
from blockpilot_kernels import dispatch
from blockpilot_kernels.packed_decoder import LAYOUT
from tests.engine.pair import tiny_folder
from tests.implementations import require
from tests.targets.gguf_files import SIZES, hf_weights, write_gguf
from tests.tiny import drafter_config, drafter_tensors, save_drafter, write_drafter

# The layout and the SHA-256 of everything `packed_everything` packs. Where the second changes, raise LAYOUT too: caches
# hold bytes of the old layout.
PINNED = (2, "be2db9ce1a120f30dec291c68175b8e9368a064fc451e9c7b2cb7281f8824f8e")
PROMPT, PARAMS = [5, 6, 7, 8], SamplingParams(max_new_tokens=24, ignore_eos=True)
START = """
import sys
from blockpilot import LLM, SamplingParams
llm = LLM(sys.argv[1], drafter=sys.argv[2], max_requests=1, max_length=64)
print(llm.generate([[5, 6, 7, 8]], SamplingParams(max_new_tokens=24, ignore_eos=True))[0].token_ids)
"""


@pytest.fixture(autouse=True)
def extension() -> None:
    require("cpp")
    if dispatch.backend_of("cpu") != "cpp":
        pytest.skip("only the C++ decoder packs weights")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(packed_cache.ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """A target of its own: some tests change its weights, and the folder that `tiny_folder` keeps is everybody's."""
    target = Path(shutil.copytree(tiny_folder(), tmp_path / "target"))
    return target, save_drafter(tmp_path / "drafter", target)


def start(pair: tuple[Path, Path], **options) -> LLM:
    return LLM(pair[0], drafter=pair[1], max_requests=1, max_length=64, **options)


def answer(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], PARAMS)[0].token_ids


def blobs(llm: LLM) -> tuple[Tensor, Tensor]:
    return llm.drafter._weights[0], llm.target.blob


@pytest.fixture
def packing(monkeypatch) -> list[str]:
    """What was packed so far."""
    done: list[str] = []
    for kind, name in ((CppTarget, "target"), (CppDFlashDrafter, "drafter")):

        def pack(self, *arguments, real=kind._pack, name=name):
            done.append(name)
            return real(self, *arguments)

        monkeypatch.setattr(kind, "_pack", pack)
    return done


def test_a_second_start_packs_nothing_and_decodes_the_same(folder, pair, packing, caplog):
    first, second = start(pair), start(pair)
    assert packing == ["target", "drafter"]
    for name in ("_plan", "blob"):
        assert torch.equal(getattr(first.target, name), getattr(second.target, name))
    for name in ("matrices", "embedding_record", "head_record", "formats", "geometry"):
        assert getattr(first.target, name) == getattr(second.target, name)
    assert all(map(torch.equal, blobs(first), blobs(second)))
    assert answer(first) == answer(second) == answer(start(pair))
    start(pair, dtype="bfloat16")
    assert packing == ["target", "drafter"] * 2 and len(list(folder.iterdir())) == 4
    assert not caplog.text


def test_copies_of_a_model_do_not_take_turns(folder, pair, packing, tmp_path, caplog):
    copy = (Path(shutil.copytree(pair[0], tmp_path / "copy")), pair[1])
    for asked in (pair, copy, pair, copy):
        start(asked)
    assert packing == ["target", "drafter"] * 2 and len(list(folder.iterdir())) == 4
    assert not caplog.text


def test_without_a_cache_every_start_packs(folder, pair, packing, monkeypatch):
    monkeypatch.setenv(packed_cache.ENVIRONMENT, "off")
    start(pair), start(pair)
    assert packing == ["target", "drafter"] * 2 and not folder.exists()


def test_a_changed_weight_is_seen_wherever_it_lies(folder, pair, packing):
    """The fingerprint looks at samples of a tensor only."""
    before = blobs(start(pair))
    for path in (pair[0] / "model.safetensors", pair[1] / "model.safetensors"):
        tensors = load_file(path)
        name = next(n for n in tensors if n.endswith("down_proj.weight"))
        assert tensors[name].nbytes > 16 * 32
        tensors[name].view(-1)[33] += 1.0
        save_file(tensors, path)
    after = blobs(start(pair))
    assert packing == ["target", "drafter"] * 2
    assert not any(map(torch.equal, before, after))
    assert len(list(folder.iterdir())) == 2


def test_a_checkpoint_of_the_caller_is_never_cached(folder, pair):
    loaded = load_checkpoint(pair[0])
    changed = {n: t * (0.5 if "down" in n else 1) for n, t in loaded.tensors.items()}
    mine = replace(loaded, tensors=changed)
    start(pair)
    assert not torch.equal(start((mine, pair[1])).target.blob, start((loaded, pair[1])).target.blob)
    assert len(list(folder.iterdir())) == 2


def test_processes_that_start_at_once(folder, pair):
    environment = {**os.environ, packed_cache.ENVIRONMENT: str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START, *map(str, pair)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=environment, **pipes) for _ in range(3)]
    said = [process.communicate(timeout=300) for process in running]
    assert said == [(f"{answer(start(pair))}\n", "")] * 3
    assert len(list(folder.iterdir())) == 2


def even(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same shapes with values that are the same wherever and whenever they are made."""
    made = {}
    for salt, (name, tensor) in enumerate(sorted(tensors.items())):
        codes = (torch.arange(tensor.numel()) * 37 + 11 * salt) % 251 - 125
        made[name] = (codes / 64).view(tensor.shape)
    return made


def packed_everything(folder: Path) -> str:
    """SHA-256 of a tiny target and drafter, packed in every format and dtype."""
    digest = hashlib.sha256()

    def add(kind: type, *arguments) -> None:
        def take(packed):
            digest.update(json.dumps(packed.words, sort_keys=True).encode())
            digest.update(packed.blob.numpy().tobytes())
            return packed

        with pytest.MonkeyPatch.context() as patch:
            module = sys.modules[kind.__module__]
            patch.setattr(module, "cached", lambda key, pack: take(pack()))
            made.append(kind(*arguments))

    made: list = []
    (folder / "config.json").write_text(json.dumps(SIZES))
    config = drafter_config(folder)
    write_drafter(folder / "drafter", config, even(drafter_tensors(config)))
    drafter = load_dflash(folder / "drafter")
    listed = replace(drafter, vocabulary=torch.arange(1, 48, 5))
    weights = even(hf_weights("qwen2"))
    for kind in ("Q8_0", "Q4_0", "Q4_1"):
        path = write_gguf(folder / f"{kind}.gguf", weights, "qwen2", Type[kind])
        for mode, dtype in (
            ("stored-int16", torch.float32),
            ("dense", torch.float32),
            ("dense", torch.bfloat16),
        ):
            add(CppTarget, load_checkpoint(path), 1, 32, dtype, mode)
            add(CppDFlashDrafter, listed if mode != "dense" else drafter, made[-1], 1)
    return digest.hexdigest()


def test_a_layout_has_a_number_of_its_own(tmp_path):
    assert (LAYOUT, packed_everything(tmp_path)) == PINNED
