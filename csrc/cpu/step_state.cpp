#include "step_state.h"

#include <algorithm>

#include "accept_commit.h"
#include "checks.h"

namespace blockpilot {
namespace {

enum Field {
  TOKENS,
  LENGTH,
  LIMIT,
  WIDTH,
  EFFECTIVE,
  STOP_IDS,
  FREE_FROM,
  SEED,
  TEMPERATURE,
  TOP_K,
  TOP_P,
  MIN_P,
  DONE,
  FINISH,
  BLOCK_IDS,
  CHOICE,
  FINITE,
  ACCEPTED,
  COUNT,
  FIELDS
};

template <typename T>
T* data(const at::Tensor& t, at::IntArrayRef shape) {
  check_tensor("state", t, c10::CppTypeToScalarType<T>::value, shape);
  TORCH_CHECK_VALUE(t.is_contiguous(), "state: expected contiguous tensors");
  return t.mutable_data_ptr<T>();
}

}  // namespace

StepState::StepState(at::TensorList t) : tensors_(t) {
  TORCH_CHECK_VALUE(t.size() == FIELDS, "state: expected ", static_cast<int>(FIELDS), " tensors, got ",
                    t.size());
  for (const Field matrix : {TOKENS, STOP_IDS, BLOCK_IDS})
    TORCH_CHECK_VALUE(t[matrix].dim() == 2, "state: expected 2 dimensions, got ", t[matrix].dim());
  slots = t[TOKENS].size(0);
  widest = t[BLOCK_IDS].size(1);
  TORCH_CHECK_VALUE(widest >= 1, "state: expected blocks of at least 1 column, got ", widest);
  stops = t[STOP_IDS].size(1);
  capacity = t[TOKENS].size(1);
  tokens = data<int64_t>(t[TOKENS], {slots, capacity});
  length = data<int64_t>(t[LENGTH], {slots});
  count = data<int64_t>(t[COUNT], {slots});
  for (const Field vector : {LIMIT, FINISH, ACCEPTED, SEED}) data<int64_t>(t[vector], {slots});
  width = data<int64_t>(t[WIDTH], {slots});
  effective = data<int64_t>(t[EFFECTIVE], {slots});
  stop_ids = data<int64_t>(t[STOP_IDS], {slots, stops});
  free_from = data<int64_t>(t[FREE_FROM], {slots});
  temperature = data<float>(t[TEMPERATURE], {slots});
  top_k = data<int64_t>(t[TOP_K], {slots});
  top_p = data<float>(t[TOP_P], {slots});
  min_p = data<float>(t[MIN_P], {slots});
  done = data<bool>(t[DONE], {slots});
  block = data<int64_t>(t[BLOCK_IDS], {slots, widest});
  choice = data<int64_t>(t[CHOICE], {slots, widest});
  finite = data<bool>(t[FINITE], {slots, widest});
}

Members StepState::members(at::IntArrayRef given, at::IntArrayRef widths) const {
  TORCH_CHECK_VALUE(given.size() == widths.size(), "slots, widths: expected as many of each, got ",
                    given.size(), " and ", widths.size());
  Members m{given, widths, {}, 0};
  for (std::size_t i = 0; i < given.size(); ++i) {
    TORCH_CHECK_VALUE(0 <= given[i] && given[i] < slots, "slots: expected 0 … ", slots - 1, ", got ",
                      given[i]);
    TORCH_CHECK_VALUE(1 <= widths[i] && widths[i] <= widest, "widths: expected 1 … ", widest, ", got ",
                      widths[i]);
    TORCH_CHECK_VALUE(std::find(given.begin(), given.begin() + i, given[i]) == given.begin() + i,
                      "slots: expected every slot once, got ", given[i], " again");
    m.starts.push_back(m.rows);
    m.rows += widths[i];
  }
  return m;
}

void StepState::begin_block() const {
  const int64_t* limit = tensors_[LIMIT].const_data_ptr<int64_t>();
  for (int64_t r = 0; r < slots; ++r) {
    TORCH_CHECK_VALUE(1 <= length[r] && length[r] <= capacity, "length: expected 1 … ", capacity, ", got ",
                      length[r]);
    effective[r] = done[r] ? 0 : std::min(width[r], std::clamp<int64_t>(limit[r], 0, MOST) - cached(r));
    block[r * widest] = tokens[r * capacity + cached(r)];
  }
}

std::vector<int64_t> StepState::commit(const Members& members) const {
  const at::TensorList& t = tensors_;
  accept_commit(t[BLOCK_IDS], t[CHOICE], t[FINITE], t[EFFECTIVE], t[STOP_IDS], t[LIMIT], t[TOKENS], t[LENGTH],
                t[DONE], t[FINISH], t[ACCEPTED], t[COUNT]);
  const auto* accepted = t[ACCEPTED].const_data_ptr<int64_t>();
  const auto* finish = t[FINISH].const_data_ptr<int64_t>();
  std::vector<int64_t> report;
  for (const int64_t r : members.slots) {
    report.insert(report.end(), {count[r], accepted[r], effective[r], finish[r]});
    report.insert(report.end(), choice + r * widest, choice + r * widest + count[r]);
  }
  return report;
}

Pass block_rows(const StepState& state, const Members& members, const at::Tensor& cos, const at::Tensor& sin,
                const Cache& cache, const Shape& s, const at::Tensor& left_out) {
  const int64_t covered = check_rope(cos, sin, s);
  TORCH_CHECK_VALUE(state.slots <= cache.slots, "state: expected at most ", cache.slots, " slots, got ",
                    state.slots);
  const bool* out = left_out.defined() ? left_out.const_data_ptr<bool>() : nullptr;
  Pass pass = empty_pass(cos, sin);
  for (std::size_t i = 0; i < members.slots.size(); ++i) {
    const int64_t r = members.slots[i], rows = std::min(members.widths[i], state.effective[r]);
    if (out && out[r]) continue;
    const int64_t end = state.cached(r) + state.effective[r];
    TORCH_CHECK_VALUE(rows <= 0 || end <= std::min(cache.capacity, covered), "limit: expected at most ",
                      std::min(cache.capacity, covered), " positions, got ", end);
    for (int64_t j = 0; j < rows; ++j)
      pass.rows.push_back({members.starts[i] + j, r, state.cached(r) + j, end, state.cached(r) + j});
  }
  return pass;
}

}  // namespace blockpilot
