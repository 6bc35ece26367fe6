#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "checks.h"

namespace blockpilot {
namespace {

// The place before `last` with the longest match that ends there, of equals the latest; −1 if none is long
// enough.
int64_t find_match(const int64_t* known, int64_t last, int64_t shortest, int64_t longest) {
  int64_t best = shortest - 1, at = -1;
  for (int64_t place = last - 1; place >= best && best < longest; --place) {
    const int64_t most = std::min(longest, place + 1);
    int64_t match = 0;
    while (match < most && known[place - match] == known[last - match]) ++match;
    if (match <= best) continue;
    best = match;
    at = place;
  }
  return at;
}

at::Tensor prompt_lookup(const at::Tensor& known, const at::Tensor& length, const at::Tensor& drafts,
                         int64_t shortest, int64_t longest) {
  TORCH_CHECK_VALUE(known.dim() == 2 && drafts.dim() == 2, "known, drafts: expected 2 dimensions, got ",
                    known.dim(), " and ", drafts.dim());
  TORCH_CHECK_VALUE(1 <= shortest && shortest <= longest,
                    "shortest, longest: expected 1 <= shortest <= longest");
  const int64_t slots = known.size(0), columns = known.size(1), width = drafts.size(1);
  check_tensor("known", known, at::kLong, {slots, columns});
  check_tensor("length", length, at::kLong, {slots});
  check_tensor("drafts", drafts, at::kLong, {slots, width});
  at::Tensor out = drafts.clone(at::MemoryFormat::Contiguous);
  if (columns == 0) return out;
  const at::Tensor rows = known.stride(1) == 1 ? known : known.contiguous();
  const auto length_ = length.accessor<int64_t, 1>();
  for (int64_t r = 0; r < slots; ++r) {
    const int64_t* ids = rows.const_data_ptr<int64_t>() + r * rows.stride(0);
    const int64_t last = std::min(length_[r], columns) - 1;
    const int64_t at = find_match(ids, last, shortest, longest);
    if (at < 0) continue;
    int64_t* to = out.mutable_data_ptr<int64_t>() + r * width;
    for (int64_t j = 0; j < width; ++j) to[j] = ids[at + 1 + j % (last - at)];
  }
  return out;
}

}  // namespace
}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) { m.impl("prompt_lookup", &blockpilot::prompt_lookup); }
