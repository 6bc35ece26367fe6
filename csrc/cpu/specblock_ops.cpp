// One call drafts chains with SpecBlock, one runs any of its passes.
#include "specblock.h"

#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>

#include "drafting.h"
#include "pool.h"
#include "step_tensor.h"

namespace blockpilot {
namespace {

// Blocks of a pass by their numbers in the caller's tensors, `source` of each.
Blocks read_blocks(const Pass& empty, const Cache& cache, int64_t covered, int64_t slots,
                   const at::Tensor& tokens, at::TensorList where, const at::Tensor& exists,
                   const at::Tensor& extent, std::vector<int64_t>& source) {
  const int64_t n = tokens.numel();
  check_tensor("tokens", tokens, at::kLong, {n});
  for (const at::Tensor& t : where) check_tensor("slot, place, at, pair", t, at::kLong, {n});
  check_tensor("exists", exists, at::kBool, {n});
  check_tensor("extent", extent, at::kLong, {cache.slots});
  const auto word = [](const at::Tensor& t, int64_t i) { return t.const_data_ptr<int64_t>()[i]; };
  const at::Tensor there = exists.contiguous(), end = extent.contiguous(), ids = tokens.contiguous();
  std::vector<at::Tensor> of;
  for (const at::Tensor& t : where) of.push_back(t.contiguous());
  Blocks blocks(empty, cache, covered);
  for (int64_t i = 0; i < n; ++i) {
    if (!there.const_data_ptr<bool>()[i]) continue;
    const int64_t slot = word(of[0], i), pair = word(of[3], i);
    TORCH_CHECK_VALUE(0 <= slot && slot < cache.slots, "slot: expected 0 … ", cache.slots - 1, ", got ",
                      slot);
    TORCH_CHECK_VALUE(0 <= pair && pair < MOST, "pair: expected 0 … ", MOST - 1, ", got ", pair);
    blocks.add({slot, word(of[1], i), word(of[2], i), pair + 1, word(end, slot)}, word(ids, i), slots);
    source.push_back(i);
  }
  return blocks;
}

// Of the asked rows [m] those that exist, by their numbers in the pass, and where in [m] each of them goes.
std::vector<int64_t> existing(const at::Tensor& asked, int64_t n, int64_t slots,
                              const std::vector<int64_t>& source, std::vector<int64_t>& to) {
  std::vector<int64_t> at(static_cast<std::size_t>(n), -1), found;
  for (std::size_t i = 0; i < source.size(); ++i)
    at[static_cast<std::size_t>(source[i])] = static_cast<int64_t>(i);
  for (int64_t i = 0; i < asked.numel(); ++i) {
    const int64_t row = asked.const_data_ptr<int64_t>()[i];
    const int64_t block = at[static_cast<std::size_t>(row / slots)];
    if (block < 0) continue;
    found.push_back(block * slots + row % slots);
    to.push_back(i);
  }
  return found;
}

using Said = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Hidden states, the same normed, and logits, [asked] each: of the rows `made`, which go `to` there; 0
// elsewhere.
Said say(const ModelKernels& k, const Decoder& d, const float* made, const std::vector<int64_t>& to,
         int64_t asked, int64_t threads) {
  const int64_t hidden = d.shape.hidden, m = static_cast<int64_t>(to.size());
  at::Tensor states = step_zeros(asked, hidden), after = step_zeros(asked, hidden);
  at::Tensor logits = step_tensor(asked, d.head.rows, at::kFloat);
  if (m < asked) std::fill_n(logits.mutable_data_ptr<float>(), logits.numel(), 0.0f);
  const Arena::Scope scope(arena());
  float* normed = arena().take<float>(m * hidden);
  std::vector<float*> out;
  for (int64_t i = 0; i < m; ++i) {
    const int64_t row = to[static_cast<std::size_t>(i)];
    k.rms_norm(made + i * hidden, d.norm, hidden, d.shape.eps, normed + i * hidden);
    std::copy_n(made + i * hidden, hidden, states.mutable_data_ptr<float>() + row * hidden);
    std::copy_n(normed + i * hidden, hidden, after.mutable_data_ptr<float>() + row * hidden);
    out.push_back(logits.mutable_data_ptr<float>() + row * d.head.rows);
  }
  multiply(k, d.head, d.shape.rounding, {normed, m}, out.data(), Epilogue::STORE, threads);
  return {states, after, logits};
}

Said specblock_forward(at::TensorList weights, const at::Tensor& plan, double eps, const at::Tensor& keys,
                       const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin,
                       const at::Tensor& x, bool features, const at::Tensor& tokens, at::TensorList where,
                       const at::Tensor& exists, const at::Tensor& extent, const at::Tensor& head_rows) {
  const SpecBlock b = read_specblock(weights, plan, eps);
  const Decoder& d = b.decoder;
  const int64_t n = tokens.numel(), hidden = d.shape.hidden;
  const int64_t columns = features ? b.condition.columns : hidden;
  const Cache cache = read_cache(keys, values, d.shape, d.depth());
  TORCH_CHECK_VALUE(where.size() == 4, "where: expected slot, place, at and pair, got ", where.size());
  std::vector<int64_t> source, to;
  Blocks blocks = read_blocks(empty_pass(cos, sin), cache, check_rope(cos, sin, d.shape), b.slots, tokens,
                              where, exists, extent, source);
  check_tensor("x", x, at::kFloat, {n, columns});
  const at::Tensor given = x.contiguous(), asked = read_head_rows(head_rows, n * b.slots);
  const std::vector<int64_t> rows = existing(asked, n, b.slots, source, to);

  const ModelKernels& k = *current_isa().model;
  const Arena::Scope scope(arena());
  const int64_t count = blocks.count(), threads = blocks.pass.threads;
  float* from = arena().take<float>(count * columns);
  float* conditions = features ? arena().take<float>(count * hidden) : from;
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(given.const_data_ptr<float>() + source[static_cast<std::size_t>(i)] * columns, columns,
                from + i * columns);
  if (features) make_conditions(k, b, from, count, threads, conditions);
  float* made = arena().take<float>(static_cast<int64_t>(rows.size()) * hidden);
  run_blocks(k, b, cache, blocks, conditions, rows, made);
  return say(k, d, made, to, asked.numel(), threads);
}

// A slot whose pairs wait, and how many ids it drafts: none where it is copied.
struct Drafting {
  int64_t slot, source, drafts;
};

// Chooses what the rows x say, of each slot's drafts those `above` + 1 … `above` + slots; returns how many
// were not finite.
int64_t choose_drafts(const Isa& isa, const SpecBlock& b, const StepState& state, const Rules& rules,
                      const std::vector<Drafting>& all, int64_t above, const float* x, int64_t threads,
                      const at::Tensor& drafts) {
  const Decoder& d = b.decoder;
  std::vector<Draw> draws;
  std::vector<int64_t*> to;
  for (const Drafting& one : all)
    for (int64_t depth = above + 1; depth <= std::min(one.drafts, above + b.slots); ++depth) {
      draws.push_back(rules.draw(state, one.slot, one.source, depth));
      to.push_back(drafts.mutable_data_ptr<int64_t>() + one.slot * drafts.size(1) + depth - 1);
    }
  const Input input = {x, static_cast<int64_t>(to.size()), d.norm, d.shape.eps};
  const std::vector<Choice> choices =
      choose_head(isa, {d.head, rules.ids, 1.0f}, d.shape.rounding, input, draws, threads);
  for (std::size_t i = 0; i < to.size(); ++i) *to[i] = choices[i].id;
  return std::count_if(choices.begin(), choices.end(), [](const Choice& c) { return !c.finite; });
}

// The pairs of a slot that wait, their features to `features`, and the rows of the last that guess its
// drafts.
void add_pairs(const SpecBlock& b, const StepState& state, const Pending& pending, const Drafting& one,
               float* features, Blocks& blocks, std::vector<int64_t>& asked) {
  const int64_t cached = state.cached(one.slot), count = pending.count(state, one.slot);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t pair = cached - count + j, place = pair * b.slots;
    std::copy_n(pending.of(one.slot, j), pending.columns, features + blocks.count() * pending.columns);
    blocks.add({one.slot, place, place, pair + 1, cached * b.slots},
               state.tokens[one.slot * state.capacity + pair + 1], b.slots);
  }
  const int64_t first = blocks.rows() - b.slots;
  for (int64_t k = 0; k < std::min(b.slots, one.drafts); ++k) asked.push_back(first + k);
}

// A second block of each slot that drafts more, behind the last id that it drafted; x: what the first block's
// asked rows are, of which the last of a slot becomes a condition.
void add_second(const SpecBlock& b, const StepState& state, const std::vector<Drafting>& all,
                const int64_t* drafts, int64_t stride, const float* x, float* conditions, Blocks& blocks) {
  const int64_t hidden = b.decoder.shape.hidden;
  for (const Drafting& one : all) {
    x += std::min(b.slots, one.drafts) * hidden;
    if (one.drafts <= b.slots) continue;
    const int64_t cached = state.cached(one.slot), place = cached * b.slots;
    std::copy_n(x - hidden, hidden, conditions + blocks.count() * hidden);
    blocks.add({one.slot, place, place, cached + b.slots, place + b.slots},
               drafts[one.slot * stride + b.slots - 1], std::min(b.slots, one.drafts - b.slots));
  }
}

// Both blocks' passes and choices; returns how many drafts were not finite.
int64_t draft_blocks(const Isa& isa, const SpecBlock& b, const Cache& cache, int64_t covered,
                     const StepState& state, const Rules& rules, const Pending& pending, const Pass& empty,
                     const std::vector<Drafting>& all, const at::Tensor& drafts) {
  const ModelKernels& k = *isa.model;
  const int64_t hidden = b.decoder.shape.hidden, slots = static_cast<int64_t>(all.size());
  Blocks first(empty, cache, covered), second(empty, cache, covered);
  std::vector<int64_t> asked;
  float* features = arena().take<float>(slots * pending.room * pending.columns);
  for (const Drafting& one : all) add_pairs(b, state, pending, one, features, first, asked);
  float* conditions = arena().take<float>(first.count() * hidden);
  float* x = arena().take<float>(static_cast<int64_t>(asked.size()) * hidden);
  make_conditions(k, b, features, first.count(), empty.threads, conditions);
  run_blocks(k, b, cache, first, conditions, asked, x);
  int64_t broken = choose_drafts(isa, b, state, rules, all, 0, x, empty.threads, drafts);

  add_second(b, state, all, drafts.const_data_ptr<int64_t>(), drafts.size(1), x, conditions, second);
  if (second.count() == 0) return broken;
  asked.resize(static_cast<std::size_t>(second.rows()));
  std::iota(asked.begin(), asked.end(), 0);
  x = arena().take<float>(second.rows() * hidden);
  run_blocks(k, b, cache, second, conditions, asked, x);
  return broken + choose_drafts(isa, b, state, rules, all, b.slots, x, empty.threads, drafts);
}

int64_t specblock_chain(at::TensorList weights, const at::Tensor& plan, double eps, const at::Tensor& keys,
                        const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin,
                        at::TensorList state_tensors, at::IntArrayRef slots, at::IntArrayRef widths,
                        at::IntArrayRef sources, const at::Tensor& features,
                        const std::optional<at::Tensor>& draft_ids, const std::optional<at::Tensor>& noise,
                        double temperature, bool bans, const at::Tensor& drafts,
                        const std::optional<at::Tensor>& copied) {
  const SpecBlock b = read_specblock(weights, plan, eps);
  const Decoder& d = b.decoder;
  const Cache cache = read_cache(keys, values, d.shape, d.depth());
  const StepState state(state_tensors);
  note_read(weights[0].const_data_ptr(), weights[0].numel());
  const Members members = state.members(slots, widths);
  const int64_t vocab = d.embedding.rows, covered = check_rope(cos, sin, d.shape);
  const Rules rules = {check_noise(noise, check_sources(sources, members), vocab), vocab,
                       check_draft_ids(draft_ids, d.head.rows, vocab), static_cast<float>(temperature), bans};
  check_drafts(drafts, state);
  const at::Tensor left_out = read_copied(copied, state);
  const Pending pending = read_pending(features, state, b.condition.columns);
  state.begin_block();
  std::vector<Drafting> all;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    TORCH_CHECK_VALUE(widths[i] <= 2 * b.slots + 1, "widths: expected at most ", 2 * b.slots + 1, ", got ",
                      widths[i]);
    const int64_t width = std::min(widths[i], state.effective[slots[i]]);
    if (width > 0) all.push_back({slots[i], sources[i], is_copied(left_out, slots[i]) ? 0 : width - 1});
  }
  const Arena::Scope scope(arena());
  return draft_blocks(current_isa(), b, cache, covered, state, rules, pending, empty_pass(cos, sin), all,
                      drafts);
}

}  // namespace
}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) {
  m.impl("specblock_forward", &blockpilot::specblock_forward);
  m.impl("specblock_chain", &blockpilot::specblock_chain);
}
