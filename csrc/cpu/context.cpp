#include "context.h"

#include <algorithm>

namespace blockpilot {

Context read_context(at::TensorList weights, const at::Tensor& plan, double eps) {
  PlanReader reader(weights, plan);
  const Header h = read_header(reader, eps);
  Context c;
  c.shape = h.shape;
  c.fc = reader.linear(h.shape.hidden, -1);
  c.project = reader.linear(2 * h.layers * h.shape.kv_heads * h.shape.head_dim, h.shape.hidden);
  c.norm = reader.norm(h.shape.hidden, false);
  for (int64_t layer = 0; layer < h.layers; ++layer)
    c.key_norms.push_back(reader.norm(h.shape.head_dim, true));
  reader.finish();
  return c;
}

void append_context(const ModelKernels& k, const Context& c, const Cache& cache, const Pass& pass,
                    const float* features) {
  const Shape& s = c.shape;
  const int64_t rows = static_cast<int64_t>(pass.rows.size()), pair = s.kv_heads * s.head_dim;
  const int64_t width = c.project.rows;
  const Arena::Scope scope(arena());
  float* x = arena().take<float>(rows * c.fc.columns);
  float* context = arena().take<float>(rows * s.hidden);
  float* made = arena().take<float>(rows * width);
  std::vector<float*> to, made_rows;
  for (int64_t i = 0; i < rows; ++i) {
    const float* from = features + pass.rows[static_cast<std::size_t>(i)].source * c.fc.columns;
    std::copy(from, from + c.fc.columns, x + i * c.fc.columns);
    to.push_back(context + i * s.hidden);
    made_rows.push_back(made + i * width);
  }
  multiply(k, c.fc, s.rounding, {x, rows}, to.data(), Epilogue::STORE, pass.threads);
  multiply(k, c.project, s.rounding, {context, rows, c.norm, s.eps}, made_rows.data(), Epilogue::STORE,
           pass.threads);
  for (int64_t layer = 0; layer < c.depth(); ++layer) {
    for (int64_t i = 0; i < rows; ++i) {
      const Row& row = pass.rows[static_cast<std::size_t>(i)];
      const int64_t half = s.head_dim / 2;
      float* key = made + i * width + 2 * layer * pair;
      remember(k, s, c.key_norms[static_cast<std::size_t>(layer)], cache, layer, row, 0, s.kv_heads,
               pass.cos + row.turn * half, pass.sin + row.turn * half, key, key + pair);
    }
  }
}

}  // namespace blockpilot
