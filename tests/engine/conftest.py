"""The engine suite runs once per backend; Triton's interpreter takes 0.1 – 3 s per op, so it runs a part of it."""

from __future__ import annotations

import pytest

from tests.engine.pair import INTERPRETED

# Together these run every op in every mode: widths, batches, stops, limits, bans, filters and failures.
IN_THE_INTERPRETER = (
    "test_alone_at_every_width_and_accepted_count[float32-greedy]",
    "test_alone_at_every_width_and_accepted_count[float32-sampled]",
    "test_mixed_batches[float32-3]",
    "test_stop_id_at_every_offset_of_a_block[4-greedy]",
    "test_eos_budget_and_stop_string_together[3]",
    "test_min_new_tokens_allows_a_stop_exactly_after_them",
    "test_every_op_runs_on_the_forced_backend[triton]",
    "test_nan_in_everything_unwritten_changes_no_bit[float32]",
    "test_pointers_never_change",
    "test_first_token_touches_one_slot_only",
    "test_step_reads_nothing_on_the_host[triton]",
    "test_non_finite_prompt_fails_at_prefill",
    "test_a_drafter_with_the_targets_distribution_is_always_accepted[0-False-True]",
    "test_mixed_with_chains_and_plain[float32-3]",
    "test_stream_equals_text_and_early_close_leaves_the_engine_usable",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        reason = "too many steps for Triton's interpreter; this test runs on the reference and C++ backends"
        for item in items:
            if item.name not in IN_THE_INTERPRETER:
                item.add_marker(pytest.mark.skip(reason=reason))
