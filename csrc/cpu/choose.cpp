#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "checks.h"
#include "isa.h"
#include "pool.h"
#include "scratch.h"

namespace blockpilot {
namespace {

// Contiguous inputs of the op as raw pointers, and what its loop over rows needs to know.
struct Rows {
  int64_t vocab;
  int64_t banned_count;
  bool filtered;
  const float* logits;
  const float* noise;
  const float* temperature;
  const int64_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* banned;

  void run(const RowKernels& kernels, int64_t begin, int64_t end, int64_t* ids, bool* finite) const {
    const Scratch scratch(vocab, filtered);
    for (int64_t r = begin; r < end; ++r) {
      const RowParams params = {temperature[r], top_p[r], min_p[r], top_k[r], filtered};
      ids[r] = kernels.choose(logits + r * vocab, noise ? noise + r * vocab : nullptr, vocab,
                              banned + r * banned_count, banned_count, params, scratch.rows(), finite + r);
    }
  }
};

std::tuple<at::Tensor, at::Tensor> choose(const at::Tensor& logits, const std::optional<at::Tensor>& noise,
                                          const at::Tensor& temperature, const at::Tensor& top_k,
                                          const at::Tensor& top_p, const at::Tensor& min_p,
                                          const std::optional<at::Tensor>& banned, bool filtered) {
  TORCH_CHECK_VALUE(logits.dim() == 2, "logits: expected 2 dimensions, got ", logits.dim());
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  TORCH_CHECK_VALUE(vocab >= 1 && vocab <= (1 << 22), "logits: expected 1 … 2^22 ids a row, got ", vocab);
  check_tensor("logits", logits, at::kFloat, {rows, vocab});
  if (noise) check_tensor("noise", *noise, at::kFloat, {rows, vocab});
  check_tensor("temperature", temperature, at::kFloat, {rows});
  check_tensor("top_k", top_k, at::kLong, {rows});
  check_tensor("top_p", top_p, at::kFloat, {rows});
  check_tensor("min_p", min_p, at::kFloat, {rows});
  if (banned) check_tensor("banned", *banned, at::kLong, {rows, banned->dim() == 2 ? banned->size(1) : -1});

  const at::Tensor l = logits.contiguous(), g = noise ? noise->contiguous() : at::Tensor();
  const at::Tensor t = temperature.contiguous(), k = top_k.contiguous(), p = top_p.contiguous();
  const at::Tensor m = min_p.contiguous(), b = banned ? banned->contiguous() : at::Tensor();
  const Rows work = {vocab,
                     banned ? b.size(1) : 0,
                     filtered,
                     l.const_data_ptr<float>(),
                     noise ? g.const_data_ptr<float>() : nullptr,
                     t.const_data_ptr<float>(),
                     k.const_data_ptr<int64_t>(),
                     p.const_data_ptr<float>(),
                     m.const_data_ptr<float>(),
                     banned ? b.const_data_ptr<int64_t>() : nullptr};
  at::Tensor ids = at::empty({rows}, logits.options().dtype(at::kLong));
  at::Tensor finite = at::empty({rows}, logits.options().dtype(at::kBool));
  int64_t* ids_out = ids.mutable_data_ptr<int64_t>();
  bool* finite_out = finite.mutable_data_ptr<bool>();
  const RowKernels& kernels = *current_isa().rows;
  parallel_chunks(at::get_num_threads(), rows, rows_a_thread(vocab),
                  [&](int64_t begin, int64_t end) { work.run(kernels, begin, end, ids_out, finite_out); });
  return {ids, finite};
}

}  // namespace
}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) { m.impl("choose", &blockpilot::choose); }
