"""Data for drafters: prompts with the target's own answers, made shard by shard into a folder (`answers`).

A drafter is to guess what its target says, so it learns from that and from nothing else. Every shard depends on the
options and its number alone: a run that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.output import Output
from blockpilot.params import SamplingParams
from blockpilot.progress import progress_bar
from blockpilot.training.answers import AnswerStore, prompt_key
from blockpilot.training.draft_data import Heard, Listener, feature_cache
from blockpilot.training.prompt_sources import DataOptions, Draft, PromptSource, run_settings
from blockpilot.training.prompts import EvaluationTexts
from blockpilot.training.randomness import Draw
from blockpilot.training.replay import standing_in
from blockpilot.training.user_turn import UserTurn

if TYPE_CHECKING:
    from blockpilot.llm import LLM

DROPPED = {
    "unfinished": "the target did not end the prompt it made up",
    "short": "it made up fewer than 12 characters",
    "long": "the prompt has more tokens than allowed",
    "repeated": "the folder has the prompt already",
    "contaminated": "the prompt shares a run of words with an evaluation file",
    "contaminated_answer": "the answer does",
    "failed": "the target's logits were not finite",
}
_SHORTEST = 12
_PROMPT_TEMPERATURE, _PROMPT_TOP_P = 0.9, 0.92
Advance = Callable[[float], None]


@dataclass(frozen=True)
class DataSummary:
    """What a folder of answers holds after a run.

    Attributes:
        prompts: asked for, in whole shards. skipped: those asked for in earlier runs.
        answered: rows. validation: rows of the families held out. tokens: of all answers.
        dropped: reason (`DROPPED`) → prompts. families: family → rows.
        path: the folder.
    """

    prompts: int
    skipped: int
    answered: int
    validation: int
    tokens: int
    dropped: dict[str, int]
    families: dict[str, int]
    path: Path


def make_data(
    llm: LLM,
    folder: str | Path,
    options: DataOptions | None = None,
    *,
    count: int | None = None,
    progress: bool = True,
) -> DataSummary:
    """Makes prompts and answers them until the folder holds the shards of `count` prompts.

    Args:
        llm: the target; a drafter changes the time and not the rows. It must hold `prompt_tokens` + `max_new_tokens`
            positions a request.
        folder: a new one, or one of the same options, which is continued.
        count: prompts asked for, rounded up to whole shards; None: all of a file, or 960.
        progress: bar with the time left, on stderr.

    Raises:
        ValueError: bad options, a folder of other options or with a damaged shard, or a target that cannot make
            prompts.
    """
    options = options or DataOptions()
    positions = options.prompt_tokens + options.max_new_tokens
    if llm.max_length < positions:
        raise ValueError(
            f"llm: expected max_length >= {positions} (prompt_tokens {options.prompt_tokens} + max_new_tokens "
            f"{options.max_new_tokens}), got {llm.max_length}"
        )
    _check_features(options.features or (), llm)
    source = PromptSource(options, count)
    maker = _Maker(llm, options, source.validation)
    cache = feature_cache(Path(folder), llm.target.fingerprint, options.features or ())
    with AnswerStore(folder, run_settings(llm, options, source)) as store:
        before = sum(shard["prompts"] for shard in store.shards)
        todo = range(len(store.shards), source.shards)
        finished, total = before, before + sum(map(source.size, todo))
        with progress_bar("answering", total, show=progress, done=before) as show:
            for number in todo:
                size = source.size(number)
                advance = partial(_show_share, show, finished, size)
                rows, dropped = maker.shard(source.shard(number), store.seen, advance)
                store.append(rows, size, dropped)
                finished += size
                if options.features:
                    cache.save(store.shards[-1]["file"], store.shards[-1]["sha256"], maker.heard)
        return _summary(store, before)


def _check_features(layers: Sequence[int], llm: LLM) -> None:
    if layers and not 0 <= min(layers) <= max(layers) < llm.target.config.num_layers:
        raise ValueError(
            f"features: expected target layers of 0 to {llm.target.config.num_layers - 1}, got {list(layers)}"
        )


class _Maker:
    """Drafts → answered rows. Constants of a run."""

    def __init__(self, llm: LLM, options: DataOptions, validation: Sequence[str]) -> None:
        self.llm, self.options, self.validation = llm, options, frozenset(validation)
        self.turn = UserTurn.of(llm.tokenizer) if options.source in ("target", "mixed") else None
        self.evaluation = EvaluationTexts(options.against)
        self.heard: list[Heard] = []  # of the rows of the last shard

    def shard(
        self, drafts: Sequence[Draft], seen: set[str], advance: Advance
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """(rows, reason → dropped prompts). `seen`: keys of earlier shards' prompts."""
        dropped: Counter[str] = Counter()
        opened = any(d.opening for d in drafts)
        texts = self._texts(drafts, dropped, lambda share: advance(share / 2))
        prompts = self._usable(drafts, texts, seen, dropped)
        rows = self._answer(prompts, dropped, lambda share: advance((share + 1) / 2 if opened else share))
        advance(1)
        return rows, {reason: dropped[reason] for reason in DROPPED}

    def _texts(self, drafts: Sequence[Draft], dropped: Counter[str], advance: Advance) -> list[str | None]:
        """Whole prompts; None where the target made none of an opening."""
        texts: list[str | None] = [None if d.opening else d.text for d in drafts]
        if self.turn is None:
            return texts
        limit = max(1, self.options.prompt_tokens // 2)
        asked, ids, params = [], [], []
        for i, draft in enumerate(drafts):
            if draft.opening:
                opened = self.turn.open(draft.text)
                if len(opened) + limit > self.llm.max_length:
                    dropped["long"] += 1
                    continue
                asked.append(i)
                ids.append(opened)
                params.append(self._sampling(draft, "prompt", limit))
        for i, output in zip(asked, _generate(self.llm, ids, params, advance), strict=True):
            texts[i] = self._made_up(drafts[i], output, dropped)
        return texts

    def _made_up(self, draft: Draft, output: Output, dropped: Counter[str]) -> str | None:
        assert self.turn is not None
        if output.finish_reason != "stop":
            dropped["failed" if output.error else "unfinished"] += 1
            return None
        text = self.turn.words([*output.prompt_token_ids, *output.token_ids[:-1]])
        if len(text) < _SHORTEST:
            dropped["short"] += 1
            return None
        return text + draft.ending

    def _usable(
        self, drafts: Sequence[Draft], texts: Sequence[str | None], seen: set[str], dropped: Counter[str]
    ) -> list[tuple[Draft, str, list[int]]]:
        """(draft, text, ids) of the prompts worth answering."""
        prompts, here = [], set[str]()
        for draft, text in zip(drafts, texts, strict=True):
            if text is None:
                continue
            ids, key = self._encode(draft, text), prompt_key(text)
            if len(ids) > self.options.prompt_tokens:
                dropped["long"] += 1
            elif key in seen or key in here:
                dropped["repeated"] += 1
            elif self.evaluation.shares(text):
                dropped["contaminated"] += 1
            else:
                here.add(key)
                prompts.append((draft, text, ids))
        return prompts

    def _answer(
        self, prompts: Sequence[tuple[Draft, str, list[int]]], dropped: Counter[str], advance: Advance
    ) -> list[dict[str, Any]]:
        params = [self._sampling(draft, "answer", self.options.max_new_tokens) for draft, _, _ in prompts]
        with self._listening() as listener:
            outputs = _generate(self.llm, [ids for _, _, ids in prompts], params, advance)
        rows, self.heard = [], []
        for i, ((draft, text, ids), chosen, output) in enumerate(zip(prompts, params, outputs, strict=True)):
            if output.error or self.evaluation.shares(output.text):
                dropped["failed" if output.error else "contaminated_answer"] += 1
                continue
            if listener is not None:
                self.heard.append(listener.heard(i, len(output.token_ids)))
            rows.append({
                "id": draft.id,
                "family": draft.family,
                "split": "validation" if draft.family in self.validation else "train",
                "prompt": text,
                "prompt_ids": ids,
                "output_ids": output.token_ids,
                "temperature": chosen.temperature,
                "seed": chosen.seed,
                "finish_reason": output.finish_reason,
            })  # fmt: skip
        return rows

    @contextmanager
    def _listening(self) -> Iterator[Listener | None]:
        """Keeps what the target says besides ids, if options ask for it."""
        if not self.options.features:
            yield None
            return
        target = self.llm.target
        before, listener = target.feature_layers, Listener(target, self.options.max_new_tokens)
        target.use_features([layer + 1 for layer in self.options.features])
        try:
            with standing_in(self.llm, listener):
                yield listener
        finally:
            target.use_features(before)

    def _encode(self, draft: Draft, text: str) -> list[int]:
        try:
            return self.llm.tokenizer.encode_prompt(text)
        except (TypeError, UnicodeError) as error:
            raise ValueError(f"prompt {draft.id}: expected valid Unicode text, got {text!r}") from error

    def _sampling(self, draft: Draft, what: str, limit: int) -> SamplingParams:
        """Settings of one request, the same wherever and beside whatever it runs."""
        name = f"{what}:{self.options.seed}:{draft.place}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        if what == "prompt":
            return SamplingParams(
                max_new_tokens=limit,
                temperature=_PROMPT_TEMPERATURE,
                top_p=_PROMPT_TOP_P,
                seed=seed,
                stop_token_ids=(self.turn.stop,) if self.turn else (),
            )
        draw = Draw(name)
        sampled = draw.number(0, 9999) < self.options.sampled * 10_000
        temperature = round(0.7 + draw.number(0, 30) / 100, 2) if sampled else 0.0
        return SamplingParams(max_new_tokens=limit, temperature=temperature, seed=seed)


def _summary(store: AnswerStore, before: int) -> DataSummary:
    dropped: Counter[str] = Counter()
    for shard in store.shards:
        dropped.update(shard["dropped"])
    return DataSummary(
        prompts=sum(shard["prompts"] for shard in store.shards),
        skipped=before,
        answered=sum(shard["rows"] for shard in store.shards),
        validation=store.validation,
        tokens=sum(shard["tokens"] for shard in store.shards),
        dropped={reason: dropped[reason] for reason in DROPPED},
        families=dict(sorted(store.families.items())),
        path=store.folder,
    )


def _generate(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], advance: Advance
) -> list[Output]:
    """Outputs in order; `advance` gets the finished share."""
    handles = [llm.submit(ids, p) for ids, p in zip(prompts, params, strict=True)]
    try:
        while not all(h.finished for h in handles):
            llm.step()
            advance(sum(h.finished for h in handles) / len(handles))
    finally:
        for handle in handles:
            llm.cancel(handle)
    return [h.output for h in handles if h.output is not None]


def _show_share(show: Callable[[float], None], first: int, size: int, share: float) -> None:
    """Shows a shard's finished share among the prompts of the run."""
    show(first + share * size)
