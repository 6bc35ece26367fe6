"""Each backend's transform of raw integers to noise, reached without its generator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockpilot_kernels.gumbel_noise import reference
from tests.kernels.backends import Backend


def transform_of(backend: Backend) -> Callable[[Tensor], Tensor]:
    """[n] int64 in [0, 2³²) → [n] float32."""
    if backend.name == "cpp":
        return torch.ops.blockpilot.gumbel_from_integers
    if backend.name == "triton":
        from tests.kernels import triton_probes

        return lambda integers: triton_probes.transform(integers, backend.device)
    return reference.gumbel_from_integers
