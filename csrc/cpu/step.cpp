// One call verifies and commits, one call drafts: the engine's step over a packed decoder.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "context.h"
#include "decoder_pass.h"
#include "drafting.h"
#include "pool.h"
#include "step_state.h"
#include "step_tree.h"

namespace blockpilot {
namespace {

// Draws of the target's rows: a node's noise is that of the position it chooses, whatever row it is in.
std::vector<Draw> target_draws(const StepState& state, const Pass& pass, const float* noise, int64_t vocab,
                               bool bans, bool filtered) {
  std::vector<Draw> draws;
  for (const Row& row : pass.rows) {
    const int64_t r = row.slot, chosen = row.source + row.position - row.place;
    Draw draw{noise ? noise + chosen * vocab : nullptr,
              {state.temperature[r], state.top_p[r], state.min_p[r], state.top_k[r], filtered}};
    if (bans) ban_stops(state, r, row.position + 1, draw);
    draws.push_back(draw);
  }
  return draws;
}

std::tuple<at::Tensor, std::vector<int64_t>> verify_commit(
    at::TensorList weights, const at::Tensor& plan, at::ArrayRef<double> scalars, const at::Tensor& keys,
    const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin, at::TensorList state_tensors,
    at::IntArrayRef slots, at::IntArrayRef widths, at::IntArrayRef feature_layers,
    const std::optional<at::Tensor>& noise, bool bans, bool filtered, at::TensorList drafted) {
  const Decoder d = read_decoder(weights, plan, scalars);
  const Cache cache = read_cache(keys, values, d.shape, d.depth());
  const StepState state(state_tensors);
  const Members members = state.members(slots, widths);
  const int64_t vocab = d.head.rows;
  const float* drawn = check_noise(noise, members.rows, vocab);
  state.begin_block();
  std::optional<StepTrees> trees;
  if (!drafted.empty()) {
    for (const Layer& layer : d.layers) TORCH_CHECK_VALUE(layer.causal, "tree: expected causal layers");
    trees.emplace(state, members, drafted);
  }
  Pass pass =
      trees ? trees->rows(cos, sin, cache, d.shape) : block_rows(state, members, cos, sin, cache, d.shape);

  const Isa isa = current_isa();
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  const Arena::Scope scope(arena());
  float* x = arena().take<float>(rows * d.shape.hidden);
  const auto cell = [&](const Row& row) {
    return row.slot * state.widest + row.place - state.cached(row.slot);
  };
  std::vector<int64_t> ids;
  for (const Row& row : pass.rows) ids.push_back(state.block[cell(row)]);
  at::Tensor features = run_rows(*isa.model, d, cache, pass, ids, members.rows, feature_layers, x);
  const Head head = {d.head, nullptr, d.logit_scale};
  const std::vector<Choice> choices =
      choose_head(isa, head, d.shape.rounding, {x, rows, d.norm, d.shape.eps},
                  target_draws(state, pass, drawn, vocab, bans, filtered), pass.threads);
  read_again();  // while threads still wait for a loop
  for (std::size_t i = 0; i < choices.size(); ++i) {
    state.choice[cell(pass.rows[i])] = choices[i].id;
    state.finite[cell(pass.rows[i])] = choices[i].finite;
  }
  if (trees) trees->follow();
  const std::vector<int64_t> report = state.commit(members);
  if (trees) trees->gather(cache, d.shape, d.depth(), features);
  return {features, report};
}

// Draws of the columns 1 … of every block: column j guesses what target row j − 1 chooses.
std::vector<Draw> draft_draws(const StepState& state, const Members& members, at::IntArrayRef sources,
                              const Pass& pass, const Rules& rules) {
  std::vector<Draw> draws;
  std::size_t member = 0;
  for (const Row& row : pass.rows) {
    const int64_t r = row.slot, column = row.position - state.cached(r);
    while (members.slots[member] != r) ++member;
    if (column > 0) draws.push_back(rules.draw(state, r, sources[member], column));
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

int64_t draft_block(at::TensorList weights, const at::Tensor& plan, at::ArrayRef<double> scalars,
                    const at::Tensor& keys, const at::Tensor& values, const at::Tensor& cos,
                    const at::Tensor& sin, at::TensorList state_tensors, at::IntArrayRef slots,
                    at::IntArrayRef widths, at::IntArrayRef sources, int64_t mask,
                    const std::optional<at::Tensor>& draft_ids, const std::optional<at::Tensor>& noise,
                    double temperature, bool bans, const at::Tensor& drafts,
                    const std::optional<at::Tensor>& copied) {
  const Decoder d = read_decoder(weights, plan, scalars);
  const Shape& s = d.shape;
  const Cache cache = read_cache(keys, values, s, d.depth());
  const StepState state(state_tensors);
  const Members members = state.members(slots, widths);
  note_read(weights[0].const_data_ptr(), weights[0].numel());
  const int64_t vocab = d.embedding.rows;
  const Rules rules = {check_noise(noise, check_sources(sources, members), vocab), vocab,
                       check_draft_ids(draft_ids, d.head.rows, vocab), static_cast<float>(temperature), bans};
  check_drafts(drafts, state);
  const at::Tensor left_out = read_copied(copied, state);
  state.begin_block();
  Pass pass = block_rows(state, members, cos, sin, cache, s, left_out);
  if (pass.rows.empty()) return 0;

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
                  draft_draws(state, members, sources, pass, rules), pass.threads);
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
