#include "model.h"

#include <algorithm>
#include <cstring>

#include "pool.h"

namespace blockpilot {
namespace {

// Fewer are prepared by the caller alone: waking a thread costs more than they do.
constexpr int64_t BLOCKS_PREPARED = 48;

// Of a product: few enough to read on in long runs, so many that a delayed thread leaves little to wait for.
constexpr int64_t CHUNKS_A_THREAD = 4;

constexpr int64_t HEADS_A_THREAD = 40;
constexpr int64_t TILES_A_THREAD = 2;  // of queries, as far as there are that many

uint16_t stored(float x, uint16_t) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

float stored(float x, float) { return x; }

// A position's key and value of one head.
template <typename T>
void put(const float* key, const float* value, int64_t dim, void* keys, int64_t key_at, void* values,
         int64_t value_at) {
  T *k = static_cast<T*>(keys) + key_at, *v = static_cast<T*>(values) + value_at;
  for (int64_t d = 0; d < dim; ++d) k[d * PANEL] = stored(key[d], T());
  for (int64_t d = 0; d < dim; ++d) v[d] = stored(value[d], T());
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

// The outputs of a matrix from unit `first` on.
Linear units_from(const Linear& w, int64_t first) {
  return {w.data + first * 2 * w.blocks() * block_bytes(w.format), w.bias ? w.bias + first * UNIT : nullptr,
          w.format, w.rows - first * UNIT, w.columns};
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

// Queries `tile` of one layer, `room` scores and sums for each; out [rows][heads][head dim].
void attend_tile(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
                 const Pass& pass, const QueryTile& tile, const float* qkv, float* out) {
  thread_local std::vector<float> scores;
  thread_local std::vector<Query> queries;
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim, groups = s.heads / s.kv_heads;
  const int64_t room = cache.capacity + cache.padded_dim;
  const std::size_t needed = static_cast<std::size_t>(k.tile_queries * room);
  if (scores.size() < needed) scores.resize(needed);
  const int64_t slot = pass.rows[static_cast<std::size_t>(tile.row)].slot;
  const Attended over = {
      offset(cache.keys, cache.bf16, head_start(cache, s, index, slot, tile.kv_head, s.head_dim)),
      offset(cache.values, cache.bf16, head_start(cache, s, index, slot, tile.kv_head, cache.padded_dim)),
      cache.bf16,
      s.head_dim,
      cache.padded_dim,
      1.0f / __builtin_sqrtf(static_cast<float>(s.head_dim))};
  queries.clear();
  for (int64_t at = tile.begin; at < tile.end; ++at) {
    const int64_t row = tile.row + at / groups, head = tile.kv_head * groups + at % groups;
    const Range seen = visible(layer, pass.rows[static_cast<std::size_t>(row)]);
    float* own = scores.data() + (at - tile.begin) * room;
    queries.push_back({qkv + row * width + head * s.head_dim, seen.begin, seen.end, own, own + cache.capacity,
                       out + (row * s.heads + head) * s.head_dim,
                       pass.rows[static_cast<std::size_t>(row)].path});
  }
  k.attend(over, queries.data(), tile.end - tile.begin);
}

void attend_rows(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
                 const Pass& pass, const float* qkv, float* out) {
  const int64_t count = static_cast<int64_t>(pass.tiles.size());
  parallel_chunks(pass.threads, count, std::max<int64_t>(1, count / (CHUNKS_A_THREAD * pass.threads)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i)
                      attend_tile(k, s, layer, cache, index, pass, pass.tiles[static_cast<std::size_t>(i)],
                                  qkv, out);
                  });
}

// Norms, rotations and cache writes of the rows' heads. Threads share them by KV head, in two parts, its
// queries and its key and value: keys of neighbouring positions lie in one cache line.
void place_rows(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
                const Pass& pass, float* qkv) {
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim, half = s.head_dim / 2;
  const int64_t rows = static_cast<int64_t>(pass.rows.size()), groups = s.heads / s.kv_heads;
  const int64_t threads = rows * s.heads < HEADS_A_THREAD ? 1 : pass.threads;
  const auto place = [&](int64_t head, bool queries, const Row& row, float* own) {
    const float *cos = pass.cos + row.turn * half, *sin = pass.sin + row.turn * half;
    float* keys = own + s.heads * s.head_dim;
    if (!queries)
      return remember(k, s, layer.key_norm, cache, index, row, head, head + 1, cos, sin, keys,
                      keys + s.kv_heads * s.head_dim);
    for (int64_t h = head * groups; h < (head + 1) * groups; ++h) {
      float* q = own + h * s.head_dim;
      if (layer.query_norm) k.rms_norm(q, layer.query_norm, s.head_dim, s.eps, q);
      k.rope(q, cos, sin, half);
    }
  };
  parallel_chunks(threads, 2 * s.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      for (int64_t i = 0; i < rows; ++i)
        place(part / 2, part % 2 == 0, pass.rows[static_cast<std::size_t>(i)], qkv + i * width);
  });
}

}  // namespace

std::vector<QueryTile> query_tiles(const std::vector<Row>& rows, const Shape& s, int64_t most,
                                   int64_t threads) {
  const int64_t count = static_cast<int64_t>(rows.size()), groups = s.heads / s.kv_heads;
  most = std::clamp<int64_t>(count * s.heads / (TILES_A_THREAD * threads), 1, most);
  std::vector<QueryTile> tiles;
  for (int64_t row = 0, next; row < count; row = next) {
    next = row + 1;
    while (next < count &&
           rows[static_cast<std::size_t>(next)].slot == rows[static_cast<std::size_t>(row)].slot)
      ++next;
    const int64_t queries = (next - row) * groups, parts = (queries + most - 1) / most;
    for (int64_t head = 0; head < s.kv_heads; ++head)
      for (int64_t i = 0; i < parts; ++i)
        tiles.push_back({row, head, i * queries / parts, (i + 1) * queries / parts});
  }
  return tiles;
}

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
              const Row& row, int64_t begin, int64_t end, const float* cos, const float* sin, float* keys,
              const float* values) {
  for (int64_t h = begin; h < end; ++h) {
    float* key = keys + h * s.head_dim;
    const float* value = values + h * s.head_dim;
    if (norm) k.rms_norm(key, norm, s.head_dim, s.eps, key);
    k.rope(key, cos, sin, s.head_dim / 2);
    const int64_t chunk = row.place / PANEL * PANEL * s.head_dim + row.place % PANEL;
    const int64_t key_at = head_start(c, s, layer, row.slot, h, s.head_dim) + chunk;
    const int64_t value_at = head_start(c, s, layer, row.slot, h, c.padded_dim) + row.place * c.padded_dim;
    const auto write = c.bf16 ? put<uint16_t> : put<float>;
    write(key, value, s.head_dim, c.keys, key_at, c.values, value_at);
  }
}

int64_t product_grain(const Linear& w, int64_t threads) {
  return std::max<int64_t>(1, w.units() / (CHUNKS_A_THREAD * threads));
}

void multiply(const ModelKernels& k, const Linear& w, Rounding asked, const Input& input, float* const* to,
              Epilogue epilogue, int64_t threads, const AfterUnits& after) {
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
  // Threads share the blocks, not the rows: what is kept of a block's rows lies in one cache line.
  const int64_t sharing = rows * blocks < BLOCKS_PREPARED ? 1 : threads;
  parallel_chunks(sharing, blocks, (blocks + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < rows; ++i) {
      const float* x = input.x + i * w.columns;
      const float factor = input.norm ? k.rms_factor(x, w.columns, input.eps) : 1.0f;
      k.prepare(x, input.norm, factor, w, rounding, i, begin, end, a);
    }
  });
  const Output out = {to, epilogue};
  parallel_chunks(threads, w.units(), product_grain(w, threads), [&](int64_t begin, int64_t end) {
    k.linear(w, a, rounding, rows, out, begin, end);
    if (after) after(begin, end);
  });
}

void run_layer(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
               const Pass& pass, float* x) {
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  run_layer(k, s, layer, cache, index, pass, {x, rows, layer.input_norm, s.eps}, x);
}

void run_layer(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
               const Pass& pass, const Input& mixing, float* x) {
  const Arena::Scope scope(arena());
  float* qkv = arena().take<float>(mixing.rows * (s.heads + 2 * s.kv_heads) * s.head_dim);
  open_layer(k, s, layer, cache, index, pass, mixing, qkv);
  close_layer(k, s, layer, cache, index, pass, qkv, x);
}

void open_layer(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
                const Pass& pass, const Input& mixing, float* qkv) {
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim;
  multiply(k, layer.qkv, s.rounding, mixing, row_pointers(qkv, mixing.rows, width).data(), Epilogue::STORE,
           pass.threads);
  place_rows(k, s, layer, cache, index, pass, qkv);
}

void keep_layer(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
                const Pass& pass, const Input& mixing) {
  const int64_t queries = s.heads * s.head_dim, first = queries / UNIT, half = s.head_dim / 2;
  const Linear w = units_from(layer.qkv, first);
  const Arena::Scope scope(arena());
  float* made = arena().take<float>(mixing.rows * w.rows);
  multiply(k, w, s.rounding, mixing, row_pointers(made, mixing.rows, w.rows).data(), Epilogue::STORE,
           pass.threads);
  parallel_chunks(pass.threads, s.kv_heads, 1, [&](int64_t begin, int64_t end) {
    float* keys = made + queries - first * UNIT;
    for (const Row& row : pass.rows) {
      remember(k, s, layer.key_norm, cache, index, row, begin, end, pass.cos + row.turn * half,
               pass.sin + row.turn * half, keys, keys + s.kv_heads * s.head_dim);
      keys += w.rows;
    }
  });
}

void close_layer(const ModelKernels& k, const Shape& s, const Layer& layer, const Cache& cache, int64_t index,
                 const Pass& pass, const float* qkv, float* x) {
  const int64_t rows = static_cast<int64_t>(pass.rows.size()), threads = pass.threads;
  Arena& memory = arena();
  const Arena::Scope scope(memory);
  float* mixed = memory.take<float>(rows * s.heads * s.head_dim);
  float* active = memory.take<float>(rows * s.intermediate);
  const std::vector<float*> residual = row_pointers(x, rows, s.hidden);
  attend_rows(k, s, layer, cache, index, pass, qkv, mixed);
  multiply(k, layer.out, s.rounding, {mixed, rows}, residual.data(), Epilogue::ADD, threads);
  multiply(k, layer.gate_up, s.rounding, {x, rows, layer.post_norm, s.eps},
           row_pointers(active, rows, s.intermediate).data(), Epilogue::SWIGLU, threads);
  multiply(k, layer.down, s.rounding, {active, rows}, residual.data(), Epilogue::ADD, threads);
}

}  // namespace blockpilot
