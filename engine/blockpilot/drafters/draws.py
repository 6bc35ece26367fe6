"""How rows of draft logits become tokens: with the noise of the target's own choice, its filters left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.drafters.draft_vocabulary import DraftVocabulary
from blockpilot.one_thread import one_thread
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot_kernels import choose
from blockpilot_kernels.draft_tree import largest

LARGEST_TREE = 16  # nodes: rows of a request that the memory estimates allow for
DRAFT_TEMPERATURE = 1.0
LOWEST_TEMPERATURE = 1e-5  # `choose` divides by it; 0 means greedy


def checked_temperature(factor: float | None) -> float:
    """The factor on a request's temperature when drafting; None for the default.

    Raises:
        ValueError: not a positive number.
    """
    found = DRAFT_TEMPERATURE if factor is None else factor
    if not 0 < found < float("inf"):
        raise ValueError(f"draft_temperature: expected a number > 0, got {factor!r}")
    return found


def terms(
    state: State, plan: StepPlan, slot: Tensor, column: Tensor, factor: float
) -> tuple[Tensor, Tensor | None]:
    """[M] temperature and [M, S] ids that cannot be, −1 pads, where block column [M] of a slot [M] is guessed."""
    cooled = (state.temperature[slot] * factor).clamp_min(LOWEST_TEMPERATURE)
    banned = None
    if plan.bans:
        early = state.length[slot] - 1 + column < state.free_from[slot]
        banned = torch.where(early[:, None], state.stop_ids[slot], -1)
    return torch.where(state.temperature[slot] > 0, cooled, 0), banned


@dataclass(frozen=True)
class Draws:
    """How M rows of draft logits over V' ids become tokens.

    Attributes:
        noise: [M, V'] of the position each row guesses, or None. temperature: [M], 0 is greedy. banned: [M, S]
            columns that cannot be, −1 pads, or None.
    """

    noise: Tensor | None
    temperature: Tensor
    banned: Tensor | None

    @classmethod
    def of(
        cls,
        state: State,
        plan: StepPlan,
        rows: tuple[Tensor, Tensor, Tensor],
        noise: Tensor | None,
        vocabulary: DraftVocabulary,
        factor: float,
    ) -> Draws:
        """For rows that guess what a target row chooses: sharing its noise makes both agree when the distributions do.

        Args:
            rows: slot [M], block column [M] that is guessed, and target row [M] that chooses it.
            noise: [N, V] by target row, or None when every request is greedy. factor: on a request's temperature.
        """
        slot, column, source = rows
        shared = None if noise is None else vocabulary.noise(noise, source)
        temperature, banned = terms(state, plan, slot, column, factor)
        return cls(shared, temperature, None if banned is None else vocabulary.columns(banned))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [M, V'] → columns [M], and whether each row was finite [M]; column 0 where it was not."""
        off = torch.zeros_like(self.temperature)
        how = (self.noise, self.temperature, off.long(), off + 1, off, self.banned)
        return choose(logits, *how, filtered=False)

    def scores(self, logits: Tensor) -> Tensor:
        """[M, V'] logits as the target's choice sees them: at its temperature, its noise added, bans taken out.

        If the target's differ from them by independent Gumbel errors, then exp(log_softmax) of these is the chance
        of each id to be its choice, greedy or drawn: the noise is no longer random here, so it counts as part of
        what is known.
        """
        if self.noise is not None:
            sampled = (self.temperature > 0)[:, None]
            with one_thread():
                cooled = logits / torch.where(sampled, self.temperature[:, None], 1.0)
                logits = torch.where(sampled, cooled + self.noise, logits)
        if self.banned is None:
            return logits
        last = logits.shape[1]
        out = torch.where(self.banned < 0, last, self.banned)
        return torch.nn.functional.pad(logits, (0, 1)).scatter(1, out, -torch.inf)[:, :last]


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """scores [M, V'] → columns [M, count] and log_softmax there, falling; the lower column first among equals.

    At most 0, whatever the rounding: no node may be likelier than its parent.
    """
    found = largest(scores, count)
    with one_thread():
        whole = scores.logsumexp(-1, keepdim=True)
    return found, (scores.gather(1, found) - whole).clamp(max=0)
