"""A network that reads the last prompt position's distribution and chooses a block width (arXiv 2606.31315).

`full` is the paper's network over the whole vocabulary. `compact` reads the same distribution through the
target's embedding: the probability-weighted mean of its rows, H numbers, and is small enough to ship.

A row's width never depends on the rows beside it: reductions over the vocabulary run in tiles of exactly 16 rows
or, as the mean embedding, row by row, and the network in tiles of 16.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpilot.one_thread import one_thread
from blockpilot.policies.contract import Table, check_window
from blockpilot_kernels.tiled_linear import TILE, PackedLinear, pad_rows

INPUT_KINDS = {"full": ("raw", "probabilities", "normalised", "top_k"), "compact": ("mean_likely_embedding",)}
DEFAULT_HIDDEN = {"full": 2048, "compact": 256}
TOP_K = 64
HIDDEN_LAYERS = ("first", "second", "third", "fourth")
_VOCABULARY_CHUNK = 4096
_SOFTMAX = ("probabilities", "mean_likely_embedding")
_RMS_EPSILON = 1e-12
_LEAST = 2.0**-12


@dataclass(frozen=True)
class Architecture:
    """Shape of a predictor.

    Attributes:
        kind: "full" or "compact".
        input_kind: "raw" logits, "probabilities", "normalised" (zero mean, unit variance) or "top_k" logits (the
            `TOP_K` largest, zero elsewhere) for full; "mean_likely_embedding" for compact.
        input_size: V for full, H for compact.
        hidden: width of every hidden layer.
        window: the widths to choose from, one class each.
        dropout: share of hidden units dropped in training.
        depth: number of hidden layers, 1 to 4; the paper's is 2.
    """

    kind: str
    input_kind: str
    input_size: int
    hidden: int
    window: tuple[int, ...]
    dropout: float = 0.2
    depth: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", check_window(self.window))
        if self.kind not in INPUT_KINDS:
            raise ValueError(f"Architecture.kind: expected one of {sorted(INPUT_KINDS)}, got {self.kind!r}")
        if self.input_kind not in INPUT_KINDS[self.kind]:
            raise ValueError(
                f"Architecture.input_kind: expected one of {INPUT_KINDS[self.kind]} for {self.kind}, "
                f"got {self.input_kind!r}"
            )
        for name in ("input_size", "hidden"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Architecture.{name}: expected an int >= 1, got {value!r}")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"Architecture.dropout: expected a number in [0, 1), got {self.dropout!r}")
        if isinstance(self.depth, bool) or self.depth not in range(1, len(HIDDEN_LAYERS) + 1):
            raise ValueError(
                f"Architecture.depth: expected an int from 1 to {len(HIDDEN_LAYERS)}, got {self.depth!r}"
            )

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the hidden layers."""
        return HIDDEN_LAYERS[: self.depth]


class _Linear(nn.Module):
    """x·Wᵀ + b whose weight is left unset until it is drawn or loaded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class WidthNetwork(nn.Module):
    """Hidden layers with ReLU and dropout, a residual from the second on, a linear head; Kaiming init.

    Args:
        architecture: sizes.
        seed: seed of the initial weights; None leaves them unset, for a state dict to come.
    """

    def __init__(self, architecture: Architecture, seed: int | None = 0) -> None:
        super().__init__()
        self.architecture = architecture
        inputs = architecture.input_size
        for name in architecture.layers:
            self.add_module(name, _Linear(inputs, architecture.hidden))
            inputs = architecture.hidden
        self.head = _Linear(architecture.hidden, len(architecture.window))
        self.drop = nn.Dropout(architecture.dropout)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for layer in self.hidden_layers:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.kaiming_normal_(self.head.weight, nonlinearity="linear", generator=generator)

    @property
    def hidden_layers(self) -> list[_Linear]:
        """The hidden layers in order."""
        return [getattr(self, name) for name in self.architecture.layers]

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [N, D] float32 → class scores [N, C]."""
        first, *others = self.hidden_layers
        h = self.drop(torch.relu(first(x)))
        for layer in others:
            h = h + self.drop(torch.relu(layer(h)))
        scores: Tensor = self.head(h)
        return scores


def policy_input(last_logits: Tensor, input_kind: str, embedding: Tensor | Table | None = None) -> Tensor:
    """What a predictor of `input_kind` reads, [R, D] float32, from raw logits [R, V] of any float dtype.

    "mean_likely_embedding" needs the target's embedding [V, H]: softmax(logits) @ E, over its root mean square;
    probabilities below 2⁻¹² count as zero, so that few of the table's rows are read.
    A row with a non-finite logit is read as all-zero logits. A row's bits depend on no other row.
    """
    if last_logits.ndim != 2:
        raise ValueError(f"last_logits: expected [R, V], got shape {tuple(last_logits.shape)}")
    if input_kind == "mean_likely_embedding":
        vocabulary = None if embedding is None else embedding.shape[0]
        if vocabulary != last_logits.shape[1]:
            raise ValueError(
                f"embedding: expected the target's table with {last_logits.shape[1]} rows, got "
                f"{'none; call bind(embedding) first' if vocabulary is None else f'{vocabulary} rows'}"
            )
    logits = last_logits.float()
    logits = torch.where(torch.isfinite(logits).all(-1, keepdim=True), logits, 0.0)
    # softmax works row by row whatever their number; other reductions over the vocabulary do not.
    parts = logits.split(1) if input_kind in _SOFTMAX else pad_rows(logits).split(TILE)
    vectors = torch.cat([_tile_input(t, input_kind) for t in parts])[: last_logits.shape[0]]  # [R, V]
    if embedding is None or input_kind != "mean_likely_embedding":
        return vectors
    vectors = torch.where(vectors < _LEAST, 0.0, vectors)
    return (
        _unit(embedding.weighted_mean(vectors))
        if isinstance(embedding, Table)
        else _mean_rows(vectors, embedding)
    )


def _tile_input(logits: Tensor, input_kind: str) -> Tensor:
    """[n, V] → [n, V], n always the same for a kind."""
    if input_kind == "raw":
        return logits
    if input_kind == "normalised":
        centred = logits - logits.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + _RMS_EPSILON)
    if input_kind == "top_k":
        least = logits.topk(min(TOP_K, logits.shape[-1]), -1).values[:, -1:]
        return torch.where(logits >= least, logits, 0.0)
    if input_kind not in _SOFTMAX:
        kinds = [k for kinds in INPUT_KINDS.values() for k in kinds]
        raise ValueError(f"input_kind: expected one of {kinds}, got {input_kind!r}")
    return torch.softmax(logits, -1)


def _mean_rows(p: Tensor, embedding: Tensor) -> Tensor:
    """p [R, V] @ embedding [V, H] → [R, H] of unit root mean square.

    A request is asked about once, mostly alone: one matrix-vector product per row reads the table once, where
    a 16-row tile would do 16 times the work. Chunks keep a bf16 table's fp32 copy small.
    """
    means = p.new_empty(p.shape[0], embedding.shape[1])
    for i, row in enumerate(p):
        weights = row.clone()  # a fresh buffer, so that every row is aligned alike
        mean = p.new_zeros(embedding.shape[1])
        for start in range(0, embedding.shape[0], _VOCABULARY_CHUNK):
            chunk = slice(start, start + _VOCABULARY_CHUNK)
            mean = torch.addmv(mean, embedding[chunk].float().t(), weights[chunk])
        means[i] = _unit(mean)
    return means


def _unit(mean: Tensor) -> Tensor:
    """[..., H] over its root mean square."""
    return mean * torch.rsqrt(mean.square().mean(-1, keepdim=True) + _RMS_EPSILON)


class Predictor:
    """A trained network as a `BlockPolicy`. It draws nothing at random and keeps nothing between requests.

    Attributes:
        sampled: whether it is for requests that sample; the engine decodes the others plain. None: for all.
        trees: as in `BlockPolicy`.
    """

    sampled: bool | None = None

    def __init__(self, network: WidthNetwork) -> None:
        self.network = network.eval().requires_grad_(False)
        self.architecture = network.architecture
        self.window = network.architecture.window
        self.trees: dict[int, int] = {}
        self._embedding: Tensor | Table | None = None
        self._pack(torch.device("cpu"))

    def bind(self, embedding: Tensor | Table) -> None:
        """Keeps a reference to the target's embedding [V, H] and moves to its device."""
        name, size = (
            ("V", embedding.shape[0]) if self.architecture.kind == "full" else ("H", embedding.shape[-1])
        )
        if embedding.ndim != 2 or size != self.architecture.input_size:
            raise ValueError(
                f"embedding: expected [V, H] with {name} = {self.architecture.input_size}, "
                f"got {tuple(embedding.shape)}"
            )
        self._embedding = embedding if self.architecture.kind == "compact" else None
        self._pack(embedding.device)

    def choose(self, last_logits: Tensor) -> Tensor:
        """Raw logits [R, V] → widths [R] int64; the lowest width wins a tie and takes non-finite rows."""
        with one_thread() if self.architecture.kind == "compact" else nullcontext():
            scores = self.scores(policy_input(last_logits, self.architecture.input_kind, self._embedding))
        window = torch.tensor(self.window, device=scores.device)
        best = scores == scores.amax(-1, keepdim=True)
        widths = torch.where(best, window, self.window[-1]).amin(-1)
        return torch.where(torch.isfinite(last_logits).all(-1), widths, self.window[0])

    def scores(self, inputs: Tensor) -> Tensor:
        """Inputs [R, D] float32 → class scores [R, C], row by row independent of R."""
        if inputs.ndim != 2 or inputs.shape[1] != self.architecture.input_size:
            raise ValueError(
                f"inputs: expected [R, {self.architecture.input_size}], got shape {tuple(inputs.shape)}"
            )
        if inputs.shape[0] == 0:
            return inputs.new_zeros(0, len(self.window))
        if inputs.device != self._device:
            self._pack(inputs.device)
        first, *others = self._layers
        h = torch.relu(first(pad_rows(inputs)))
        for layer in others:
            h = h + torch.relu(layer(h))
        return self._head(h)[: inputs.shape[0]]

    def _pack(self, device: torch.device) -> None:
        self._device = device
        self.network.to(device)
        layers = (*self.network.hidden_layers, self.network.head)
        *self._layers, self._head = (PackedLinear(m.weight, m.bias) for m in layers)

    def __repr__(self) -> str:
        return f"Predictor({self.architecture.kind}, window={self.window})"
