"""Prompts by their place, and the families held out."""

from __future__ import annotations

from blockpilot.training import openings
from blockpilot.training.prompt_sources import DataOptions, PromptSource


def test_a_draft_depends_on_its_place_and_not_on_shards_or_counts():
    for source in ("own", "target", "mixed"):
        small, large = (DataOptions(source=source, shard_prompts=n) for n in (5, 20))
        parts = [d for i in range(4) for d in PromptSource(small, 20).shard(i)]
        assert parts == PromptSource(large, 50).shard(0)
        assert len({d.id for d in PromptSource(large, 20).shard(0)}) == 20
        assert PromptSource(large, 50).shards == 3
        assert PromptSource(DataOptions(source=source, seed=1)).shard(0) != PromptSource(
            DataOptions(source=source)
        ).shard(0)


def test_validation_takes_whole_families_whatever_the_count():
    for source, possible in (("own", 21), ("target", len(openings.FAMILIES)), ("mixed", 30)):
        held = [PromptSource(DataOptions(source=source, seed=4), n).validation for n in (1, 900)]
        assert held[0] == held[1] and len(held[0]) == 3
        assert len(PromptSource(DataOptions(source=source), 1).families) >= possible
    drawn = [PromptSource(DataOptions(seed=s), 1).validation for s in range(9)]
    assert len(set(map(tuple, drawn))) > 5
    assert all(len(set(held) & set(openings.FAMILIES)) == 2 for held in drawn)
