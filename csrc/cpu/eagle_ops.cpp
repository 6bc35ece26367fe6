// One call drafts a chain with EAGLE-3, one runs any of its passes.
#include "eagle.h"

#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "drafting.h"
#include "pool.h"
#include "step_tensor.h"

namespace blockpilot {
namespace {

std::tuple<at::Tensor, at::Tensor> eagle_forward(
    at::TensorList weights, const at::Tensor& plan, double eps, const at::Tensor& keys,
    const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& x, bool fusing,
    const at::Tensor& tokens, const at::Tensor& slot, const at::Tensor& position, const at::Tensor& exists,
    const at::Tensor& extent, const at::Tensor& head_rows, const std::optional<at::Tensor>& path) {
  const Eagle e = read_eagle(weights, plan, eps);
  const Decoder& d = e.decoder;
  const int64_t n = slot.numel(), hidden = d.shape.hidden, columns = fusing ? e.fc.columns : hidden;
  const Cache cache = read_cache(keys, values, d.shape, 1);
  const at::Tensor paths = path ? read_paths(*path, n, d.layers) : at::Tensor();
  Pass pass = read_pass(cos, sin, slot, position, exists, extent, cache, d.shape, path ? &paths : nullptr);
  check_tensor("tokens", tokens, at::kLong, {n});
  check_tensor("x", x, at::kFloat, {n, columns});
  const at::Tensor ids = tokens.contiguous(), given = x.contiguous(), asked = read_head_rows(head_rows, n);

  const ModelKernels& k = *current_isa().model;
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  const Arena::Scope scope(arena());
  float* from = arena().take<float>(rows * columns);
  float* own = fusing ? arena().take<float>(rows * hidden) : from;
  std::vector<int64_t> said;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t source = pass.rows[static_cast<std::size_t>(i)].source;
    said.push_back(ids.const_data_ptr<int64_t>()[source]);
    std::copy_n(given.const_data_ptr<float>() + source * columns, columns, from + i * columns);
  }
  if (fusing) fuse(k, e, from, rows, pass.threads, own);
  run_pairs(k, e, cache, pass, said, own);
  at::Tensor made = step_zeros(n, hidden);
  for (int64_t i = 0; i < rows; ++i)
    std::copy_n(own + i * hidden, hidden,
                made.mutable_data_ptr<float>() + pass.rows[static_cast<std::size_t>(i)].source * hidden);
  at::Tensor logits = step_tensor(asked.numel(), d.head.rows, at::kFloat);
  run_head(k, d, pass, own, n, asked, logits);
  return {made, logits};
}

// A slot whose drafts go on: what it said last, and the hidden state that guesses what comes next.
struct Chain {
  int64_t slot, source, said;
  const float* hidden;
};

// The pairs of every slot that the last step committed, checked like `block_rows`; their features into `x`.
Pass pending_rows(const StepState& state, const Members& members, const Pending& pending, const Pass& empty,
                  int64_t most, float* x, std::vector<int64_t>& said) {
  Pass pass = empty;
  for (const int64_t r : members.slots) {
    if (state.effective[r] < 1) continue;
    const int64_t cached = state.cached(r), count = pending.count(state, r);
    TORCH_CHECK_VALUE(cached + state.effective[r] <= most, "limit: expected at most ", most,
                      " positions, got ", cached + state.effective[r]);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t position = cached - count + j, row = static_cast<int64_t>(pass.rows.size());
      said.push_back(state.tokens[r * state.capacity + position + 1]);
      std::copy_n(pending.of(r, j), pending.columns, x + row * pending.columns);
      pass.rows.push_back({row, r, position, cached, position});
    }
  }
  return pass;
}

// The chains of the slots whose last pairs are in `x`, but for those that are copied.
std::vector<Chain> first_chains(const StepState& state, const Members& members, at::IntArrayRef sources,
                                const at::Tensor& copied, const float* x, int64_t hidden) {
  std::vector<Chain> chains;
  for (std::size_t i = 0; i < members.slots.size(); ++i) {
    const int64_t r = members.slots[i];
    if (state.effective[r] < 1) continue;
    x += state.count[r] * hidden;
    if (!is_copied(copied, r)) chains.push_back({r, sources[i], 0, x - hidden});
  }
  return chains;
}

// Those with a draft of this depth, their hidden states one after another in `to`.
std::vector<Chain> going_on(const StepState& state, const std::vector<Chain>& chains, int64_t depth,
                            int64_t hidden, float* to) {
  std::vector<Chain> live;
  for (Chain c : chains) {
    if (state.effective[c.slot] <= depth) continue;
    std::copy_n(c.hidden, hidden, to);
    c.hidden = to;
    live.push_back(c);
    to += hidden;
  }
  return live;
}

// The pairs of the chains' last drafts, which guess `depth`.
Pass draft_rows(const StepState& state, const std::vector<Chain>& chains, int64_t depth, const Pass& empty) {
  Pass pass = empty;
  for (const Chain& c : chains) {
    const int64_t row = static_cast<int64_t>(pass.rows.size()), at = state.cached(c.slot) + depth - 2;
    pass.rows.push_back({row, c.slot, at, at + 1, at});
  }
  return pass;
}

std::vector<Choice> choose_drafts(const Isa& isa, const Decoder& d, const StepState& state,
                                  const Rules& rules, const std::vector<Chain>& chains, int64_t depth,
                                  int64_t threads) {
  std::vector<Draw> draws;
  for (const Chain& c : chains) draws.push_back(rules.draw(state, c.slot, c.source, depth));
  const Input input = {chains[0].hidden, static_cast<int64_t>(chains.size()), d.norm, d.shape.eps};
  return choose_head(isa, {d.head, rules.ids, 1.0f}, d.shape.rounding, input, draws, threads);
}

// Depth after depth until no block goes on; returns how many drafts had logits that are not finite.
int64_t draft_depths(const Isa& isa, const Eagle& e, const Cache& cache, const StepState& state,
                     const Rules& rules, std::vector<Chain> chains, const Pass& empty,
                     const at::Tensor& drafts) {
  const int64_t hidden = e.decoder.shape.hidden, room = static_cast<int64_t>(chains.size()) * hidden;
  float* turns[] = {arena().take<float>(room), arena().take<float>(room)};
  int64_t broken = 0;
  for (int64_t depth = 1;; ++depth) {
    float* x = turns[depth % 2];
    chains = going_on(state, chains, depth, hidden, x);
    if (chains.empty()) return broken;
    if (depth > 1) {
      std::vector<int64_t> said;
      for (const Chain& c : chains) said.push_back(c.said);
      Pass pass = draft_rows(state, chains, depth, empty);
      run_pairs(*isa.model, e, cache, pass, said, x);
    }
    const std::vector<Choice> choices =
        choose_drafts(isa, e.decoder, state, rules, chains, depth, empty.threads);
    for (std::size_t i = 0; i < chains.size(); ++i) {
      chains[i].said = choices[i].id;
      broken += !choices[i].finite;
      drafts.mutable_data_ptr<int64_t>()[chains[i].slot * drafts.size(1) + depth - 1] = choices[i].id;
    }
  }
}

int64_t draft_chain(at::TensorList weights, const at::Tensor& plan, double eps, const at::Tensor& keys,
                    const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin,
                    at::TensorList state_tensors, at::IntArrayRef slots, at::IntArrayRef widths,
                    at::IntArrayRef sources, const at::Tensor& features,
                    const std::optional<at::Tensor>& draft_ids, const std::optional<at::Tensor>& noise,
                    double temperature, bool bans, const at::Tensor& drafts,
                    const std::optional<at::Tensor>& copied) {
  const Eagle e = read_eagle(weights, plan, eps);
  const Decoder& d = e.decoder;
  const int64_t hidden = d.shape.hidden;
  const Cache cache = read_cache(keys, values, d.shape, 1);
  const StepState state(state_tensors);
  note_read(weights[0].const_data_ptr(), weights[0].numel());
  const Members members = state.members(slots, widths);
  const int64_t vocab = d.embedding.rows, most = std::min(cache.capacity, check_rope(cos, sin, d.shape));
  const Rules rules = {check_noise(noise, check_sources(sources, members), vocab), vocab,
                       check_draft_ids(draft_ids, d.head.rows, vocab), static_cast<float>(temperature), bans};
  check_drafts(drafts, state);
  const at::Tensor left_out = read_copied(copied, state);
  const Pending pending = read_pending(features, state, e.fc.columns);
  TORCH_CHECK_VALUE(state.slots <= cache.slots, "state: expected at most ", cache.slots, " slots, got ",
                    state.slots);
  state.begin_block();

  const Isa isa = current_isa();
  const Arena::Scope scope(arena());
  const Pass empty = empty_pass(cos, sin);
  std::vector<int64_t> said;
  const int64_t room = static_cast<int64_t>(slots.size()) * pending.room;
  float* given = arena().take<float>(room * pending.columns);
  Pass pass = pending_rows(state, members, pending, empty, most, given, said);
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  float* x = arena().take<float>(rows * hidden);
  fuse(*isa.model, e, given, rows, pass.threads, x);
  run_pairs(*isa.model, e, cache, pass, said, x);
  const std::vector<Chain> chains = first_chains(state, members, sources, left_out, x, hidden);
  return draft_depths(isa, e, cache, state, rules, chains, empty, drafts);
}

}  // namespace
}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) {
  m.impl("eagle_forward", &blockpilot::eagle_forward);
  m.impl("draft_chain", &blockpilot::draft_chain);
}
