"""Folders with tiny pairs, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blockpilot.drafters.eagle3 import Eagle3Drafter
from blockpilot.drafters.eagle3_cpp import CppEagle3Drafter
from blockpilot.drafters.specblock import SpecBlockDrafter
from blockpilot.drafters.specblock_cpp import CppSpecBlockDrafter
from tests.drafters.rounds import load_pair
from tests.eagle3 import IDS, save_eagle3_drafter
from tests.implementations import IMPLEMENTATIONS, require
from tests.specblock import save_specblock_drafter
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


@pytest.fixture(scope="session")
def eagle3_for(
    targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """`eagle3_for(family, ids, **config)` → (target folder, folder of an EAGLE-3 drafter with that config)."""
    root = tmp_path_factory.mktemp("eagle3")
    made: dict[str, Path] = {}

    def make(family: str = "llama", ids: Any = IDS, **config: Any) -> tuple[Path, Path]:
        key = repr((family, ids, sorted(config.items())))
        if key not in made:
            made[key] = save_eagle3_drafter(root / str(len(made)), targets[family], ids, **config)
        return targets[family], made[key]

    return make


@pytest.fixture(scope="session")
def specblock_for(
    targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """`specblock_for(family, ids, **config)` → (target folder, folder of a SpecBlock drafter with that config)."""
    root = tmp_path_factory.mktemp("specblock")
    made: dict[str, Path] = {}

    def make(family: str = "llama", ids: Any = IDS, **config: Any) -> tuple[Path, Path]:
        key = repr((family, ids, sorted(config.items())))
        if key not in made:
            made[key] = save_specblock_drafter(root / str(len(made)), targets[family], ids, **config)
        return targets[family], made[key]

    return make


@pytest.fixture(params=["eagle3", "specblock"])
def pair_for(
    request: pytest.FixtureRequest, eagle3_for: Callable[..., Any], specblock_for: Callable[..., Any]
) -> Callable[..., tuple[Path, Path]]:
    """Folders of a target and a drafter of either kind that reads pairs of a feature and a token."""
    return {"eagle3": eagle3_for, "specblock": specblock_for}[request.param]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    """Which target and drafter a test runs on."""
    require(request.param)
    return request.param


@pytest.fixture
def load(implementation: str) -> Callable[..., Any]:
    """`load_pair` of each implementation."""
    return partial(load_pair, implementation=implementation)


@pytest.fixture
def config(targets: dict[str, Path]) -> dict[str, Any]:
    """config.json of a drafter for the llama target."""
    return drafter_config(targets["llama"])


@pytest.fixture
def reference_path(implementation, monkeypatch):
    """Chains pass by pass where one call drafts a whole block."""
    for packed, plain in ((CppEagle3Drafter, Eagle3Drafter), (CppSpecBlockDrafter, SpecBlockDrafter)):
        monkeypatch.setattr(packed, "_draft_chains", plain._draft_chains)
