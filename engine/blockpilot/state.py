"""Request slots as preallocated tensors; nothing here is reallocated while the engine lives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from blockpilot_kernels.accept_commit import FINISH_NONE


@dataclass
class State:
    """R slots. `length[r]` counts committed tokens, anchor included; length − 1 of them have K/V.

    Attributes (R slots, C capacity, W widest block, S stop ids):
        tokens: [R, C] int64 prompt and committed ids. length, limit: [R] int64, length ≤ limit ≤ C.
        width: [R] int64 admitted width; effective: [R] int64 width of the current step.
        stop_ids: [R, S] int64, −1 pads. free_from: [R] int64, the length from which stop ids may be chosen.
        seed: [R] int64. temperature, top_p, min_p: [R] float32. top_k: [R] int64.
        done: [R] bool (empty slots too). finish: [R] int64 FINISH_* code.
        block, choice: [R, W] int64. finite: [R, W] bool. accepted, count: [R] int64 of the last step.
    """

    tokens: Tensor
    length: Tensor
    limit: Tensor
    width: Tensor
    effective: Tensor
    stop_ids: Tensor
    free_from: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    done: Tensor
    finish: Tensor
    block: Tensor
    choice: Tensor
    finite: Tensor
    accepted: Tensor
    count: Tensor

    @classmethod
    def allocate(
        cls, slots: int, capacity: int, widest: int, stop_ids: int, device: torch.device | str
    ) -> State:
        """Empty slots. One row more than `slots`: packed padding rows read it, nothing is ever committed to it."""
        r = slots + 1

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        def floats(fill: float) -> Tensor:
            return torch.full((r,), fill, dtype=torch.float32, device=device)

        def flags(*shape: int, fill: bool) -> Tensor:
            return torch.full(shape, fill, dtype=torch.bool, device=device)

        return cls(
            tokens=ints(r, capacity),
            length=ints(r, fill=1),
            limit=ints(r, fill=1),
            width=ints(r, fill=1),
            effective=ints(r),
            stop_ids=ints(r, stop_ids, fill=-1),
            free_from=ints(r),
            seed=ints(r),
            temperature=floats(0.0),
            top_k=ints(r),
            top_p=floats(1.0),
            min_p=floats(0.0),
            done=flags(r, fill=True),
            finish=ints(r, fill=FINISH_NONE),
            block=ints(r, widest),
            choice=ints(r, widest),
            finite=flags(r, widest, fill=True),
            accepted=ints(r),
            count=ints(r),
        )

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them in the order above, as fused steps take them."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    @property
    def widest(self) -> int:
        return self.block.shape[1]

    def at(self, slot: int) -> State:
        """A view of one slot, sharing storage."""
        return State(**{f.name: getattr(self, f.name)[slot : slot + 1] for f in fields(self)})

    def pointers(self) -> dict[str, int]:
        """Data pointer of every tensor; equal before and after any step."""
        return {f.name: getattr(self, f.name).data_ptr() for f in fields(self)}
