"""The kinds of drafters that `train-draft` makes, behind one set of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from blockpilot.drafters.dflash_checkpoint import save_dflash
from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.drafters.eagle3_checkpoint import save_eagle3
from blockpilot.drafters.eagle3_config import Eagle3Config
from blockpilot.drafters.specblock_checkpoint import save_specblock
from blockpilot.drafters.specblock_config import SpecBlockConfig
from blockpilot.targets.config import ModelConfig
from blockpilot.training.draft_model import DraftModel, drafter_config, start_from_target
from blockpilot.training.draft_training import DraftTrainer
from blockpilot.training.eagle3_model import Eagle3Model, eagle3_config, start_eagle3
from blockpilot.training.specblock_model import SpecBlockModel, specblock_config, start_specblock
from blockpilot.training.specblock_training import SpecBlockTrainer

if TYPE_CHECKING:
    from blockpilot.training.draft_folder import DraftOptions

Model: TypeAlias = DraftModel | Eagle3Model | SpecBlockModel


class Kind(Protocol):
    """What a run asks of the kind of drafter it trains."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Target layers whose outputs are its features, 0 = the first."""

    @property
    def own_ids(self) -> Tensor | None:
        """[V'] sorted, of a head of its own; None: it borrows the target's."""

    def model(self, length: int, scale: Tensor) -> Model:
        """A random one, see `DraftModel`."""

    def trainer(self, *parts: Any) -> DraftTrainer:
        """Of the model; see `DraftTrainer`."""

    def start(self, model: Any, tensors: Mapping[str, Tensor], layers: Sequence[int], states: Tensor) -> None:
        """Begin as target layers; states [N, H] some of its last feature."""

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the drafter in the published format."""


class DFlashKind:
    """See `Kind`; ids: [V'] that it drafts, None for all."""

    own_ids, trainer = None, DraftTrainer

    def __init__(self, target: ModelConfig, options: DraftOptions, mask: int, ids: Tensor | None) -> None:
        o = options
        self.source = drafter_config(target, o.layers, o.block_size, mask, o.feature_layers)
        self._config, self._ids = DFlashConfig.from_json(self.source), ids
        self.layers = self._config.target_layer_ids

    def model(self, length: int, scale: Tensor) -> DraftModel:
        return DraftModel(self._config, length, scale)

    def start(
        self, model: DraftModel, tensors: Mapping[str, Tensor], layers: Sequence[int], states: Tensor
    ) -> None:
        start_from_target(model, tensors, layers, states)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        save_dflash(folder, self.source, tensors, self._ids)


class Eagle3Kind:
    """See `Kind`; ids: [V'] that it drafts, None for all."""

    trainer = DraftTrainer

    def __init__(self, target: ModelConfig, options: DraftOptions, mask: int, ids: Tensor | None) -> None:
        self.own_ids = torch.arange(target.vocab_size) if ids is None else ids
        o = options
        self.source = eagle3_config(target, o.block_size, o.feature_layers, len(self.own_ids))
        self._config, self._ids = Eagle3Config.from_json(self.source), ids
        assert self._config.hidden_states is not None  # written just above
        self.layers = tuple(k - 1 for k in self._config.hidden_states)

    def model(self, length: int, scale: Tensor) -> Eagle3Model:
        return Eagle3Model(self._config, length, scale)

    def start(
        self, model: Eagle3Model, tensors: Mapping[str, Tensor], layers: Sequence[int], states: Tensor
    ) -> None:
        start_eagle3(model, tensors, layers[0], self.own_ids)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        save_eagle3(folder, self.source, tensors, self._ids)


class SpecBlockKind:
    """See `Kind`; ids: [V'] that it drafts, None for all."""

    def __init__(self, target: ModelConfig, options: DraftOptions, mask: int, ids: Tensor | None) -> None:
        self.own_ids = torch.arange(target.vocab_size) if ids is None else ids
        self._ids, self._without, o = ids, options.without, options
        shape = (o.layers, o.block_size, o.feature_layers, len(self.own_ids), "shift" not in o.without)
        self.source = specblock_config(target, *shape)
        self._config = SpecBlockConfig.from_json(self.source)
        assert self._config.hidden_states is not None  # written just above
        self.layers = tuple(k - 1 for k in self._config.hidden_states)

    def model(self, length: int, scale: Tensor) -> SpecBlockModel:
        return SpecBlockModel(self._config, length, scale)

    def trainer(self, *parts: Any) -> SpecBlockTrainer:
        return SpecBlockTrainer(*parts, valid_prefix="valid-prefix" not in self._without)

    def start(
        self, model: SpecBlockModel, tensors: Mapping[str, Tensor], layers: Sequence[int], states: Tensor
    ) -> None:
        start_specblock(model, tensors, layers, self.own_ids)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        save_specblock(folder, self.source, tensors, self._ids)


KINDS: dict[str, Callable[[ModelConfig, DraftOptions, int, Tensor | None], Kind]] = {
    "dflash": DFlashKind,
    "eagle3": Eagle3Kind,
    "specblock": SpecBlockKind,
}
