#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstring>

#include "checks.h"
#include "model_kernels.h"
#include "move_places.h"

namespace blockpilot {
namespace {

void check_places(const char* name, const at::Tensor& places, int64_t last) {
  for (int64_t i = 0; i < places.numel(); ++i) {
    const int64_t value = places.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_VALUE(0 <= value && value <= last, name, ": expected 0 … ", last, ", got ", value);
  }
}

void move_places(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& slot,
                 const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK_VALUE(keys.dim() == 6 && values.dim() == 5, "keys, values: expected 6 and 5 dimensions, got ",
                    keys.dim(), " and ", values.dim());
  const int64_t n = slot.numel(), layers = keys.size(0), slots = keys.size(1), heads = keys.size(2);
  const int64_t capacity = keys.size(3) * PANEL, dim = keys.size(4), padded = values.size(4);
  check_tensor("keys", keys, keys.scalar_type(), {layers, slots, heads, keys.size(3), dim, PANEL});
  check_tensor("values", values, keys.scalar_type(), {layers, slots, heads, capacity, padded});
  TORCH_CHECK_VALUE(keys.is_contiguous() && values.is_contiguous(),
                    "keys, values: expected contiguous tensors");
  for (const at::Tensor* t : {&slot, &from, &to}) check_tensor("slot, from, to", *t, at::kLong, {n});
  const at::Tensor sl = slot.contiguous(), fr = from.contiguous(), tt = to.contiguous();
  check_places("slot", sl, slots - 1);
  check_places("from", fr, capacity - 1);
  check_places("to", tt, capacity - 1);
  const int64_t item = keys.element_size();
  const Places places = {static_cast<char*>(keys.mutable_data_ptr()),
                         static_cast<char*>(values.mutable_data_ptr()),
                         layers,
                         slots,
                         heads,
                         capacity,
                         dim,
                         item,
                         padded * item};
  for (int64_t i = 0; i < n; ++i)
    places.copy(sl.const_data_ptr<int64_t>()[i], fr.const_data_ptr<int64_t>()[i],
                tt.const_data_ptr<int64_t>()[i]);
}

}  // namespace

void Places::copy(int64_t slot, int64_t from, int64_t to) const {
  if (from == to) return;
  const std::size_t size = static_cast<std::size_t>(item);
  for (int64_t layer = 0; layer < layers; ++layer)
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t plane = (layer * slots + slot) * heads + head;
      char *k = keys + plane * capacity * dim * item, *v = values + plane * capacity * wide;
      const auto key = [&](int64_t p) { return k + (p / PANEL * dim * PANEL + p % PANEL) * item; };
      for (int64_t d = 0; d < dim; ++d)
        std::memcpy(key(to) + d * PANEL * item, key(from) + d * PANEL * item, size);
      std::memcpy(v + to * wide, v + from * wide, static_cast<std::size_t>(wide));
    }
}

}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) { m.impl("move_places", &blockpilot::move_places); }
