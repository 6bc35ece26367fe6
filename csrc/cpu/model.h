// A packed decoder: what one forward pass needs, torch-free.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "model_kernels.h"

namespace blockpilot {

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *input_norm, *post_norm;
  const float *query_norm, *key_norm;  // [head dim] or null
  int64_t window;                      // |position − key| < window; 0 means no window
  bool causal;
};

struct Shape {
  int64_t hidden, heads, kv_heads, head_dim, intermediate;
  float eps;
  Rounding rounding;
};

// Keys [layer][slot][KV head][chunk of 16 positions][head dim][16], values [layer][slot][KV
// head][position][padded head dim], float or bfloat16.
struct Cache {
  void *keys, *values;
  bool bf16;
  int64_t slots, capacity, padded_dim;
};

// One packed row of a pass; `source` is its index in the caller's tensors.
struct Row {
  int64_t source, slot, position;
  int64_t extent;  // places of its slot that hold keys once this pass has written
  int64_t place;   // of its own key and value: `position`, but in a tree of drafts
  Path path = {};
  int64_t turn = position;  // row of the rotary tables
};

// Queries that are taken together: those numbered [begin, end) of a KV head and the rows of one slot from
// `row` on, in the order row, head.
struct QueryTile {
  int64_t row, kv_head, begin, end;
};

struct Pass {
  std::vector<Row> rows;
  std::vector<QueryTile> tiles;
  const float *cos, *sin;  // [capacity][head dim / 2]
  int64_t threads;
};

// Buffers of one pass, kept and grown from pass to pass by each calling thread.
class Arena {
 public:
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(bytes(count * static_cast<int64_t>(sizeof(T))));
  }

  // What was taken while it lives may be taken again afterwards.
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), at_(arena.at_) {}
    ~Scope() { arena_.at_ = at_; }
    Scope(const Scope&) = delete;

   private:
    Arena& arena_;
    std::size_t at_;
  };

 private:
  void* bytes(int64_t size);
  std::vector<std::vector<uint8_t>> buffers_;
  std::size_t at_ = 0;
};

Arena& arena();

// Tiles of near equal size, at most `most` queries, that cover the rows' queries; smaller ones if a thread
// would have few.
std::vector<QueryTile> query_tiles(const std::vector<Row>& rows, const Shape& shape, int64_t most,
                                   int64_t threads);

// Rows of a product, [rows][columns]; `norm` [columns] normalises each of them first, unless it is null.
struct Input {
  const float* x;
  int64_t rows;
  const float* norm = nullptr;
  float eps = 0.0f;
};

// Called by the thread that made the outputs of a matrix's units [begin, end), of every row.
using AfterUnits = std::function<void(int64_t begin, int64_t end)>;

// Units that a thread makes at once.
int64_t product_grain(const Linear& w, int64_t threads);

// y = x·Wᵀ + b on every row, through `rounding`.
void multiply(const ModelKernels& k, const Linear& w, Rounding rounding, const Input& input, float* const* to,
              Epilogue epilogue, int64_t threads, const AfterUnits& after = nullptr);

// x [rows][hidden] through one layer, in place; writes the rows' keys and values.
void run_layer(const ModelKernels& k, const Shape& shape, const Layer& layer, const Cache& cache,
               int64_t index, const Pass& pass, float* x);

// The same with queries, keys and values made of `mixing`, a row of which may be wider, in place of normed x.
void run_layer(const ModelKernels& k, const Shape& shape, const Layer& layer, const Cache& cache,
               int64_t index, const Pass& pass, const Input& mixing, float* x);

// That in two halves. First `mixing` → qkv [rows][queries, keys, values], rotated; writes keys and values.
void open_layer(const ModelKernels& k, const Shape& shape, const Layer& layer, const Cache& cache,
                int64_t index, const Pass& pass, const Input& mixing, float* qkv);

// Or their keys and values alone, of rows that the layer's output is not asked of.
void keep_layer(const ModelKernels& k, const Shape& shape, const Layer& layer, const Cache& cache,
                int64_t index, const Pass& pass, const Input& mixing);

// Then what the pass's rows make of their queries, of which it may have fewer, in x [rows][hidden], in place.
void close_layer(const ModelKernels& k, const Shape& shape, const Layer& layer, const Cache& cache,
                 int64_t index, const Pass& pass, const float* qkv, float* x);

// Keys and values of one row and the KV heads [begin, end) into a cache: keys normalised by `norm` unless
// null, then rotated.
void remember(const ModelKernels& k, const Shape& shape, const float* norm, const Cache& cache, int64_t layer,
              const Row& row, int64_t begin, int64_t end, const float* cos, const float* sin, float* keys,
              const float* values);

}  // namespace blockpilot
