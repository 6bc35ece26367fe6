// Kernels of the packed decoder, one table per instruction set. Torch-free for the reason given in rows.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace blockpilot {

// A packed matrix holds panels of 16 output rows; a panel holds blocks of 32 columns, column padding is zero.
// Rows are padded to a multiple of 32, so that a unit of work is always two panels.
//   F32         [32 columns][16 rows]
//   BF16        [16 pairs of columns][16 rows][2 columns]
//   Q8_0        16 float16 scales, [8 groups][16 rows][4 columns] signed bytes
//   Q4_0, Q4_1  16 float16 scales, (Q4_1: 16 float16 offsets,) [4 groups][16 rows][4 bytes]; byte j of
//               group g holds column 4g + j in its low half and column 16 + 4g + j in its high half
// Codes start at multiples of 64 bytes: of Q8_0 and Q4_0, whose blocks end in half a line, every other block
// has its scales behind its codes. A matrix starts at a multiple of 64.
enum class Format : int64_t { F32 = 0, BF16 = 1, Q8_0 = 2, Q4_0 = 3, Q4_1 = 4 };

constexpr int64_t PANEL = 16;
constexpr int64_t BLOCK = 32;
constexpr int64_t UNIT = 2 * PANEL;

constexpr int64_t block_bytes(Format format) {
  switch (format) {
    case Format::F32:
      return 2048;
    case Format::BF16:
      return 1024;
    case Format::Q8_0:
      return 32 + 512;
    case Format::Q4_0:
      return 32 + 256;
    case Format::Q4_1:
      return 64 + 256;
  }
  return 0;
}

constexpr int64_t LINE = 64;

inline bool is_quantised(Format format) { return format >= Format::Q8_0; }

struct Linear {
  const uint8_t* data;
  const float* bias;  // [rows] or null
  Format format;
  int64_t rows, columns;

  int64_t units() const { return (rows + UNIT - 1) / UNIT; }
  int64_t blocks() const { return (columns + BLOCK - 1) / BLOCK; }
};

// How the input of a product is rounded: not at all, to bfloat16, or to codes with one scale per block
// (quantised formats only; the others take it unrounded): signed bytes, or ±16256 as 128 · high + low byte.
enum class Rounding : int64_t { NONE = 0, BF16 = 1, INT8 = 2, INT16 = 3 };

inline int64_t code_rows(Rounding rounding) {
  return rounding == Rounding::INT16 ? 2 : rounding == Rounding::INT8 ? 1 : 0;
}

// Rows prepared for products, in tiles of `tile_rows`: values zero padded, as floats or, where a product
// takes them, as bfloat16; or codes; a sum and a scale per block, and of codes the sum of the codes
// themselves.
struct Activations {
  float* values;
  int8_t* codes;
  float* scales;
  float* sums;
  int32_t* code_sums;
};

// What becomes of a unit's outputs, total + bias of row i:
//   STORE   to[i][n] = y          ADD  to[i][n] += y
//   SWIGLU  the unit's first panel is a gate, its second the matching up: to[i][n/2] = silu(gate) · up
enum class Epilogue : int64_t { STORE = 0, ADD = 1, SWIGLU = 2 };

struct Output {
  float* const* to;  // [m] row pointers
  Epilogue epilogue;
};

// Keys [16-position chunk][head dim][16], values [position][padded head dim], of one slot, layer and KV head.
struct Attended {
  const void* keys;
  const void* values;
  bool bf16;
  int64_t dim, padded_dim;
  float scale;
};

// Keys and values of a query in a tree of drafts: its ancestors among the drafts, and itself, lie between
// other branches. `of[i]`, rising and at least from + i, is the place of position from + i; those before
// `from` are at places of their own number.
struct Path {
  int64_t from = INT64_MAX;
  const int64_t* of = nullptr;
};

struct Query {
  const float* x;     // [dim]
  int64_t low, high;  // visible positions
  float* scores;      // [the highest place of the call + 1, rounded up to 16]
  float* sums;        // [padded dim]
  float* out;         // [dim]
  Path path;

  int64_t places() const { return path.of ? path.of[high - 1 - path.from] + 1 : high; }
};

struct ModelKernels {
  int64_t tile_rows, tile_queries;
  // Blocks [begin, end) of a row, for a product with w: of x, or of x · factor · norm if there is a norm.
  void (*prepare)(const float* x, const float* norm, float factor, const Linear& w, Rounding rounding,
                  int64_t row, int64_t begin, int64_t end, const Activations& to);
  void (*linear)(const Linear& w, const Activations& x, Rounding rounding, int64_t m, const Output& out,
                 int64_t unit_begin, int64_t unit_end);
  // 1 / √(mean x² + eps), and x times that times the weight.
  float (*rms_factor)(const float* x, int64_t n, float eps);
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  void (*rope)(float* x, const float* cos, const float* sin, int64_t half);
  void (*attend)(const Attended& over, const Query* queries, int64_t count);
  void (*embed)(const Linear& table, int64_t id, float scale, float* out);
  // Σ weights[r] · row r of the table over the rows of the panels [begin, end).
  void (*weighted_rows)(const Linear& table, const float* weights, int64_t begin, int64_t end, float* out);
};

extern const ModelKernels model_default;
#if defined(BLOCKPILOT_X86)
extern const ModelKernels model_avx2;
extern const ModelKernels model_avx512;
extern const ModelKernels model_vnni;
extern const ModelKernels model_amx;
#endif

}  // namespace blockpilot
