// Products with a packed matrix. A value's operations and their order depend on its own row and column alone:
// each block of 32 columns is summed from zero, and the blocks are added in order. How many rows share a
// tile, and whether a block was unpacked before, decide only what is loaded when.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t VECTORS = PANEL / LANES;  // of a panel's 16 rows
constexpr int64_t AHEAD_BYTES = 4096;
constexpr int64_t ROW_CHUNK = 64;  // activations whose totals are kept while a panel is read

static inline vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
static inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// Column 16·half + 4·g + c of a block as floats without the scale, for the v-th vector of a panel.
template <Format F>
static inline vf weight(const uint8_t* block, int64_t g, int64_t c, int64_t half, int64_t v) {
  const int64_t k = 16 * half + 4 * g + c;
  if (F == Format::F32) return load((const float*)block + k * PANEL + v * LANES);
  if (F == Format::BF16) return load_bf16((const uint16_t*)block + k * PANEL + v * LANES);
  const uint8_t* first = block + (F == Format::Q4_1 ? 64 : 32);
  const vi codes = load_codes(first + 64 * g + 4 * LANES * v);
  if (F == Format::Q8_0) return to_float((codes << (24 - 8 * c)) >> 24);
  return to_float((codes >> (8 * c + 4 * half)) & 15);
}

template <Format F>
static inline void finish_block(const uint8_t* block, int64_t v, vf dot, float sum, float x_scale,
                                vf* total) {
  if (!is_quantised(F)) {
    *total = *total + dot;
    return;
  }
  const vf scale = load_half((const uint16_t*)block + v * LANES);
  const vf scaled = scale * splat(x_scale);
  *total = fma(scaled, dot, *total);
  if (F == Format::Q4_0) *total = fma(scale, splat(-8.0f * sum), *total);
  if (F == Format::Q4_1)
    *total = fma(load_half((const uint16_t*)block + PANEL + v * LANES), splat(sum), *total);
}

// Activations lie in tiles of TILE_ROWS rows: values [block][column][row], codes [block][group][row][4
// columns], scales and sums [block][row].
struct Tile {
  const float* values;
  const int8_t* codes;
  const float* scales;
  const float* sums;
};

static inline Tile tile_at(const Activations& a, int64_t blocks, int64_t row, int64_t b) {
  const int64_t at = row / TILE_ROWS * blocks + b;
  return {a.values + at * BLOCK * TILE_ROWS, a.codes + at * BLOCK * TILE_ROWS, a.scales + at * TILE_ROWS,
          a.sums + at * TILE_ROWS};
}

// A block's columns in the order they are summed: nibbles go by the byte that holds two of them.
template <Format F>
constexpr int64_t HALVES = F == Format::Q4_0 || F == Format::Q4_1 ? 2 : 1;

// One block for M rows and P panels, float activations. `unpacked` holds [32][16] floats of one panel, or is
// null.
template <Format F, int M, int P, bool UNPACKED>
static inline void float_block(const uint8_t* const* block, const float* unpacked, const Tile& x,
                               float (*total)[UNIT], int64_t panel) {
  constexpr int N = P * VECTORS;
  vf dot[M][N];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < N; ++v) dot[m][v] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t g = 0; g < 8 / HALVES<F>; ++g)
#pragma GCC unroll 4
    for (int64_t c = 0; c < 4; ++c)
#pragma GCC unroll 2
      for (int64_t half = 0; half < HALVES<F>; ++half) {
        const int64_t k = 16 * half + 4 * g + c;
        vf w[N];
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v)
          w[v] = UNPACKED ? load(unpacked + k * PANEL + v * LANES)
                          : weight<F>(block[v / VECTORS], g, c, half, v % VECTORS);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const vf value = splat(x.values[k * TILE_ROWS + m]);
#pragma GCC unroll 8
          for (int v = 0; v < N; ++v) dot[m][v] = fma(w[v], value, dot[m][v]);
        }
      }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      float* at = total[m] + panel * PANEL + v * LANES;
      vf sum = load(at);
      finish_block<F>(block[v / VECTORS], v % VECTORS, dot[m][v], x.sums[m], 1.0f, &sum);
      store(at, sum);
    }
}

// One block for M rows and one panel, signed-byte activations. Integers add up alike in any order.
template <Format F, int M>
static inline void int8_block(const uint8_t* block, const Tile& x, float (*total)[UNIT], int64_t panel) {
  constexpr bool BYTES = F == Format::Q8_0;
  constexpr int64_t AHEAD = 4 * TILE_ROWS;  // bytes of a group
  const uint8_t* first = block + (F == Format::Q4_1 ? 64 : 32);
  vi bytes[M][VECTORS] = {};
  Pairs pairs[M][VECTORS] = {};
#pragma GCC unroll 1
  for (int64_t g = 0; g < 8 / HALVES<F>; ++g)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const vi both = load_codes(first + 64 * g + 4 * LANES * v);
      const vi low = both & 0x0f0f0f0f, high = (both >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        int32_t four, later;
        __builtin_memcpy(&four, x.codes + g * AHEAD + 4 * m, sizeof four);
        if (BYTES) {
          bytes[m][v] = dot_bytes(both, four, bytes[m][v]);
          continue;
        }
        __builtin_memcpy(&later, x.codes + (4 + g) * AHEAD + 4 * m, sizeof later);
        pairs[m][v] = dot_nibbles(low, four, pairs[m][v]);
        pairs[m][v] = dot_nibbles(high, later, pairs[m][v]);
      }
    }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      float* at = total[m] + panel * PANEL + v * LANES;
      vf sum = load(at);
      const vf dot = to_float(BYTES ? bytes[m][v] : widen(pairs[m][v]));
      finish_block<F>(block, v, dot, x.sums[m], x.scales[m], &sum);
      store(at, sum);
    }
}

template <Format F>
static void unpack(const uint8_t* block, float* to) {
  for (int64_t g = 0; g < 8 / HALVES<F>; ++g)
    for (int64_t c = 0; c < 4; ++c)
      for (int64_t half = 0; half < HALVES<F>; ++half)
        for (int64_t v = 0; v < VECTORS; ++v)
          store(to + (16 * half + 4 * g + c) * PANEL + v * LANES, weight<F>(block, g, c, half, v));
}

// A unit's totals of a chunk of rows.
struct Totals {
  float of[ROW_CHUNK][UNIT];
};

// Calls CALL with M = the rows of each tile, at most TILE_ROWS, from `row` of `rows` on.
#define FOR_ROW_TILES(CALL)                                                 \
  for (int64_t row = 0; row < rows; row += TILE_ROWS) switch (rows - row) { \
      case 1: {                                                             \
        constexpr int M = 1;                                                \
        CALL;                                                               \
        break;                                                              \
      }                                                                     \
      case 2: {                                                             \
        constexpr int M = 2;                                                \
        CALL;                                                               \
        break;                                                              \
      }                                                                     \
      case 3: {                                                             \
        constexpr int M = TILE_ROWS < 3 ? TILE_ROWS : 3;                    \
        CALL;                                                               \
        break;                                                              \
      }                                                                     \
      case 4: {                                                             \
        constexpr int M = TILE_ROWS < 4 ? TILE_ROWS : 4;                    \
        CALL;                                                               \
        break;                                                              \
      }                                                                     \
      case 5: {                                                             \
        constexpr int M = TILE_ROWS < 5 ? TILE_ROWS : 5;                    \
        CALL;                                                               \
        break;                                                              \
      }                                                                     \
      case 6: {                                                             \
        constexpr int M = TILE_ROWS < 6 ? TILE_ROWS : 6;                    \
        CALL;                                                               \
        break;                                                              \
      }                                                                     \
      case 7: {                                                             \
        constexpr int M = TILE_ROWS < 7 ? TILE_ROWS : 7;                    \
        CALL;                                                               \
        break;                                                              \
      }                                                                     \
      default: {                                                            \
        constexpr int M = TILE_ROWS;                                        \
        CALL;                                                               \
        break;                                                              \
      }                                                                     \
    }

// Asks for the bytes of a block that comes later: the loads of a tile of several rows are too far apart for
// the processor to look ahead enough by itself.
template <Format F>
static inline void fetch_ahead(const uint8_t* block) {
  constexpr int64_t BYTES = F == Format::F32    ? 2048
                            : F == Format::BF16 ? 1024
                            : F == Format::Q8_0 ? 544
                                                : 320;
  for (int64_t at = 0; at < BYTES; at += 64) __builtin_prefetch(block + AHEAD_BYTES + at);
}

template <Format F>
static void float_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                       Totals& t) {
  const int64_t width = block_bytes(F);
  if (rows == 1) {
    for (int64_t b = 0; b < blocks; ++b) {
      if (is_quantised(F)) {
        fetch_ahead<F>(data + b * width);
        fetch_ahead<F>(data + (blocks + b) * width);
      }
      const uint8_t* const pair[2] = {data + b * width, data + (blocks + b) * width};
      float_block<F, 1, 2, false>(pair, nullptr, tile_at(a, blocks, from, b), t.of, 0);
    }
    return;
  }
  float unpacked[BLOCK * PANEL];
  for (int64_t panel = 0; panel < 2; ++panel)
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* block = data + (panel * blocks + b) * width;
      fetch_ahead<F>(block);
      if (rows > TILE_ROWS && F != Format::F32) {
        unpack<F>(block, unpacked);
        FOR_ROW_TILES((float_block<F, M, 1, true>(&block, unpacked, tile_at(a, blocks, from + row, b),
                                                  t.of + row, panel)));
      } else {
        FOR_ROW_TILES((float_block<F, M, 1, false>(&block, nullptr, tile_at(a, blocks, from + row, b),
                                                   t.of + row, panel)));
      }
    }
}

template <Format F>
static void int8_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                      Totals& t) {
  for (int64_t panel = 0; panel < 2; ++panel)
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* block = data + (panel * blocks + b) * block_bytes(F);
      fetch_ahead<F>(block);
      FOR_ROW_TILES((int8_block<F, M>(block, tile_at(a, blocks, from + row, b), t.of + row, panel)));
    }
}
#undef FOR_ROW_TILES

static void deliver(const Linear& w, const Output& out, int64_t unit, int64_t row, float* y) {
  const int64_t first = unit * UNIT, count = w.rows - first < UNIT ? w.rows - first : UNIT;
  if (w.bias)
    for (int64_t n = 0; n < count; ++n) y[n] += w.bias[first + n];
  float* to = out.to[row];
  if (out.epilogue == Epilogue::STORE) {
    for (int64_t n = 0; n < count; ++n) to[first + n] = y[n];
  } else if (out.epilogue == Epilogue::ADD) {
    for (int64_t n = 0; n < count; ++n) to[first + n] += y[n];
  } else {
    for (int64_t v = 0; v < VECTORS; ++v) {
      const vf gate = load(y + v * LANES), up = load(y + PANEL + v * LANES);
      store(to + first / 2 + v * LANES, gate / (splat(1.0f) + exp_vector(-gate)) * up);
    }
  }
}

static void multiply_unit(const Linear& w, bool int8, const uint8_t* data, const Activations& a, int64_t from,
                          int64_t rows, Totals& t) {
  const int64_t n = w.blocks();
  switch (w.format) {
    case Format::F32:
      return float_unit<Format::F32>(data, a, n, from, rows, t);
    case Format::BF16:
      return float_unit<Format::BF16>(data, a, n, from, rows, t);
    case Format::Q8_0:
      return int8 ? int8_unit<Format::Q8_0>(data, a, n, from, rows, t)
                  : float_unit<Format::Q8_0>(data, a, n, from, rows, t);
    case Format::Q4_0:
      return int8 ? int8_unit<Format::Q4_0>(data, a, n, from, rows, t)
                  : float_unit<Format::Q4_0>(data, a, n, from, rows, t);
    case Format::Q4_1:
      return int8 ? int8_unit<Format::Q4_1>(data, a, n, from, rows, t)
                  : float_unit<Format::Q4_1>(data, a, n, from, rows, t);
  }
}

static void linear(const Linear& w, const Activations& x, bool int8, int64_t m, const Output& out,
                   int64_t unit_begin, int64_t unit_end) {
  Totals t;
  const int64_t unit_bytes = 2 * w.blocks() * block_bytes(w.format);
  for (int64_t unit = unit_begin; unit < unit_end; ++unit)
    for (int64_t row = 0; row < m; row += ROW_CHUNK) {
      const int64_t rows = m - row < ROW_CHUNK ? m - row : ROW_CHUNK;
      __builtin_memset(t.of, 0, sizeof t.of[0] * static_cast<std::size_t>(rows));
      multiply_unit(w, int8 && is_quantised(w.format), w.data + unit * unit_bytes, x, row, rows, t);
      for (int64_t i = 0; i < rows; ++i) deliver(w, out, unit, row + i, t.of[i]);
    }
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
