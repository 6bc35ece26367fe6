// What the ops of a step share that choose drafts or verify them.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "head_choice.h"
#include "step_state.h"

namespace blockpilot {

// Noise of the packed target rows, [rows][vocabulary]; null where every request is greedy.
const float* check_noise(const std::optional<at::Tensor>& noise, int64_t rows, int64_t vocab);

// Packed target rows in front of the end of the last member's.
int64_t check_sources(at::IntArrayRef sources, const Members& members);

// Ids of a draft head's columns, rising ones of the vocabulary; null for all.
const int64_t* check_draft_ids(const std::optional<at::Tensor>& ids, int64_t columns, int64_t vocab);

// [slots][at least widest − 1] drafts.
void check_drafts(const at::Tensor& drafts, const StepState& state);

// The stop ids of a slot, if it may not choose them for the token at `position`.
void ban_stops(const StepState& state, int64_t slot, int64_t position, Draw& draw);

// How a slot's draft of `position` is drawn; `factor` on its request's temperature.
Draw draft_draw(const StepState& state, int64_t slot, const float* noise, float factor, int64_t position,
                bool bans);

}  // namespace blockpilot
