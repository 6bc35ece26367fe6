"""Folders with tiny pairs, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import drafter_config, save_drafter, save_target

FAMILIES = ("llama", "qwen3")


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target of each family, and "tied", which agrees with no drafter."""
    root = tmp_path_factory.mktemp("targets")
    made = {family: save_target(root / family, family) for family in FAMILIES}
    return {**made, "tied": save_target(root / "tied", favourites=0)}


@pytest.fixture(scope="session")
def drafter_for(
    targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """`drafter_for(family, **config)` → (target folder, folder of a drafter with that config)."""
    root = tmp_path_factory.mktemp("drafters")
    made: dict[str, Path] = {}

    def make(family: str = "llama", **config: Any) -> tuple[Path, Path]:
        key = repr((family, sorted(config.items())))
        if key not in made:
            made[key] = save_drafter(root / str(len(made)), targets[family], **config)
        return targets[family], made[key]

    return make


@pytest.fixture
def config(targets: dict[str, Path]) -> dict[str, Any]:
    """config.json of a drafter for the llama target."""
    return drafter_config(targets["llama"])
