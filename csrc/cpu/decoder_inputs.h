// Plans and tensors of the packed decoder, checked, so that nothing below can leave its memory.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "checks.h"
#include "model.h"

namespace blockpilot {

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
    TORCH_CHECK_VALUE(columns < 0 || columns == w.columns, "plan: expected ", columns, " columns, got ",
                      w.columns);
    w.data = bytes(blob, word(0, INT64_MAX), w.units() * 2 * w.blocks() * block_bytes(w.format));
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(w.data) % LINE == 0,
                      "plan: expected matrices at addresses that are multiples of ", LINE);
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

inline Header read_header(PlanReader& plan, double eps) {
  Header h;
  const int64_t most = int64_t{1} << 24;
  h.shape.hidden = plan.word(1, most);
  h.shape.heads = plan.word(1, most);
  h.shape.kv_heads = plan.word(1, h.shape.heads);
  h.shape.head_dim = plan.word(2, 4096);
  h.shape.intermediate = plan.word(0, most);
  h.layers = plan.word(1, 4096);
  h.shape.rounding = static_cast<Rounding>(plan.word(0, 3));
  plan.word(0, 0);
  TORCH_CHECK_VALUE(h.shape.heads % h.shape.kv_heads == 0 && h.shape.head_dim % 2 == 0,
                    "plan: expected heads in whole groups and an even head size");
  h.shape.eps = static_cast<float>(eps);
  return h;
}

// `columns`: of what queries, keys and values are made of.
inline Layer read_layer(PlanReader& plan, const Shape& s, int64_t columns) {
  const int64_t attended = s.heads * s.head_dim;
  Layer layer;
  layer.qkv = plan.linear((s.heads + 2 * s.kv_heads) * s.head_dim, columns);
  layer.out = plan.linear(s.hidden, attended);
  layer.gate_up = plan.linear(2 * s.intermediate, s.hidden);
  layer.down = plan.linear(s.hidden, s.intermediate);
  TORCH_CHECK_VALUE(s.intermediate % PANEL == 0, "plan: expected an intermediate size in panels of 16");
  layer.input_norm = plan.norm(s.hidden, false);
  layer.post_norm = plan.norm(s.hidden, false);
  layer.query_norm = plan.norm(s.head_dim, true);
  layer.key_norm = plan.norm(s.head_dim, true);
  layer.window = plan.word(0, int64_t{1} << 40);
  layer.causal = plan.word(0, 1) == 1;
  return layer;
}

inline Cache read_cache(const at::Tensor& keys, const at::Tensor& values, const Shape& s, int64_t layers) {
  TORCH_CHECK_VALUE(keys.dim() == 6 && values.dim() == 5, "keys, values: expected 6 and 5 dimensions, got ",
                    keys.dim(), " and ", values.dim());
  const int64_t slots = keys.size(1), chunks = keys.size(3);
  const int64_t padded = (s.head_dim + PANEL - 1) / PANEL * PANEL;
  const at::ScalarType dtype = keys.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, "keys: expected float32 or bfloat16, got ",
                    dtype);
  check_tensor("keys", keys, dtype, {layers, slots, s.kv_heads, chunks, s.head_dim, PANEL});
  check_tensor("values", values, dtype, {layers, slots, s.kv_heads, chunks * PANEL, padded});
  TORCH_CHECK_VALUE(keys.is_contiguous() && values.is_contiguous(),
                    "keys, values: expected contiguous tensors");
  return {keys.mutable_data_ptr(), values.mutable_data_ptr(),
          dtype == at::kBFloat16,  slots,
          chunks * PANEL,          padded};
}

// How many positions the rotary tables cover.
inline int64_t check_rope(const at::Tensor& cos, const at::Tensor& sin, const Shape& s) {
  const int64_t covered = cos.dim() == 2 ? cos.size(0) : 0;
  check_tensor("cos", cos, at::kFloat, {covered, s.head_dim / 2});
  check_tensor("sin", sin, at::kFloat, {covered, s.head_dim / 2});
  TORCH_CHECK_VALUE(cos.is_contiguous() && sin.is_contiguous(), "cos, sin: expected contiguous tensors");
  return covered;
}

inline Pass empty_pass(const at::Tensor& cos, const at::Tensor& sin) {
  Pass pass;
  pass.cos = cos.const_data_ptr<float>();
  pass.sin = sin.const_data_ptr<float>();
  pass.threads = at::get_num_threads();
  return pass;
}

// Where a row of a tree finds its ancestors among the drafts and itself: `places` [depth], the anchor's
// first. A path that lies in a row from the anchor on needs none.
inline void read_path(const int64_t* places, int64_t depths, Row& row) {
  const int64_t anchor = places[0], depth = row.position - anchor;
  TORCH_CHECK_VALUE(0 <= anchor && 0 <= depth && depth < depths, "path: expected an anchor at most ",
                    depths - 1, " before position ", row.position, ", got ", anchor);
  for (int64_t d = 1; d <= depth; ++d)
    TORCH_CHECK_VALUE(places[d - 1] < places[d], "path: expected rising places, got ", places[d - 1],
                      " before ", places[d]);
  row.place = places[depth];
  TORCH_CHECK_VALUE(row.place < row.extent, "path: expected places below the extent ", row.extent, ", got ",
                    row.place);
  for (int64_t d = 0; d <= depth && !row.path.of; ++d)
    if (places[d] != anchor + d) row.path = {anchor + d, places + d};
}

// The rows that exist, in order. `path` [n, depths] is that of `read_path`, and must outlive them.
inline Pass read_pass(const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& slot,
                      const at::Tensor& position, const at::Tensor& exists,
                      const std::optional<at::Tensor>& extent, const Cache& cache, const Shape& s,
                      const at::Tensor* path = nullptr) {
  const int64_t n = slot.numel(), covered = check_rope(cos, sin, s);
  check_tensor("slot", slot, at::kLong, {n});
  check_tensor("position", position, at::kLong, {n});
  check_tensor("exists", exists, at::kBool, {n});
  if (extent) check_tensor("extent", *extent, at::kLong, {cache.slots});
  const at::Tensor sl = slot.contiguous(), po = position.contiguous(), ex = exists.contiguous();
  const at::Tensor en = extent ? extent->contiguous() : at::Tensor();
  Pass pass = empty_pass(cos, sin);
  for (int64_t i = 0; i < n; ++i) {
    if (!ex.const_data_ptr<bool>()[i]) continue;
    const int64_t r = sl.const_data_ptr<int64_t>()[i], p = po.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_VALUE(0 <= r && r < cache.slots, "slot: expected 0 … ", cache.slots - 1, ", got ", r);
    TORCH_CHECK_VALUE(0 <= p && p < cache.capacity && p < covered, "position: expected 0 … ",
                      std::min(cache.capacity, covered) - 1, ", got ", p);
    const int64_t end = extent ? en.const_data_ptr<int64_t>()[r] : p + 1;
    TORCH_CHECK_VALUE(p < end && end <= cache.capacity, "extent: expected ", p + 1, " … ", cache.capacity,
                      ", got ", end);
    pass.rows.push_back({i, r, p, end, p});
    if (path) read_path(path->const_data_ptr<int64_t>() + i * path->size(1), path->size(1), pass.rows.back());
  }
  return pass;
}

}  // namespace blockpilot
