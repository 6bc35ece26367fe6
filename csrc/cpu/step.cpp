// One call verifies and commits, one call drafts: the engine's step over a packed decoder.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "context.h"
#include "decoder_pass.h"
#include "head_choice.h"
#include "step_state.h"

namespace blockpilot {
namespace {

constexpr float LOWEST_TEMPERATURE = 1e-5f;  // `choose` divides by it

// Noise of the packed target rows, [rows][vocabulary]; null where every request is greedy.
const float* check_noise(const std::optional<at::Tensor>& noise, int64_t rows, int64_t vocab) {
  if (!noise) return nullptr;
  TORCH_CHECK_VALUE(noise->dim() == 2 && noise->size(0) >= rows, "noise: expected at least ", rows,
                    " rows, got shape ", noise->sizes());
  check_tensor("noise", *noise, at::kFloat, {noise->size(0), vocab});
  TORCH_CHECK_VALUE(noise->is_contiguous(), "noise: expected a contiguous tensor");
  return noise->const_data_ptr<float>();
}

// Packed target rows in front of the end of the last member's.
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

// The stop ids of a slot, if it may not choose them for the token at `position`.
void ban_stops(const StepState& state, int64_t slot, int64_t position, Draw& draw) {
  if (position >= state.free_from[slot]) return;
  draw.banned = state.stop_ids + slot * state.stops;
  draw.banned_count = state.stops;
}

std::tuple<at::Tensor, std::vector<int64_t>> verify_commit(
    at::TensorList weights, const at::Tensor& plan, at::ArrayRef<double> scalars, const at::Tensor& keys,
    const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin, at::TensorList state_tensors,
    at::IntArrayRef slots, at::IntArrayRef widths, at::IntArrayRef feature_layers,
    const std::optional<at::Tensor>& noise, bool bans, bool filtered) {
  const Decoder d = read_decoder(weights, plan, scalars);
  const Cache cache = read_cache(keys, values, d.shape, d.depth());
  const StepState state(state_tensors);
  const Members members = state.members(slots, widths);
  const int64_t vocab = d.head.rows;
  const float* drawn = check_noise(noise, members.rows, vocab);
  state.begin_block();
  Pass pass = block_rows(state, members, cos, sin, cache, d.shape);

  const Isa isa = current_isa();
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  const Arena::Scope scope(arena());
  float* x = arena().take<float>(rows * d.shape.hidden);
  std::vector<int64_t> ids;
  std::vector<Draw> draws;
  for (const Row& row : pass.rows) {
    const int64_t r = row.slot, column = row.position - state.cached(r);
    ids.push_back(state.block[r * state.widest + column]);
    Draw draw{drawn ? drawn + row.source * vocab : nullptr,
              {state.temperature[r], state.top_p[r], state.min_p[r], state.top_k[r], filtered}};
    if (bans) ban_stops(state, r, row.position + 1, draw);
    draws.push_back(draw);
  }
  const at::Tensor features = run_rows(*isa.model, d, cache, pass, ids, members.rows, feature_layers, x);
  const Head head = {d.head, nullptr, d.logit_scale};
  const std::vector<Choice> choices =
      choose_head(isa, head, d.shape.rounding, {x, rows, d.norm, d.shape.eps}, draws, pass.threads);
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const Row& row = pass.rows[i];
    const int64_t at = row.slot * state.widest + row.position - state.cached(row.slot);
    state.choice[at] = choices[i].id;
    state.finite[at] = choices[i].finite;
  }
  return {features, state.commit(members)};
}

// A drafter's own constants.
struct DraftRules {
  const int64_t* ids;  // of the head's columns; null: column and id are the same
  float temperature;
};

// Draws of the columns 1 … of every block: column j guesses what target row j − 1 chooses.
std::vector<Draw> draft_draws(const StepState& state, const Members& members, at::IntArrayRef sources,
                              const Pass& pass, const DraftRules& rules, const float* noise, int64_t vocab,
                              bool bans) {
  std::vector<Draw> draws;
  std::size_t member = 0;
  for (const Row& row : pass.rows) {
    const int64_t r = row.slot, column = row.position - state.cached(r);
    while (members.slots[member] != r) ++member;
    if (column == 0) continue;
    const float own = state.temperature[r];
    const float cooled = own > 0.0f ? std::max(own * rules.temperature, LOWEST_TEMPERATURE) : 0.0f;
    Draw draw{noise ? noise + (sources[member] + column - 1) * vocab : nullptr,
              {cooled, 1.0f, 0.0f, 0, false}};
    if (bans) ban_stops(state, r, row.position, draw);
    draws.push_back(draw);
  }
  return draws;
}

// The rows of columns 1 … of every block, one after another in the arena; `to`: where their choices go.
float* guessing_rows(const StepState& state, const Pass& pass, const float* x, int64_t hidden,
                     const at::Tensor& drafts, std::vector<int64_t*>& to) {
  float* rows = arena().take<float>(static_cast<int64_t>(pass.rows.size()) * hidden);
  for (std::size_t i = 0; i < pass.rows.size(); ++i) {
    const Row& row = pass.rows[i];
    const int64_t column = row.position - state.cached(row.slot);
    if (column == 0) continue;
    std::copy_n(x + static_cast<int64_t>(i) * hidden, hidden,
                rows + static_cast<int64_t>(to.size()) * hidden);
    to.push_back(drafts.mutable_data_ptr<int64_t>() + row.slot * drafts.size(1) + column - 1);
  }
  return rows;
}

// Ids of a draft head's columns, rising ones of the vocabulary; null for all.
const int64_t* check_ids(const std::optional<at::Tensor>& ids, int64_t columns, int64_t vocab) {
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

int64_t draft_block(at::TensorList weights, const at::Tensor& plan, at::ArrayRef<double> scalars,
                    const at::Tensor& keys, const at::Tensor& values, const at::Tensor& cos,
                    const at::Tensor& sin, at::TensorList state_tensors, at::IntArrayRef slots,
                    at::IntArrayRef widths, at::IntArrayRef sources, int64_t mask,
                    const std::optional<at::Tensor>& draft_ids, const std::optional<at::Tensor>& noise,
                    double temperature, bool bans, const at::Tensor& drafts) {
  const Decoder d = read_decoder(weights, plan, scalars);
  const Shape& s = d.shape;
  const Cache cache = read_cache(keys, values, s, d.depth());
  const StepState state(state_tensors);
  const Members members = state.members(slots, widths);
  const int64_t vocab = d.embedding.rows;
  const float* drawn = check_noise(noise, check_sources(sources, members), vocab);
  check_tensor("drafts", drafts, at::kLong, {state.slots, drafts.dim() == 2 ? drafts.size(1) : -1});
  TORCH_CHECK_VALUE(drafts.is_contiguous() && drafts.size(1) + 1 >= state.widest,
                    "drafts: expected a contiguous tensor of at least ", state.widest - 1, " columns");
  const DraftRules rules = {check_ids(draft_ids, d.head.rows, vocab), static_cast<float>(temperature)};
  state.begin_block();
  Pass pass = block_rows(state, members, cos, sin, cache, s);

  const Isa isa = current_isa();
  const Arena::Scope scope(arena());
  float* x = arena().take<float>(static_cast<int64_t>(pass.rows.size()) * s.hidden);
  std::vector<int64_t> ids;
  for (const Row& row : pass.rows)
    ids.push_back(row.position == state.cached(row.slot) ? state.block[row.slot * state.widest] : mask);
  run_rows(*isa.model, d, cache, pass, ids, members.rows, {}, x);
  std::vector<int64_t*> to;
  const float* guessing = guessing_rows(state, pass, x, s.hidden, drafts, to);
  const Input input = {guessing, static_cast<int64_t>(to.size()), d.norm, s.eps};
  const std::vector<Choice> choices =
      choose_head(isa, {d.head, rules.ids, d.logit_scale}, s.rounding, input,
                  draft_draws(state, members, sources, pass, rules, drawn, vocab, bans), pass.threads);
  for (std::size_t i = 0; i < choices.size(); ++i) *to[i] = choices[i].id;
  return std::count_if(choices.begin(), choices.end(), [](const Choice& c) { return !c.finite; });
}

void commit_context(at::TensorList weights, const at::Tensor& plan, double eps, const at::Tensor& keys,
                    const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin,
                    at::TensorList state_tensors, at::IntArrayRef slots, at::IntArrayRef widths,
                    at::IntArrayRef sources, const at::Tensor& features) {
  const Context c = read_context(weights, plan, eps);
  const Cache cache = read_cache(keys, values, c.shape, c.depth());
  const StepState state(state_tensors);
  const Members members = state.members(slots, widths);
  const int64_t covered = check_rope(cos, sin, c.shape);
  check_sources(sources, members);
  check_tensor("features", features, at::kFloat, {features.numel() / c.fc.columns, c.fc.columns});
  TORCH_CHECK_VALUE(features.is_contiguous(), "features: expected a contiguous tensor");
  TORCH_CHECK_VALUE(state.slots <= cache.slots, "state: expected at most ", cache.slots, " slots, got ",
                    state.slots);
  Pass pass = empty_pass(cos, sin);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const int64_t r = slots[i], rows = std::clamp<int64_t>(state.count[r], 0, widths[i]);
    const int64_t first = std::clamp<int64_t>(state.length[r], 0, MOST) - 1 - rows;
    TORCH_CHECK_VALUE(rows <= 0 || (first >= 0 && first + rows <= std::min(cache.capacity, covered)),
                      "length: expected at most ", std::min(cache.capacity, covered), " positions, got ",
                      first + rows);
    TORCH_CHECK_VALUE(sources[i] + rows <= features.size(0), "features: expected at least ",
                      sources[i] + rows, " rows, got ", features.size(0));
    for (int64_t j = 0; j < rows; ++j)
      pass.rows.push_back({sources[i] + j, r, first + j, first + j + 1, first + j});
  }
  append_context(*current_isa().model, c, cache, pass, features.const_data_ptr<float>());
}

}  // namespace
}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) {
  m.impl("verify_commit", &blockpilot::verify_commit);
  m.impl("draft_block", &blockpilot::draft_block);
  m.impl("commit_context", &blockpilot::commit_context);
}
