// The engine's state as the fused step reads and writes it: `blockpilot.state.State.tensors`, in that order.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "decoder_inputs.h"

namespace blockpilot {

// Whose rows a pass has: slot `slots[i]` owns `widths[i]` packed rows from `starts[i]` on.
struct Members {
  at::IntArrayRef slots, widths;
  std::vector<int64_t> starts;
  int64_t rows = 0;
};

class StepState {
 public:
  // Throws ValueError unless every tensor is a contiguous CPU tensor of its type and shape.
  explicit StepState(at::TensorList tensors);

  Members members(at::IntArrayRef slots, at::IntArrayRef widths) const;

  // Effective widths and anchors of every slot, as `blockpilot.step.begin_block` sets them.
  void begin_block() const;

  // Longest accepted prefix, bonus, stops, limits and lengths. Returns `blockpilot.step.Report`s end to end:
  // of every member its count, accepted, effective width, finish code and as many ids as it committed.
  std::vector<int64_t> commit(const Members& members) const;

  // Tokens at the columns of a slot's block that exist; positions begin at `length − 1`.
  int64_t cached(int64_t slot) const { return length[slot] - 1; }

  int64_t slots, widest, stops, capacity;
  const int64_t* tokens;  // [slots][capacity]
  int64_t *length, *width, *effective, *stop_ids, *free_from, *top_k, *block, *choice, *count;
  float *temperature, *top_p, *min_p;
  bool *done, *finite;

 private:
  at::TensorList tensors_;
};

// Rows of the blocks' columns that exist, checked against the cache and the rotary tables; none of slots that
// are true in `left_out`, if there is one.
Pass block_rows(const StepState& state, const Members& members, const at::Tensor& cos, const at::Tensor& sin,
                const Cache& cache, const Shape& shape, const at::Tensor& left_out = {});

}  // namespace blockpilot
