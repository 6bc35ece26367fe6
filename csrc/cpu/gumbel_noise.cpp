#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "checks.h"
#include "isa.h"
#include "pool.h"
#include "step_tensor.h"

namespace blockpilot {
namespace {

constexpr int64_t IDS_A_PART = 8192;  // a multiple of 4

template <typename T>
at::Tensor noise_rows(const at::Tensor& seed, const at::Tensor& position, int64_t vocab, at::ScalarType dtype,
                      void (*part)(int64_t, int64_t, int64_t, int64_t, T*)) {
  const int64_t rows = seed.numel();
  check_tensor("seed", seed, at::kLong, {rows});
  check_tensor("position", position, at::kLong, {rows});
  TORCH_CHECK_VALUE(vocab >= 1 && vocab <= (1 << 22), "vocab: expected 1 … 2^22, got ", vocab);
  const at::Tensor seeds = seed.contiguous(), positions = position.contiguous();
  at::Tensor out = step_tensor(rows, vocab, dtype);
  const int64_t* s = seeds.const_data_ptr<int64_t>();
  const int64_t* p = positions.const_data_ptr<int64_t>();
  T* o = out.mutable_data_ptr<T>();
  const int64_t parts = (vocab + IDS_A_PART - 1) / IDS_A_PART;
  parallel_chunks(at::get_num_threads(), rows * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / parts, first = i % parts * IDS_A_PART;
      part(s[r], p[r], first, std::min(IDS_A_PART, vocab - first), o + r * vocab + first);
    }
  });
  return out;
}

at::Tensor philox(const at::Tensor& seed, const at::Tensor& position, int64_t vocab) {
  return noise_rows<int64_t>(seed, position, vocab, at::kLong, current_isa().rows->philox);
}

at::Tensor gumbel_noise(const at::Tensor& seed, const at::Tensor& position, int64_t vocab) {
  return noise_rows<float>(seed, position, vocab, at::kFloat, current_isa().rows->gumbel_noise);
}

at::Tensor gumbel_from_integers(const at::Tensor& integers) {
  check_tensor("integers", integers, at::kLong, integers.sizes());
  const at::Tensor in = integers.contiguous();
  at::Tensor out = at::empty(in.sizes(), in.options().dtype(at::kFloat));
  current_isa().rows->gumbel_from_integers(in.const_data_ptr<int64_t>(), in.numel(),
                                           out.mutable_data_ptr<float>());
  return out;
}

}  // namespace
}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) {
  m.impl("philox", &blockpilot::philox);
  m.impl("gumbel_noise", &blockpilot::gumbel_noise);
  m.impl("gumbel_from_integers", &blockpilot::gumbel_from_integers);
}
