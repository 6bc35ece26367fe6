"""One fixture runs every backend of the package's ops through the same tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from tests.kernels.backends import Backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def missing(name: str) -> str | None:
    """Why a backend cannot run here, or None."""
    if name == "cpp":
        return dispatch.extension_error()
    if name == "triton":
        absent = dispatch.triton_error()
        return absent or (None if INTERPRETED or torch.cuda.is_available() else "no GPU and no interpreter")
    return None


def device_of(name: str) -> torch.device:
    """Where a backend's tensors live in these tests."""
    return torch.device("cuda" if name == "triton" and not INTERPRETED else "cpu")


@pytest.fixture(params=dispatch.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A forced backend and the device its tensors live on."""
    yield from forced_backend(request.param)


@pytest.fixture(params=[name for name in dispatch.BACKENDS if name != "triton" or not INTERPRETED])
def quick_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The same without the interpreter, for tests whose many calls would take it minutes."""
    yield from forced_backend(request.param)


def forced_backend(name: str) -> Iterator[Backend]:
    reason = missing(name)
    if reason is not None:
        if name == "cpp" and os.environ.get("BLOCKPILOT_REQUIRE_EXT") == "1":
            pytest.fail(f"the C++ extension is required: {reason}")
        pytest.skip(f"{name}: {reason}")
    with dispatch.forced(name):
        yield Backend(name, device_of(name))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every float tensor that an op allocates without filling it holds NaN, so that what is not written shows."""
    for holder, name in ((torch, "empty_like"), (torch, "empty"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(holder, name, _filling(getattr(holder, name)))


def _filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poison(*args: Any, **kwargs: Any) -> Tensor:
        made = allocate(*args, **kwargs)
        return made.fill_(float("nan")) if made.dtype.is_floating_point else made

    return poison
