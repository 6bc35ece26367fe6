#include "model.h"

#include <algorithm>
#include <cstring>

#include "pool.h"

namespace blockpilot {
namespace {

// Rows below this are done by the caller alone: waking a thread costs more than they do.
constexpr int64_t ROWS_A_THREAD = 2;

int64_t rows_grain(int64_t rows, int64_t threads) {
  return std::max(ROWS_A_THREAD, (rows + 2 * threads - 1) / (2 * threads));
}

uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

void put(void* base, bool bf16, int64_t at, float x) {
  if (bf16)
    static_cast<uint16_t*>(base)[at] = to_bf16(x);
  else
    static_cast<float*>(base)[at] = x;
}

// First element of a slot's keys or values of one head; `width` is elements a position.
int64_t head_start(const Cache& c, const Shape& s, int64_t layer, int64_t slot, int64_t head, int64_t width) {
  return ((layer * c.slots + slot) * s.kv_heads + head) * c.capacity * width;
}

const void* offset(const void* base, bool bf16, int64_t elements) {
  return static_cast<const uint8_t*>(base) + elements * (bf16 ? 2 : 4);
}

std::vector<float*> row_pointers(float* base, int64_t rows, int64_t stride) {
  std::vector<float*> at(static_cast<std::size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) at[static_cast<std::size_t>(i)] = base + i * stride;
  return at;
}

struct Range {
  int64_t begin, end;
};

// The positions that a row sees.
Range visible(const Layer& layer, const Row& row) {
  const int64_t end = layer.causal ? std::min(row.position + 1, row.extent) : row.extent;
  if (layer.window <= 0) return {0, end};
  return {std::max<int64_t>(0, row.position - layer.window + 1), std::min(end, row.position + layer.window)};
}

// The rows of one slot that stand together, `row` among them.
Range neighbours(const std::vector<Row>& rows, int64_t row) {
  const auto slot = [&](int64_t i) { return rows[static_cast<std::size_t>(i)].slot; };
  Range found = {row, row + 1};
  while (found.begin > 0 && slot(found.begin - 1) == slot(row)) --found.begin;
  while (found.end < static_cast<int64_t>(rows.size()) && slot(found.end) == slot(row)) ++found.end;
  return found;
}

// Queries are numbered so that those over the same keys follow each other: neighbouring rows of a slot, KV
// head, row, head.
void attend_rows(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
                 const Pass& pass, const float* qkv, float* out) {
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim, groups = s.heads / s.kv_heads;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(s.head_dim));
  const int64_t total = static_cast<int64_t>(pass.rows.size()) * s.heads,
                room = cache.capacity + cache.padded_dim;
  const int64_t parts = std::clamp<int64_t>(total / (2 * k.tile_queries * pass.threads), 1, 8) * pass.threads;
  parallel_chunks(pass.threads, total, (total + parts - 1) / parts, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scores;
    thread_local std::vector<Query> tile;
    const std::size_t needed = static_cast<std::size_t>(k.tile_queries * room);
    if (scores.size() < needed) scores.resize(needed);
    while (begin < end) {
      const Range rows = neighbours(pass.rows, begin / s.heads);
      const int64_t a_head = (rows.end - rows.begin) * groups, first = begin - rows.begin * s.heads;
      const int64_t kv = first / a_head, stop = std::min(end, begin + a_head - first % a_head);
      const int64_t slot = pass.rows[static_cast<std::size_t>(rows.begin)].slot;
      const Attended over = {
          offset(cache.keys, cache.bf16, head_start(cache, s, index, slot, kv, s.head_dim)),
          offset(cache.values, cache.bf16, head_start(cache, s, index, slot, kv, cache.padded_dim)),
          cache.bf16,
          s.head_dim,
          cache.padded_dim,
          scale};
      tile.clear();
      for (; begin < stop && static_cast<int64_t>(tile.size()) < k.tile_queries; ++begin) {
        const int64_t at = (begin - rows.begin * s.heads) % a_head;
        const int64_t row = rows.begin + at / groups, head = kv * groups + at % groups;
        const Range seen = visible(layer, pass.rows[static_cast<std::size_t>(row)]);
        float* own = scores.data() + static_cast<int64_t>(tile.size()) * room;
        tile.push_back({qkv + row * width + head * s.head_dim, seen.begin, seen.end, own,
                        own + cache.capacity, out + (row * s.heads + head) * s.head_dim});
      }
      k.attend(over, tile.data(), static_cast<int64_t>(tile.size()));
    }
  });
}

// Norms, rotations and cache writes of the rows' heads.
void place_rows(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
                const Pass& pass, float* qkv) {
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim, half = s.head_dim / 2;
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  parallel_chunks(pass.threads, rows, rows_grain(rows, pass.threads), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Row& row = pass.rows[static_cast<std::size_t>(i)];
      float* q = qkv + i * width;
      const float *cos = pass.cos + row.position * half, *sin = pass.sin + row.position * half;
      for (int64_t h = 0; h < s.heads; ++h, q += s.head_dim) {
        if (layer.query_norm) k.rms_norm(q, layer.query_norm, s.head_dim, s.eps, q);
        k.rope(q, cos, sin, half);
      }
      remember(k, s, layer.key_norm, cache, index, row, cos, sin, q, q + s.kv_heads * s.head_dim);
    }
  });
}

}  // namespace

void* Arena::bytes(int64_t size) {
  if (at_ == buffers_.size()) buffers_.emplace_back();
  std::vector<uint8_t>& buffer = buffers_[at_++];
  if (buffer.size() < static_cast<std::size_t>(size) + 64) buffer.resize(static_cast<std::size_t>(size) + 64);
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t{63});
}

Arena& arena() {
  thread_local Arena own;
  return own;
}

void remember(const ModelKernels& k, const Shape& s, const float* norm, const Cache& c, int64_t layer,
              const Row& row, const float* cos, const float* sin, float* key, const float* value) {
  for (int64_t h = 0; h < s.kv_heads; ++h, key += s.head_dim, value += s.head_dim) {
    if (norm) k.rms_norm(key, norm, s.head_dim, s.eps, key);
    k.rope(key, cos, sin, s.head_dim / 2);
    const int64_t chunk = row.position / PANEL * PANEL * s.head_dim + row.position % PANEL;
    const int64_t key_at = head_start(c, s, layer, row.slot, h, s.head_dim) + chunk;
    const int64_t value_at = head_start(c, s, layer, row.slot, h, c.padded_dim) + row.position * c.padded_dim;
    for (int64_t d = 0; d < s.head_dim; ++d) put(c.keys, c.bf16, key_at + d * PANEL, key[d]);
    for (int64_t d = 0; d < s.head_dim; ++d) put(c.values, c.bf16, value_at + d, value[d]);
  }
}

void multiply(const ModelKernels& k, const Linear& w, Rounding asked, const Input& input, float* const* to,
              Epilogue epilogue, int64_t threads) {
  const int64_t rows = input.rows;
  const Rounding rounding = code_rows(asked) > 0 && !is_quantised(w.format) ? Rounding::NONE : asked;
  const int64_t codes = code_rows(rounding), lines = rows * std::max<int64_t>(1, codes), blocks = w.blocks();
  Arena& memory = arena();
  const Arena::Scope scope(memory);
  const int64_t room = (lines + k.tile_rows - 1) / k.tile_rows * k.tile_rows * blocks;
  const Activations a = {memory.take<float>(codes > 0 ? 0 : room * BLOCK),
                         memory.take<int8_t>(codes > 0 ? room * BLOCK : 0),
                         memory.take<float>(codes > 0 ? room : 0), memory.take<float>(room),
                         memory.take<int32_t>(codes > 0 ? room : 0)};
  float* normed = memory.take<float>(input.norm ? rows * w.columns : 0);
  parallel_chunks(threads, rows, rows_grain(rows, threads), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* x = input.x + i * w.columns;
      if (input.norm) {
        k.rms_norm(x, input.norm, w.columns, input.eps, normed + i * w.columns);
        x = normed + i * w.columns;
      }
      k.prepare(x, w.columns, rounding, i, a);
    }
  });
  const Output out = {to, epilogue};
  const int64_t grain = std::max<int64_t>(1, w.units() / (8 * threads));
  parallel_chunks(threads, w.units(), grain,
                  [&](int64_t begin, int64_t end) { k.linear(w, a, rounding, rows, out, begin, end); });
}

void run_layer(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
               const Pass& pass, float* x) {
  const int64_t rows = static_cast<int64_t>(pass.rows.size()), threads = pass.threads;
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim, attended = s.heads * s.head_dim;
  Arena& memory = arena();
  const Arena::Scope scope(memory);
  float* qkv = memory.take<float>(rows * width);
  float* mixed = memory.take<float>(rows * attended);
  float* active = memory.take<float>(rows * s.intermediate);
  const std::vector<float*> residual = row_pointers(x, rows, s.hidden);
  multiply(k, layer.qkv, s.rounding, {x, rows, layer.input_norm, s.eps},
           row_pointers(qkv, rows, width).data(), Epilogue::STORE, threads);
  place_rows(k, s, layer, cache, index, pass, qkv);
  attend_rows(k, s, layer, cache, index, pass, qkv, mixed);
  multiply(k, layer.out, s.rounding, {mixed, rows}, residual.data(), Epilogue::ADD, threads);
  multiply(k, layer.gate_up, s.rounding, {x, rows, layer.post_norm, s.eps},
           row_pointers(active, rows, s.intermediate).data(), Epilogue::SWIGLU, threads);
  multiply(k, layer.down, s.rounding, {active, rows}, residual.data(), Epilogue::ADD, threads);
}

}  // namespace blockpilot
