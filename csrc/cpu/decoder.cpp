// The packed decoder as operators.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "context.h"
#include "decoder_pass.h"
#include "isa.h"
#include "pool.h"
#include "step_tensor.h"

namespace blockpilot {
namespace {

constexpr int64_t PART_PANELS = 16;  // of a weighted sum over a table: they stay in the second-level cache

using Forward = std::tuple<at::Tensor, at::Tensor>;

Forward decoder_forward(at::TensorList weights, const at::Tensor& plan, at::ArrayRef<double> scalars,
                        const at::Tensor& keys, const at::Tensor& values, const at::Tensor& cos,
                        const at::Tensor& sin, const at::Tensor& tokens, const at::Tensor& slot,
                        const at::Tensor& position, const at::Tensor& exists, const at::Tensor& extent,
                        at::IntArrayRef feature_layers, const at::Tensor& head_rows,
                        const std::optional<at::Tensor>& path) {
  const Decoder d = read_decoder(weights, plan, scalars);
  const Shape& s = d.shape;
  const Cache cache = read_cache(keys, values, s, d.depth());
  const int64_t n = slot.numel();
  const at::Tensor paths = path ? read_paths(*path, n, d.layers) : at::Tensor();
  Pass pass = read_pass(cos, sin, slot, position, exists, extent, cache, s, path ? &paths : nullptr);
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  check_tensor("tokens", tokens, at::kLong, {n});
  const at::Tensor ids = tokens.contiguous(), asked = read_head_rows(head_rows, n);

  const ModelKernels& k = *current_isa().model;
  const Arena::Scope scope(arena());
  float* x = arena().take<float>(rows * s.hidden);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> said;
  for (const Row& row : pass.rows) said.push_back(id[row.source]);
  const at::Tensor features = run_rows(k, d, cache, pass, said, n, feature_layers, x);
  at::Tensor logits = step_tensor(asked.numel(), d.head.rows, at::kFloat);
  run_head(k, d, pass, x, n, asked, logits);
  return {logits, features};
}

void context_append(at::TensorList weights, const at::Tensor& plan, double eps, const at::Tensor& keys,
                    const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin,
                    const at::Tensor& features, const at::Tensor& slot, const at::Tensor& position,
                    const at::Tensor& exists) {
  const Context c = read_context(weights, plan, eps);
  const Cache cache = read_cache(keys, values, c.shape, c.depth());
  const Pass pass = read_pass(cos, sin, slot, position, exists, std::nullopt, cache, c.shape);
  check_tensor("features", features, at::kFloat, {slot.numel(), c.fc.columns});
  append_context(*current_isa().model, c, cache, pass, features.contiguous().const_data_ptr<float>());
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& record,
                         int64_t rounding) {
  TORCH_CHECK_VALUE(0 <= rounding && rounding <= 3, "rounding: expected 0 … 3, got ", rounding);
  const at::Tensor blobs[] = {weights};
  PlanReader reader(blobs, record);
  const Linear w = reader.linear(-1, -1);
  reader.finish();
  TORCH_CHECK_VALUE(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
  const int64_t rows = x.size(0);
  check_tensor("x", x, at::kFloat, {rows, w.columns});
  const at::Tensor input = x.contiguous();
  at::Tensor y = at::empty({rows, w.rows}, x.options());
  std::vector<float*> to;
  for (int64_t i = 0; i < rows; ++i) to.push_back(y.mutable_data_ptr<float>() + i * w.rows);
  multiply(*current_isa().model, w, static_cast<Rounding>(rounding), {input.const_data_ptr<float>(), rows},
           to.data(), Epilogue::STORE, at::get_num_threads());
  return y;
}

at::Tensor weighted_rows(const at::Tensor& p, const at::Tensor& weights, const at::Tensor& record) {
  const at::Tensor blobs[] = {weights};
  PlanReader reader(blobs, record);
  const Linear table = reader.linear(-1, -1);
  reader.finish();
  TORCH_CHECK_VALUE(p.dim() == 2, "p: expected 2 dimensions, got ", p.dim());
  check_tensor("p", p, at::kFloat, {p.size(0), table.rows});
  const at::Tensor input = p.contiguous();
  at::Tensor out = at::empty({p.size(0), table.columns}, p.options());
  const ModelKernels& k = *current_isa().model;
  // Parts of a fixed size, added in order: the sum does not depend on the number of threads.
  const int64_t panels = 2 * table.units(), parts = (panels + PART_PANELS - 1) / PART_PANELS;
  const Arena::Scope scope(arena());
  float* sums = arena().take<float>(parts * table.columns);
  for (int64_t r = 0; r < p.size(0); ++r) {
    const float* from = input.const_data_ptr<float>() + r * table.rows;
    float* to = out.mutable_data_ptr<float>() + r * table.columns;
    parallel_chunks(at::get_num_threads(), parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        k.weighted_rows(table, from, i * PART_PANELS, std::min(panels, (i + 1) * PART_PANELS),
                        sums + i * table.columns);
    });
    std::copy(sums, sums + table.columns, to);
    for (int64_t i = 1; i < parts; ++i)
      for (int64_t c = 0; c < table.columns; ++c) to[c] += sums[i * table.columns + c];
  }
  return out;
}

}  // namespace
}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) {
  m.impl("decoder_forward", &blockpilot::decoder_forward);
  m.impl("context_append", &blockpilot::context_append);
  m.impl("packed_linear", &blockpilot::packed_linear);
  m.impl("weighted_rows", &blockpilot::weighted_rows);
}
