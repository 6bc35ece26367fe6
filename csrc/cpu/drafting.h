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

// Slots that nothing is drafted for, [slots]; undefined where every slot drafts.
at::Tensor read_copied(const std::optional<at::Tensor>& copied, const StepState& state);

// Whether a slot is one of those.
inline bool is_copied(const at::Tensor& copied, int64_t slot) {
  return copied.defined() && copied.const_data_ptr<bool>()[slot];
}

// The stop ids of a slot, if it may not choose them for the token at `position`.
void ban_stops(const StepState& state, int64_t slot, int64_t position, Draw& draw);

// How drafts become ids.
struct Rules {
  const float* noise;  // as of `check_noise`
  int64_t vocab;
  const int64_t* ids;  // as of `check_draft_ids`
  float temperature;   // factor on a request's
  bool bans;           // some slot may not choose its stop ids yet

  // Of a slot's draft `depth` behind the anchor; the packed target row `source` + depth − 1 chooses the same.
  Draw draw(const StepState& state, int64_t slot, int64_t source, int64_t depth) const;
};

// Features of the pairs that the last step committed, [slots][room][columns].
struct Pending {
  const float* features;
  int64_t room, columns;

  const float* of(int64_t slot, int64_t pair) const { return features + (slot * room + pair) * columns; }

  // How many of a slot wait: 1 … as many as there are tokens and rows for.
  int64_t count(const StepState& state, int64_t slot) const;
};

Pending read_pending(const at::Tensor& pending, const StepState& state, int64_t columns);

}  // namespace blockpilot
