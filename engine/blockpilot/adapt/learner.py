"""Updates of a drafter's trainable twin, and what they gain, measured on answers that they did not see."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from blockpilot.drafters.headed_checkpoint import EMBEDDING, HEAD, HeadedCheckpoint
from blockpilot.drafters.pairs import PairDrafter
from blockpilot.training.draft_batches import make_blocks, random_anchors
from blockpilot.training.draft_data import Answer
from blockpilot.training.draft_loss import ABSENT, DraftIds, Labels, draft_loss, position_weights
from blockpilot.training.draft_model import Blocks
from blockpilot.training.eagle3_model import Eagle3Model
from blockpilot.training.specblock_model import SpecBlockModel

# By kind of drafter: those that can adapt. SpecBlock's rank head, which a chain's loss does not teach, stays as it is.
MODELS: dict[str, type[Eagle3Model | SpecBlockModel]] = {"eagle3": Eagle3Model, "specblock": SpecBlockModel}
HEAD_PARAMETERS = ("lm_head", "weights.lm_head")  # the final norm's weight could only scale its columns
RATES = {"head": 1e-3, "full": 1e-3}
STEPS = 16  # of an update
BATCH, ANCHORS = 4, 16  # pieces of a step, and blocks of each
HELD_OUT = 4  # one piece in so many, the newest, is measured on
MEASURED = 64  # blocks of each
# As in training: of the position weights, of the gradient, of Adam.
GAMMA, CLIP, BETAS = 4.0, 1.0, (0.9, 0.95)

Work = Generator[None, None, "Outcome"]  # goes on a little each time it is asked


@dataclass(frozen=True)
class Outcome:
    """How many more tokens a step commits, as a share, and the standard error of that."""

    gain: float
    error: float


class Learner:
    """The twin of a drafter, whose weights it takes from the checkpoint that the drafter was loaded from.

    Args:
        target: whose embedding a drafter without one of its own reads. length: positions of a piece with a block at its
            end. scale: [n] as in `Eagle3Model`. seed: of the pieces and blocks that a step takes.
    """

    def __init__(self, drafter: PairDrafter, target: Any, length: int, scale: Tensor, seed: int) -> None:
        checkpoint = checkpoint_of(drafter)
        self.device, c = target.device, checkpoint.config
        self.model = MODELS[drafter.kind](c, length, scale).to(self.device)
        self.model.take(checkpoint.tensors)
        self._own = {n: t for n, t in checkpoint.tensors.items() if n == EMBEDDING}  # is not trained
        self._embedding = self._own[EMBEDDING].to(self.device) if self._own else target.embedding
        ids = torch.arange(c.draft_vocab_size) if checkpoint.vocabulary is None else checkpoint.vocabulary
        self._known = DraftIds(ids, c.model.vocab_size)
        self._ids = ids.to(self.device)
        self._extra = torch.zeros(len(ids), dtype=torch.float32, device=self.device)
        self._width = c.block_size
        self.generator = torch.Generator().manual_seed(seed)
        self.before: dict[str, Tensor] = {}

    def tensors(self, arm: str) -> dict[str, Tensor]:
        """What `PairDrafter.replace` takes after an update of that arm."""
        made = self.model.tensors() | self._own
        return {HEAD: made[HEAD]} if arm == "head" else made

    def update(self, arm: str, pieces: Sequence[Answer], width: int) -> Work:
        """A few steps of the trainer's loss; `undo` takes them back. The gain is that of blocks as wide as `width`.

        A loss or gradient that is not finite ends it with nothing changed and half of all tokens lost, as it says.
        """
        held = list(pieces)[-max(1, len(pieces) // HELD_OUT) :]
        seen = list(pieces)[: -len(held)]
        anchors = [random_anchors(p, MEASURED, self.generator) for p in held]
        before = self._accepted(held, anchors, width)
        yield
        trained = {n: p for n, p in self.model.named_parameters() if arm == "full" or n in HEAD_PARAMETERS}
        self.before = {n: p.detach().clone() for n, p in trained.items()}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in trained)
        adam, batches = Adam(list(trained.values()), RATES[arm]), self._batches(arm, seen)
        try:
            for batch in batches:
                if not self._step(batch, adam):
                    self.undo()
                    return Outcome(-0.5, 0.0)
                yield
        except BaseException:
            self.undo()
            raise
        return _outcome(before, self._accepted(held, anchors, width))

    def trial(self, pieces: Sequence[Answer], width: int) -> Work:
        """What undoing the last update would gain on these pieces; changes nothing."""
        anchors = [random_anchors(p, MEASURED, self.generator) for p in pieces]
        after = self._accepted(pieces, anchors, width)
        yield
        self._swap()
        before = self._accepted(pieces, anchors, width)
        self._swap()
        return _outcome(after, before)

    @torch.no_grad()
    def undo(self) -> None:
        """Take the last update back."""
        for name, value in self.before.items():
            self.model.get_parameter(name).copy_(value)

    @torch.no_grad()
    def _swap(self) -> None:
        for name, value in self.before.items():
            parameter = self.model.get_parameter(name)
            kept = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(kept)

    def _batches(self, arm: str, pieces: Sequence[Answer]) -> Iterator[tuple[Tensor, Labels]]:
        """Hidden states and labels of every step; where the head alone learns, the states are not computed twice."""
        order, made = list[int](), list[tuple[Tensor, Labels]]()
        for step in range(STEPS):
            if len(order) < BATCH:
                order += torch.randperm(len(pieces), generator=self.generator).tolist()
            if arm == "head" and BATCH * len(made) >= len(pieces):
                yield made[step % len(made)]
                continue
            batch = self._taught([pieces[i] for i in order[:BATCH]])
            del order[:BATCH]
            made += [batch] if arm == "head" else []
            yield batch

    def _taught(self, pieces: Sequence[Answer]) -> tuple[Tensor, Labels]:
        """Hidden states [M, H] of guesses at some anchors that have a label, and these."""
        anchors = [random_anchors(p, ANCHORS, self.generator) for p in pieces]
        blocks, labels = self._blocks(pieces, anchors, self._width)
        known = (labels.ids != ABSENT).nonzero()[:, 0]
        kept = Labels(*(t[known].to(self.device) for t in vars(labels).values()))
        with self._products():
            return self.model.guesses(blocks, self._embedding).flatten(0, 2)[known.to(self.device)], kept

    def _step(self, batch: tuple[Tensor, Labels], adam: Adam) -> bool:
        """One step; returns whether it was finite."""
        with self._products():
            loss, _ = draft_loss(batch[0], self.model.lm_head, batch[1], self._ids, self._extra, 0.0)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(adam.parameters, CLIP)
        finite = bool((loss + norm).isfinite())
        if finite:
            adam.step()
        self.model.zero_grad(set_to_none=True)
        return finite

    @torch.no_grad()
    def _accepted(self, pieces: Sequence[Answer], anchors: Sequence[Tensor], width: int) -> Tensor:
        """[M] drafts that a greedy step from every anchor would accept."""
        found = []
        for i in range(0, len(pieces), BATCH):
            at = list(anchors[i : i + BATCH])
            blocks, labels = self._blocks(pieces[i : i + BATCH], at, width)
            with self._products():
                hidden = self.model.guesses(blocks, self._embedding).flatten(0, 2)
                best = F.linear(hidden, self.model.lm_head).argmax(-1)
            right = self._ids[best].cpu().eq(labels.ids).view(-1, width - 1)
            found.append(right.long().cumprod(1).sum(1)[torch.cat(at) >= 0])
        return torch.cat(found)

    def _blocks(
        self, pieces: Sequence[Answer], anchors: Sequence[Tensor], width: int
    ) -> tuple[Blocks, Labels]:
        weights = position_weights(width - 1, GAMMA)
        blocks, labels = make_blocks(pieces, anchors, width, self.model.mask_token_id, weights)
        return blocks.to(self.device), self._known.keep(labels)

    def _products(self) -> torch.autocast:
        dtype = product_dtype(self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)


class Adam:
    """Adam (arXiv 1412.6980) of the few steps of an update. The optimisers of torch import its compiler when the first
    is made, a second in which requests would wait.
    """

    def __init__(self, parameters: Sequence[Tensor], rate: float) -> None:
        self.parameters, self._rate, self._steps = parameters, rate, 0
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self._steps += 1
        first, second = (1 - beta**self._steps for beta in BETAS)
        for p, (mean, square) in zip(self.parameters, self._moments, strict=True):
            if p.grad is None:
                continue
            mean.lerp_(p.grad, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])
            p.addcdiv_(mean, square.div(second).sqrt_().add_(1e-8), value=-self._rate / first)


def check(drafter: PairDrafter) -> None:
    """Refuse a drafter that its twin does not compute.

    Raises:
        ValueError: what it has that the twin has not.
    """
    c = drafter.config
    found = [n for n in c.expected_tensors() if n.endswith(".bias")]
    if getattr(c, "norm_before_residual", False):
        found.append("norm_before_residual")
    if found:
        raise ValueError(
            f"adapt: expected a drafter without {found[0]}, which training does not know; leave adapt out"
        )


def checkpoint_of(drafter: PairDrafter) -> HeadedCheckpoint:
    """What a drafter was made of, read again.

    Raises:
        ValueError: files that have changed since.
    """
    checkpoint = drafter.loader(drafter.folder)
    if checkpoint.fingerprint != drafter.fingerprint:
        raise ValueError(
            f"adapt: expected {drafter.folder} to hold the drafter that was loaded from it, found another; load the "
            "drafter from files that stay as they are"
        )
    return checkpoint


def sizes_of(pieces: Sequence[Answer], features: int) -> Tensor:
    """[n] factors that bring features to unit size."""
    rows = torch.cat([p.features.float() for p in pieces]).unflatten(1, (features, -1))
    return rows.pow(2).mean((0, 2)).clamp_min(1e-12).rsqrt().cpu()


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it fast."""
    fast = device.type == "cuda" or getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return torch.bfloat16 if fast else torch.float32


def _outcome(before: Tensor, after: Tensor) -> Outcome:
    """From drafts accepted [M] at the same anchors."""
    if len(before) < 2:
        return Outcome(0.0, 1.0)
    steps = 1 + before.float().mean()
    more = (after - before).float() / steps
    return Outcome(float(more.mean()), float(more.std() / len(more) ** 0.5))
