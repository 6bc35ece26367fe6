"""Fixed-tile linear layer in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot_kernels import dispatch

TILE = 16


def round_up(n: int, multiple: int = TILE) -> int:
    """Smallest multiple of `multiple` that is ≥ n."""
    return -(-n // multiple) * multiple


def pad_rows(x: Tensor) -> Tensor:
    """[n, …] → [⌈n/16⌉·16, …] with zero rows appended."""
    short = round_up(x.shape[0]) - x.shape[0]
    return x if short == 0 else torch.cat([x, x.new_zeros(short, *x.shape[1:])])


def _native_bf16(device: torch.device) -> bool:
    if device.type != "cpu":
        return True
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(probe and probe())


def _onednn_packs(weight: Tensor) -> bool:
    ready = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.backends.mkldnn.is_available()
    return weight.device.type == "cpu" and ready


class PackedLinear:
    """y = x·Wᵀ + b with fp32 input and output, computed 16 rows at a time, or 64 by the Triton kernel where that is the
    backend when the weight is packed.

    `dtype` bfloat16 rounds the weight and the input to bf16 and accumulates in fp32. A CPU without bf16 matrix
    instructions keeps the rounded weight in fp32, which is the same product at a usable speed.

    Args:
        weight: [N, K], any float dtype.
        bias: [N] or None.
        dtype: torch.float32 or torch.bfloat16.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        if weight.ndim != 2:
            raise ValueError(f"weight: expected [N, K], got shape {tuple(weight.shape)}")
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16, got {dtype}")
        self.out_features, self.in_features = weight.shape
        self.rounds = dtype == torch.bfloat16
        native = self.rounds and _native_bf16(weight.device)
        self.dtype = dtype if native else torch.float32
        self._pad_n, self._pad_k = (round_up(s) - s for s in weight.shape)
        w = self._padded(weight)
        self.bytes = w.numel() * w.element_size()
        self._bias = None if bias is None else bias.float()
        self._triton = dispatch.backend_of(w.device.type) == "triton"
        if self._triton:
            from blockpilot_kernels.tiled_linear import kernel

            kernel.counters(w.device)  # allocated here, for a first product may be captured
        self._packed = not self._triton and _onednn_packs(w)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(w, TILE) if self._packed else w

    def __call__(self, x: Tensor) -> Tensor:
        """x [n·16, in_features] float32 → [n·16, out_features] float32."""
        if x.shape[0] % TILE:
            raise ValueError(f"x: expected a multiple of {TILE} rows, got {x.shape[0]}; use pad_rows")
        dispatch.count("tiled_linear", "triton" if self._triton else "reference")
        if self._triton:
            from blockpilot_kernels.tiled_linear import kernel

            return kernel.linear(x, self._weight, self._bias, self.out_features, self.rounds)
        if self.rounds:
            x = x.to(torch.bfloat16)
        x = F.pad(x.to(self.dtype), (0, self._pad_k)).contiguous()
        tiles = [self._tile(t) for t in x.split(TILE)]
        y = (tiles[0] if len(tiles) == 1 else torch.cat(tiles)).float()[:, : self.out_features]
        return y if self._bias is None else y + self._bias

    def replace(self, weight: Tensor) -> None:
        """Multiply by another weight [N, K] from now on, written where the old one lies; its bias stays."""
        w = self._padded(weight)
        if self._packed:  # no step on a CPU is captured, so nothing holds the old place
            self._weight = torch.ops.mkldnn._reorder_linear_weight(w, TILE)
        else:
            self._weight.copy_(w)

    def _padded(self, weight: Tensor) -> Tensor:
        """A copy of the weight, rounded, with zeros beyond it."""
        rounded = weight.to(torch.bfloat16 if self.rounds else torch.float32)
        return F.pad(rounded, (0, self._pad_k, 0, self._pad_n)).to(self.dtype).contiguous()

    def rows(self, index: Tensor) -> Tensor:
        """Rows [R, in_features] of the weight as it was rounded, index [R] int64; a dense copy is made meanwhile."""
        return self.matrix[index, : self.in_features]

    @property
    def matrix(self) -> Tensor:
        """[≥ out_features, ≥ in_features] as it was rounded, zeros beyond; a copy where it is packed for the CPU."""
        return self._weight.to_dense() if self._packed else self._weight

    def _tile(self, x: Tensor) -> Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return F.linear(x, self._weight)


def row_independence(rows: int = TILE, dtype: torch.dtype = torch.float32) -> bool:
    """Whether this machine's tiles give a row the same bits at every index, beside NaN rows, off alignment."""
    gen = torch.Generator().manual_seed(0)
    for n, k in ((960, 576), (576, 1536), (97, 40)):
        linear = PackedLinear(torch.randn(n, k, dtype=torch.float32, generator=gen), dtype=dtype)
        row = torch.randn(k, dtype=torch.float32, generator=gen)
        seen = []
        for i in range(rows):
            buffer = torch.randn(TILE * k + i % 3, dtype=torch.float32, generator=gen)
            x = buffer[i % 3 :].view(TILE, k)
            if i % 2:
                x.fill_(float("nan"))
            x[i % TILE] = row
            seen.append(linear(x)[i % TILE])
        if not all(torch.equal(seen[0], y) for y in seen):
            return False
    return True
