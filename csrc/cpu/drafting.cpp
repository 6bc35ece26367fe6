#include "drafting.h"

#include <algorithm>

namespace blockpilot {
namespace {

constexpr float LOWEST_TEMPERATURE = 1e-5f;  // `choose` divides by it

}  // namespace

const float* check_noise(const std::optional<at::Tensor>& noise, int64_t rows, int64_t vocab) {
  if (!noise) return nullptr;
  TORCH_CHECK_VALUE(noise->dim() == 2 && noise->size(0) >= rows, "noise: expected at least ", rows,
                    " rows, got shape ", noise->sizes());
  check_tensor("noise", *noise, at::kFloat, {noise->size(0), vocab});
  TORCH_CHECK_VALUE(noise->is_contiguous(), "noise: expected a contiguous tensor");
  return noise->const_data_ptr<float>();
}

int64_t check_sources(at::IntArrayRef sources, const Members& members) {
  TORCH_CHECK_VALUE(sources.size() == members.slots.size(), "sources: expected ", members.slots.size(),
                    ", got ", sources.size());
  int64_t rows = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    TORCH_CHECK_VALUE(sources[i] >= 0 && sources[i] < MOST, "sources: expected 0 … ", MOST - 1, ", got ",
                      sources[i]);
    rows = std::max(rows, sources[i] + members.widths[i]);
  }
  return rows;
}

const int64_t* check_draft_ids(const std::optional<at::Tensor>& ids, int64_t columns, int64_t vocab) {
  if (!ids) {
    TORCH_CHECK_VALUE(columns == vocab, "draft_ids: expected those of ", columns, " columns, got none");
    return nullptr;
  }
  check_tensor("draft_ids", *ids, at::kLong, {columns});
  TORCH_CHECK_VALUE(ids->is_contiguous(), "draft_ids: expected a contiguous tensor");
  const int64_t* at = ids->const_data_ptr<int64_t>();
  bool rising = 0 <= at[0] && at[columns - 1] < vocab;
  for (int64_t i = 1; i < columns; ++i) rising &= at[i - 1] < at[i];
  TORCH_CHECK_VALUE(rising, "draft_ids: expected rising ids of 0 … ", vocab - 1);
  return at;
}

void check_drafts(const at::Tensor& drafts, const StepState& state) {
  check_tensor("drafts", drafts, at::kLong, {state.slots, drafts.dim() == 2 ? drafts.size(1) : -1});
  TORCH_CHECK_VALUE(drafts.is_contiguous() && drafts.size(1) + 1 >= state.widest,
                    "drafts: expected a contiguous tensor of at least ", state.widest - 1, " columns");
}

at::Tensor read_copied(const std::optional<at::Tensor>& copied, const StepState& state) {
  if (!copied) return {};
  check_tensor("copied", *copied, at::kBool, {state.slots});
  return copied->contiguous();
}

void ban_stops(const StepState& state, int64_t slot, int64_t position, Draw& draw) {
  if (position >= state.free_from[slot]) return;
  draw.banned = state.stop_ids + slot * state.stops;
  draw.banned_count = state.stops;
}

Draw Rules::draw(const StepState& state, int64_t slot, int64_t source, int64_t depth) const {
  const float own = state.temperature[slot];
  const float cooled = own > 0.0f ? std::max(own * temperature, LOWEST_TEMPERATURE) : 0.0f;
  Draw draw{noise ? noise + (source + depth - 1) * vocab : nullptr, {cooled, 1.0f, 0.0f, 0, false}};
  if (bans) ban_stops(state, slot, state.cached(slot) + depth, draw);
  return draw;
}

Pending read_pending(const at::Tensor& pending, const StepState& state, int64_t columns) {
  TORCH_CHECK_VALUE(pending.dim() == 3 && pending.size(1) >= state.widest,
                    "pending: expected 3 dimensions and room for ", state.widest, " rows, got ",
                    pending.sizes());
  check_tensor("pending", pending, at::kFloat, {state.slots, pending.size(1), columns});
  TORCH_CHECK_VALUE(pending.is_contiguous(), "pending: expected a contiguous tensor");
  return {pending.const_data_ptr<float>(), pending.size(1), columns};
}

int64_t Pending::count(const StepState& state, int64_t slot) const {
  const int64_t most = std::min(state.cached(slot), room), found = state.count[slot];
  TORCH_CHECK_VALUE(1 <= found && found <= most, "count: expected 1 … ", most, ", got ", found);
  return found;
}

}  // namespace blockpilot
