// The packed decoder as operators: plans and tensors are checked here, so that nothing below can leave its memory.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "isa.h"
#include "model.h"
#include "pool.h"

namespace blockpilot {
namespace {

constexpr int64_t HEADER = 8, RECORD = 6, NORMS = 4, LAYER = 4 * RECORD + NORMS + 2;
constexpr int64_t MOST = int64_t{1} << 28;  // rows or columns: the bytes of a matrix stay far below 2^63

// Reads a plan: int64 words in the order that `blockpilot_kernels.packed_decoder.plan` writes them.
class PlanReader {
 public:
  PlanReader(at::TensorList blobs, const at::Tensor& plan) : blobs_(blobs), plan_(plan) {
    TORCH_CHECK_VALUE(plan.dim() == 1, "plan: expected 1 dimension, got ", plan.dim());
    check_tensor("plan", plan, at::kLong, {plan.numel()});
    TORCH_CHECK_VALUE(plan.is_contiguous(), "plan: expected a contiguous tensor");
    TORCH_CHECK_VALUE(!blobs.empty(), "weights: expected at least one tensor, got none");
    for (const at::Tensor& blob : blobs) {
      check_tensor("weights", blob, at::kByte, {blob.numel()});
      TORCH_CHECK_VALUE(blob.is_contiguous(), "weights: expected contiguous tensors");
      TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(blob.const_data_ptr()) % alignof(float) == 0,
                        "weights: expected tensors that begin at a multiple of 4 bytes");
    }
  }

  int64_t word(int64_t low, int64_t high) {
    TORCH_CHECK_VALUE(at_ < plan_.numel(), "plan: expected more than ", plan_.numel(), " words");
    const int64_t value = plan_.const_data_ptr<int64_t>()[at_++];
    TORCH_CHECK_VALUE(low <= value && value <= high, "plan: word ", at_ - 1, ": expected ", low, " … ", high,
                      ", got ", value);
    return value;
  }

  Linear linear(int64_t rows, int64_t columns) {
    const int64_t blob = word(0, static_cast<int64_t>(blobs_.size()) - 1);
    Linear w;
    w.format = static_cast<Format>(word(0, 4));
    w.rows = word(1, MOST);
    w.columns = word(1, MOST);
    TORCH_CHECK_VALUE(rows < 0 || rows == w.rows, "plan: expected ", rows, " rows, got ", w.rows);
    TORCH_CHECK_VALUE(columns < 0 || columns == w.columns, "plan: expected ", columns, " columns, got ", w.columns);
    w.data = bytes(blob, word(0, INT64_MAX), w.units() * 2 * w.blocks() * block_bytes(w.format));
    const int64_t bias = word(-1, INT64_MAX);
    w.bias = bias < 0 ? nullptr : reinterpret_cast<const float*>(bytes(blob, bias, w.rows * 4));
    return w;
  }

  const float* norm(int64_t size, bool optional) {
    const int64_t offset = word(optional ? -1 : 0, INT64_MAX);
    return offset < 0 ? nullptr : reinterpret_cast<const float*>(bytes(0, offset, size * 4));
  }

  void finish() const {
    TORCH_CHECK_VALUE(at_ == plan_.numel(), "plan: expected ", at_, " words, got ", plan_.numel());
  }

 private:
  const uint8_t* bytes(int64_t blob, int64_t offset, int64_t size) const {
    const at::Tensor& from = blobs_[static_cast<std::size_t>(blob)];
    TORCH_CHECK_VALUE(offset % 4 == 0 && offset <= from.numel() && size <= from.numel() - offset,
                      "plan: expected ", size, " bytes at a multiple of 4 inside weights ", blob, " of ",
                      from.numel(), " bytes, got offset ", offset);
    return from.const_data_ptr<uint8_t>() + offset;
  }

  const at::TensorList blobs_;
  const at::Tensor& plan_;
  int64_t at_ = 0;
};

struct Header {
  Shape shape;
  int64_t layers;
};

Header read_header(PlanReader& plan, double eps) {
  Header h;
  const int64_t most = int64_t{1} << 24;
  h.shape.hidden = plan.word(1, most);
  h.shape.heads = plan.word(1, most);
  h.shape.kv_heads = plan.word(1, h.shape.heads);
  h.shape.head_dim = plan.word(2, 4096);
  h.shape.intermediate = plan.word(0, most);
  h.layers = plan.word(1, 4096);
  h.shape.rounding = static_cast<Rounding>(plan.word(0, 2));
  plan.word(0, 0);
  TORCH_CHECK_VALUE(h.shape.heads % h.shape.kv_heads == 0 && h.shape.head_dim % 2 == 0,
                    "plan: expected heads in whole groups and an even head size");
  h.shape.eps = static_cast<float>(eps);
  return h;
}

Layer read_layer(PlanReader& plan, const Shape& s) {
  const int64_t attended = s.heads * s.head_dim;
  Layer layer;
  layer.qkv = plan.linear((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden);
  layer.out = plan.linear(s.hidden, attended);
  layer.gate_up = plan.linear(2 * s.intermediate, s.hidden);
  layer.down = plan.linear(s.hidden, s.intermediate);
  TORCH_CHECK_VALUE(s.intermediate % PANEL == 0, "plan: expected an intermediate size in panels of 16");
  layer.input_norm = plan.norm(s.hidden, false);
  layer.post_norm = plan.norm(s.hidden, false);
  layer.query_norm = plan.norm(s.head_dim, true);
  layer.key_norm = plan.norm(s.head_dim, true);
  layer.window = plan.word(0, INT64_MAX);
  layer.causal = plan.word(0, 1) == 1;
  return layer;
}

Cache read_cache(const at::Tensor& keys, const at::Tensor& values, const Shape& s, int64_t layers) {
  TORCH_CHECK_VALUE(keys.dim() == 6 && values.dim() == 5, "keys, values: expected 6 and 5 dimensions, got ", keys.dim(),
                    " and ", values.dim());
  const int64_t slots = keys.size(1), chunks = keys.size(3);
  const int64_t padded = (s.head_dim + PANEL - 1) / PANEL * PANEL;
  const at::ScalarType dtype = keys.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, "keys: expected float32 or bfloat16, got ", dtype);
  check_tensor("keys", keys, dtype, {layers, slots, s.kv_heads, chunks, s.head_dim, PANEL});
  check_tensor("values", values, dtype, {layers, slots, s.kv_heads, chunks * PANEL, padded});
  TORCH_CHECK_VALUE(keys.is_contiguous() && values.is_contiguous(), "keys, values: expected contiguous tensors");
  return {keys.mutable_data_ptr(), values.mutable_data_ptr(), dtype == at::kBFloat16, slots, chunks * PANEL, padded};
}

// The rows that exist, in order.
Pass read_pass(const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& slot, const at::Tensor& position,
               const at::Tensor& exists, const std::optional<at::Tensor>& extent, const Cache& cache,
               const Shape& s) {
  const int64_t n = slot.numel(), covered = cos.dim() == 2 ? cos.size(0) : 0;
  check_tensor("cos", cos, at::kFloat, {covered, s.head_dim / 2});
  check_tensor("sin", sin, at::kFloat, {covered, s.head_dim / 2});
  check_tensor("slot", slot, at::kLong, {n});
  check_tensor("position", position, at::kLong, {n});
  check_tensor("exists", exists, at::kBool, {n});
  if (extent) check_tensor("extent", *extent, at::kLong, {cache.slots});
  TORCH_CHECK_VALUE(cos.is_contiguous() && sin.is_contiguous(), "cos, sin: expected contiguous tensors");
  const at::Tensor sl = slot.contiguous(), po = position.contiguous(), ex = exists.contiguous();
  const at::Tensor en = extent ? extent->contiguous() : at::Tensor();
  Pass pass;
  pass.cos = cos.const_data_ptr<float>();
  pass.sin = sin.const_data_ptr<float>();
  pass.threads = at::get_num_threads();
  for (int64_t i = 0; i < n; ++i) {
    if (!ex.const_data_ptr<bool>()[i]) continue;
    const int64_t r = sl.const_data_ptr<int64_t>()[i], p = po.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_VALUE(0 <= r && r < cache.slots, "slot: expected 0 … ", cache.slots - 1, ", got ", r);
    TORCH_CHECK_VALUE(0 <= p && p < cache.capacity && p < covered, "position: expected 0 … ",
                      std::min(cache.capacity, covered) - 1, ", got ", p);
    const int64_t end = extent ? en.const_data_ptr<int64_t>()[r] : p + 1;
    TORCH_CHECK_VALUE(p < end && end <= cache.capacity, "extent: expected ", p + 1, " … ", cache.capacity, ", got ", end);
    pass.rows.push_back({i, r, p, end});
  }
  return pass;
}

using Forward = std::tuple<at::Tensor, at::Tensor>;

// Final norm and head of the asked rows into `logits`; a row that does not exist becomes 0.
void run_head(const ModelKernels& k, const Shape& s, const Linear& head, const float* norm, float scale,
              const Pass& pass, const float* x, int64_t n, const at::Tensor& head_rows, at::Tensor& logits) {
  std::vector<int64_t> at(static_cast<std::size_t>(n), -1);
  for (std::size_t i = 0; i < pass.rows.size(); ++i) at[static_cast<std::size_t>(pass.rows[i].source)] = static_cast<int64_t>(i);
  const Arena::Scope scope(arena());
  const int64_t asked = head_rows.numel();
  float* normed = arena().take<float>(asked * s.hidden);
  std::vector<float*> to;
  for (int64_t i = 0; i < asked; ++i) {
    const int64_t row = head_rows.const_data_ptr<int64_t>()[i];
    float* out = logits.mutable_data_ptr<float>() + i * head.rows;
    const int64_t from = at[static_cast<std::size_t>(row)];
    if (from < 0) {
      std::fill(out, out + head.rows, 0.0f);
      continue;
    }
    k.rms_norm(x + from * s.hidden, norm, s.hidden, s.eps, normed + static_cast<int64_t>(to.size()) * s.hidden);
    to.push_back(out);
  }
  const int64_t live = static_cast<int64_t>(to.size());
  multiply(k, head, s.rounding, normed, live, to.data(), Epilogue::STORE, pass.threads);
  if (scale != 1.0f)
    for (float* row : to)
      for (int64_t v = 0; v < head.rows; ++v) row[v] *= scale;
}

Forward decoder_forward(at::TensorList weights, const at::Tensor& plan, at::ArrayRef<double> scalars, const at::Tensor& keys,
                        const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin,
                        const at::Tensor& tokens, const at::Tensor& slot, const at::Tensor& position,
                        const at::Tensor& exists, const at::Tensor& extent, at::IntArrayRef feature_layers,
                        const at::Tensor& head_rows) {
  TORCH_CHECK_VALUE(scalars.size() == 3, "scalars: expected eps, embedding scale, logit scale, got ", scalars.size());
  PlanReader reader(weights, plan);
  const Header h = read_header(reader, scalars[0]);
  const Shape& s = h.shape;
  const Linear embedding = reader.linear(-1, s.hidden), head = reader.linear(embedding.rows, s.hidden);
  const float* norm = reader.norm(s.hidden, false);
  std::vector<Layer> layers;
  for (int64_t i = 0; i < h.layers; ++i) layers.push_back(read_layer(reader, s));
  reader.finish();
  const Cache cache = read_cache(keys, values, s, h.layers);
  const Pass pass = read_pass(cos, sin, slot, position, exists, extent, cache, s);
  const int64_t n = slot.numel(), rows = static_cast<int64_t>(pass.rows.size());
  check_tensor("tokens", tokens, at::kLong, {n});
  check_tensor("head_rows", head_rows, at::kLong, {head_rows.numel()});
  const at::Tensor ids = tokens.contiguous(), asked = head_rows.contiguous();
  for (int64_t i = 0; i < asked.numel(); ++i) {
    const int64_t row = asked.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_VALUE(0 <= row && row < n, "head_rows: expected 0 … ", n - 1, ", got ", row);
  }
  for (const int64_t state : feature_layers)
    TORCH_CHECK_VALUE(0 <= state && state <= h.layers, "feature_layers: expected 0 … ", h.layers, ", got ", state);

  const ModelKernels& k = *current_isa().model;
  const Arena::Scope scope(arena());
  float* x = arena().take<float>(rows * s.hidden);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t id = ids.const_data_ptr<int64_t>()[pass.rows[static_cast<std::size_t>(i)].source];
    TORCH_CHECK_VALUE(0 <= id && id < embedding.rows, "tokens: expected 0 … ", embedding.rows - 1, ", got ", id);
    k.embed(embedding, id, static_cast<float>(scalars[1]), x + i * s.hidden);
  }
  const int64_t wanted = static_cast<int64_t>(feature_layers.size()), width = wanted * s.hidden;
  at::Tensor features = at::zeros({n, width}, cos.options());
  const auto keep = [&](int64_t state) {
    for (int64_t f = 0; f < wanted; ++f)
      if (feature_layers[static_cast<std::size_t>(f)] == state)
        for (int64_t i = 0; i < rows; ++i) {
          float* to = features.mutable_data_ptr<float>() + pass.rows[static_cast<std::size_t>(i)].source * width + f * s.hidden;
          std::copy(x + i * s.hidden, x + (i + 1) * s.hidden, to);
        }
  };
  keep(0);
  for (int64_t i = 0; i < h.layers; ++i) {
    run_layer(k, s, layers[static_cast<std::size_t>(i)], cache, i, pass, x);
    keep(i + 1);
  }
  at::Tensor logits = at::empty({asked.numel(), head.rows}, cos.options());
  run_head(k, s, head, norm, static_cast<float>(scalars[2]), pass, x, n, asked, logits);
  return {logits, features};
}

void context_append(at::TensorList weights, const at::Tensor& plan, double eps, const at::Tensor& keys, const at::Tensor& values,
                    const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& features, const at::Tensor& slot,
                    const at::Tensor& position, const at::Tensor& exists) {
  PlanReader reader(weights, plan);
  const Header h = read_header(reader, eps);
  const Shape& s = h.shape;
  const int64_t n = slot.numel(), pair = s.kv_heads * s.head_dim, width = 2 * h.layers * pair;
  const Linear fc = reader.linear(s.hidden, -1), project = reader.linear(width, s.hidden);
  const float* norm = reader.norm(s.hidden, false);
  std::vector<const float*> key_norms;
  for (int64_t layer = 0; layer < h.layers; ++layer) key_norms.push_back(reader.norm(s.head_dim, true));
  reader.finish();
  const Cache cache = read_cache(keys, values, s, h.layers);
  const Pass pass = read_pass(cos, sin, slot, position, exists, std::nullopt, cache, s);
  check_tensor("features", features, at::kFloat, {n, fc.columns});
  const at::Tensor input = features.contiguous();

  const ModelKernels& k = *current_isa().model;
  const Arena::Scope scope(arena());
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  float* x = arena().take<float>(rows * fc.columns);
  float* context = arena().take<float>(rows * s.hidden);
  float* made = arena().take<float>(rows * width);
  std::vector<float*> to, made_rows;
  for (int64_t i = 0; i < rows; ++i) {
    const float* from = input.const_data_ptr<float>() + pass.rows[static_cast<std::size_t>(i)].source * fc.columns;
    std::copy(from, from + fc.columns, x + i * fc.columns);
    to.push_back(context + i * s.hidden);
    made_rows.push_back(made + i * width);
  }
  multiply(k, fc, s.rounding, x, rows, to.data(), Epilogue::STORE, pass.threads);
  for (float* row : to) k.rms_norm(row, norm, s.hidden, s.eps, row);
  multiply(k, project, s.rounding, context, rows, made_rows.data(), Epilogue::STORE, pass.threads);
  for (int64_t layer = 0; layer < h.layers; ++layer) {
    const float* key_norm = key_norms[static_cast<std::size_t>(layer)];
    for (int64_t i = 0; i < rows; ++i) {
      const Row& row = pass.rows[static_cast<std::size_t>(i)];
      const int64_t half = s.head_dim / 2;
      float* key = made + i * width + 2 * layer * pair;
      remember(k, s, key_norm, cache, layer, row, pass.cos + row.position * half, pass.sin + row.position * half, key, key + pair);
    }
  }
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& record, int64_t rounding) {
  TORCH_CHECK_VALUE(0 <= rounding && rounding <= 2, "rounding: expected 0, 1 or 2, got ", rounding);
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
  multiply(*current_isa().model, w, static_cast<Rounding>(rounding), input.const_data_ptr<float>(), rows, to.data(),
           Epilogue::STORE, at::get_num_threads());
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
  for (int64_t r = 0; r < p.size(0); ++r) {
    const float* from = input.const_data_ptr<float>() + r * table.rows;
    float* to = out.mutable_data_ptr<float>() + r * table.columns;
    parallel_chunks(at::get_num_threads(), table.blocks(), 1,
                    [&](int64_t begin, int64_t end) { k.weighted_rows(table, from, begin, end, to); });
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
