// Checks that keep the CPU ops inside their memory whoever calls them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace blockpilot {

inline void check_tensor(const char* name, const at::Tensor& t, at::ScalarType dtype, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(t.device().is_cpu(), name, ": expected a CPU tensor, got one on ", t.device());
  TORCH_CHECK_VALUE(t.scalar_type() == dtype, name, ": expected ", dtype, ", got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.sizes() == shape, name, ": expected shape ", shape, ", got ", t.sizes());
}

// Rows a thread should take so that starting it pays.
inline int64_t rows_a_thread(int64_t vocab) {
  const int64_t worth = 16384;
  return vocab >= worth ? 1 : worth / (vocab > 0 ? vocab : 1);
}

}  // namespace blockpilot
