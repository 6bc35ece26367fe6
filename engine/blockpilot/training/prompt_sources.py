"""Which prompts a data run answers: the generator's, a file's, or openings for the target to continue.

Every place of the sequence has its own draws, so a prompt depends on the options and its place alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.training import openings, prompts
from blockpilot.training.randomness import Draw

if TYPE_CHECKING:
    from blockpilot.llm import LLM

SOURCES = ("mixed", "own", "target", "file")
DEFAULT_COUNT = 960
_ONE_OWN_IN = 7
_OWN_SEED = (
    1_000_000  # away from the seeds of `label`: a policy is to be trained on prompts its drafter has not seen
)
_LARGEST_SHARD = 1000  # one may wait in the engine's queue as a whole


@dataclass(frozen=True)
class DataOptions:
    """What decides the rows of a data run.

    Attributes:
        source: "own" (the generator), "target" (openings it continues), "mixed" (1 to 6), or "file" with `prompts`.
        prompts: JSONL of {"id", "family", "prompt"}.
        seed: of everything drawn.
        max_new_tokens: tokens per answer.
        prompt_tokens: longest prompt, template included; the target may add half as many to an opening.
        sampled: share of the prompts answered at a temperature of 0.7 to 1; the others greedily.
        against: evaluation JSONL files with which nothing may share a run of 13 words.
        validation_families: families held out whole; None draws up to three.
        shard_prompts: prompts asked for per shard.
        features: target layers, 0 = the first, whose states are kept beside the answers; the rows do not depend
            on them.

    Raises:
        ValueError: an option out of range.
    """

    source: str = "mixed"
    prompts: str | Path | None = None
    seed: int = 0
    max_new_tokens: int = 144
    prompt_tokens: int = 288
    sampled: float = 0.2
    against: tuple[str | Path, ...] = ()
    validation_families: tuple[str, ...] | None = None
    shard_prompts: int = 96
    features: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source: expected one of {SOURCES}, got {self.source!r}")
        if (self.source == "file") != (self.prompts is not None):
            raise ValueError(
                f"prompts: a file of prompts goes with source 'file' and no other, got source {self.source!r} "
                f"and {self.prompts}"
            )
        if not 0 <= self.sampled <= 1:
            raise ValueError(f"sampled: expected a share between 0 and 1, got {self.sampled}")
        for name, least in (("max_new_tokens", 1), ("prompt_tokens", 8), ("shard_prompts", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.shard_prompts > _LARGEST_SHARD:
            raise ValueError(f"shard_prompts: expected at most {_LARGEST_SHARD}, got {self.shard_prompts}")


@dataclass(frozen=True)
class Draft:
    """A prompt to be answered, or the opening of one.

    Attributes:
        place: its number in the whole sequence.
        text: the prompt, or what the target is to continue. opening: whether it is the latter.
        ending: what follows the target's words.
    """

    place: int
    id: str
    family: str
    text: str
    opening: bool = False
    ending: str = ""


class PromptSource:
    """The prompts of a run, shard by shard.

    Args:
        count: prompts asked for, rounded up to whole shards; None: all of a file, or 960.

    Raises:
        ValueError: a file that cannot be read, too many of the generator's prompts, or unknown families.

    Attributes:
        shards: how many there are. families: sorted names of those that may occur.
        validation: families held out.
    """

    def __init__(self, options: DataOptions, count: int | None = None) -> None:
        if count is not None and count < 1:
            raise ValueError(f"count: expected at least 1, got {count}")
        self._options, size = options, options.shard_prompts
        given = None if options.prompts is None else prompts.read_prompts(options.prompts)
        wanted = count or (DEFAULT_COUNT if given is None else len(given))
        self.shards = -(-(wanted if given is None else min(wanted, len(given))) // size)
        self._places = self.shards * size if given is None else min(self.shards * size, len(given))
        self._given = self._generated() if given is None else given
        self.families = sorted({p["family"] for p in given} if given else _families(options.source))
        self.validation = _held_out(options, self.families)

    def size(self, shard: int) -> int:
        """Prompts asked for in a shard: the same for all but the last of a file."""
        size = self._options.shard_prompts
        return min(size, self._places - shard * size)

    def shard(self, number: int) -> list[Draft]:
        """The drafts of a shard, in order."""
        first = number * self._options.shard_prompts
        return [self._draft(place) for place in range(first, first + self.size(number))]

    def _generated(self) -> list[dict[str, str]]:
        count = {"own": self._places, "mixed": -(-self._places // _ONE_OWN_IN)}.get(self._options.source, 0)
        try:
            return prompts.generate_prompts(count, _OWN_SEED + self._options.seed) if count else []
        except ValueError as error:
            raise ValueError(
                f"source {self._options.source!r} needs {count} of the generator's prompts for "
                f"{self._places} in all, but {error}; source 'target' has no such limit"
            ) from error

    def _draft(self, place: int) -> Draft:
        source = self._options.source
        if source == "target" or (source == "mixed" and place % _ONE_OWN_IN):
            draw = Draw(f"opening:{self._options.seed}:{place}")
            family = draw.pick(openings.FAMILIES)
            text, ending = openings.opening(draw, family), openings.ending(draw, family)
            return Draft(place, f"target/{place:06d}", family, text, True, ending)
        given = self._given[place // _ONE_OWN_IN if source == "mixed" else place]
        return Draft(place, given["id"], given["family"], given["prompt"])


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file's bytes.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file, got {error.strerror or error}") from error


def _families(source: str) -> set[str]:
    return {
        *(prompts.FAMILIES if source != "target" else ()),
        *(openings.FAMILIES if source != "own" else ()),
    }


def _held_out(options: DataOptions, families: Sequence[str]) -> list[str]:
    """Sorted names of the families for validation; they do not depend on how many prompts are made."""
    asked = options.validation_families
    if asked is None:
        draw = Draw(f"validation:{options.seed}")
        if options.source != "mixed":
            return sorted(draw.some(families, min(3, len(families) // 3)))
        rare = [f for f in families if f not in openings.FAMILIES]  # three of these would be too few rows
        return sorted([*draw.some(openings.FAMILIES, 2), draw.pick(rare)])
    unknown = sorted(set(asked) - set(families))
    if unknown:
        raise ValueError(f"validation_families: expected some of {list(families)}, got {unknown}")
    if len(set(asked)) == len(families):
        raise ValueError(f"validation_families: nothing is left to train on, got all of {list(families)}")
    return sorted(set(asked))


def run_settings(llm: LLM, options: DataOptions, source: PromptSource) -> dict[str, Any]:
    """Everything that decides the rows of a shard."""
    return {
        "target": llm.target.fingerprint,
        "tokenizer": llm.tokenizer.fingerprint,
        "chat_template": llm.tokenizer.template_fingerprint,
        "weights": llm.weights,
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "device": llm.device.type,
        "source": options.source,
        "prompts": None if options.prompts is None else file_hash(options.prompts),
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "prompt_tokens": options.prompt_tokens,
        "sampled": options.sampled,
        "against": sorted(file_hash(path) for path in options.against),
        "validation_families": source.validation,
        "shard_prompts": options.shard_prompts,
    }
