"""What the tests of the ops share: a backend under test, rows of sampling parameters, calls with defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockpilot_kernels import choose, dispatch, gumbel_noise, philox


@dataclass(frozen=True)
class Backend:
    """A backend that `dispatch.forced` is forcing. Tests do less where `slow`: in the interpreter."""

    name: str
    device: torch.device

    @property
    def slow(self) -> bool:
        return self.name == "triton" and self.device.type == "cpu"

    def put(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.device)

    def noise(self, seed: Tensor, position: Tensor, vocab: int) -> Tensor:
        """[N, vocab] float32, on the CPU."""
        return gumbel_noise(seed.to(self.device), position.to(self.device), vocab).cpu()

    def integers(self, seed: Tensor, position: Tensor, vocab: int) -> Tensor:
        """[N, vocab] int64, on the CPU."""
        return philox(seed.to(self.device), position.to(self.device), vocab).cpu()

    def choose(
        self, logits: Tensor, noise: Tensor | None, params: Params, filtered: bool = True
    ) -> tuple[Tensor, Tensor]:
        """ids [N] and finite [N], on the CPU."""
        given = [self.put(t) for t in (logits, noise, *params.tensors(logits.shape[0]))]
        ids, finite = choose(*given, filtered=filtered)
        return ids.cpu(), finite.cpu()


@dataclass(frozen=True)
class Params:
    """Sampling parameters, one value for every row or a list with one each."""

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    banned: list[Any] = field(default_factory=list)

    def tensors(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        def column(value: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

        banned = None
        if self.banned:
            banned = torch.tensor(self.banned, dtype=torch.int64)
            banned = (banned if banned.dim() == 2 else banned[None]).expand(rows, -1)
        return (
            column(self.temperature, torch.float32),
            column(self.top_k, torch.int64),
            column(self.top_p, torch.float32),
            column(self.min_p, torch.float32),
            banned,
        )


def rows_of(row: list[float] | Tensor, n: int) -> Tensor:
    """[n, V] float32 copies of one row."""
    return torch.as_tensor(row, dtype=torch.float32).expand(n, -1).contiguous()


def counting(n: int, start: int = 0) -> Tensor:
    """[n] int64: start, start + 1, …"""
    return torch.arange(start, start + n, dtype=torch.int64)


def run(
    backend: Backend, logits: Tensor, noise: Tensor | None, params: Params, filtered: bool = True
) -> list[int]:
    """The chosen ids of a backend."""
    return backend.choose(logits, noise, params, filtered)[0].tolist()


def reference_ids(logits: Tensor, noise: Tensor | None, params: Params) -> list[int]:
    """What the reference chooses, whichever backend is forced."""
    with dispatch.forced("reference"):
        return choose(logits, noise, *params.tensors(logits.shape[0]), filtered=True)[0].tolist()
