// Units of a product: which rows and panels meet when, and what becomes of the totals.
namespace blockpilot {
namespace MODEL_ISA {

// A unit's totals of a chunk of rows.
struct Totals {
  float of[ROW_CHUNK][UNIT];
};

// Calls CALL with M = the rows of each tile, at most MOST, from `row` of `rows` on.
#define FOR_ROW_TILES(MOST, CALL)                                      \
  for (int64_t row = 0; row < rows; row += MOST) switch (rows - row) { \
      case 1: {                                                        \
        constexpr int M = 1;                                           \
        CALL;                                                          \
        break;                                                         \
      }                                                                \
      case 2: {                                                        \
        constexpr int M = MOST < 2 ? MOST : 2;                         \
        CALL;                                                          \
        break;                                                         \
      }                                                                \
      case 3: {                                                        \
        constexpr int M = MOST < 3 ? MOST : 3;                         \
        CALL;                                                          \
        break;                                                         \
      }                                                                \
      case 4: {                                                        \
        constexpr int M = MOST < 4 ? MOST : 4;                         \
        CALL;                                                          \
        break;                                                         \
      }                                                                \
      case 5: {                                                        \
        constexpr int M = MOST < 5 ? MOST : 5;                         \
        CALL;                                                          \
        break;                                                         \
      }                                                                \
      case 6: {                                                        \
        constexpr int M = MOST < 6 ? MOST : 6;                         \
        CALL;                                                          \
        break;                                                         \
      }                                                                \
      case 7: {                                                        \
        constexpr int M = MOST < 7 ? MOST : 7;                         \
        CALL;                                                          \
        break;                                                         \
      }                                                                \
      default: {                                                       \
        constexpr int M = MOST;                                        \
        CALL;                                                          \
        break;                                                         \
      }                                                                \
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

// Every block of P panels for one tile of rows. The totals of few rows stay in registers; those of more would
// push out the sums of the block.
template <Format F, int M, int P>
static inline void float_tile(const uint8_t* data, const Activations& a, int64_t blocks, int64_t row,
                              float (*total)[UNIT], int64_t panel) {
  constexpr int N = P * VECTORS;
  constexpr bool KEPT = M * N <= 4 || LANES == 16;
  vf sum[M][N];
  if (KEPT) load_totals<M, N>(total, panel, sum);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* const block[2] = {data + b * block_bytes(F), data + (blocks + b) * block_bytes(F)};
    if (is_quantised(F) || M > 1)
      for (int p = 0; p < P; ++p) fetch_ahead<F>(block[p]);
    if (!KEPT) load_totals<M, N>(total, panel, sum);
    float_block<F, M, P, false>(block, nullptr, tile_at(a, blocks, row, b), sum);
    if (!KEPT) store_totals<M, N>(sum, panel, total);
  }
  if (KEPT) store_totals<M, N>(sum, panel, total);
}

// Every block of a panel for one tile of inputs, whose totals stay in registers while they are few.
template <Format F, int M, int S>
static inline void code_tile(const uint8_t* data, const Activations& a, int64_t blocks, int64_t row,
                             float (*total)[UNIT], int64_t panel) {
  constexpr bool KEPT = M * S * VECTORS <= 4;
  vf sum[M][VECTORS];
  if (KEPT) load_totals<M, VECTORS>(total, panel, sum);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block = data + b * block_bytes(F);
    fetch_ahead<F>(block);
    if (!KEPT) load_totals<M, VECTORS>(total, panel, sum);
    code_block<F, M, S>(block, tile_at(a, blocks, S * row, b), sum);
    if (!KEPT) store_totals<M, VECTORS>(sum, panel, total);
  }
  if (KEPT) store_totals<M, VECTORS>(sum, panel, total);
}

// A block that is unpacked once for several tiles of rows.
template <Format F, int M>
static inline void shared_block(const uint8_t* block, const float* unpacked, const Tile& x,
                                float (*total)[UNIT], int64_t panel) {
  vf sum[M][VECTORS];
  load_totals<M, VECTORS>(total, panel, sum);
  float_block<F, M, 1, true>(&block, unpacked, x, sum);
  store_totals<M, VECTORS>(sum, panel, total);
}

template <Format F>
static void float_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                       Totals& t) {
  const int64_t width = block_bytes(F);
  if (rows == 1) return float_tile<F, 1, 2>(data, a, blocks, from, t.of, 0);
  float unpacked[BLOCK * PANEL];
  for (int64_t panel = 0; panel < 2; ++panel) {
    const uint8_t* first = data + panel * blocks * width;
    if (rows <= TILE_ROWS || F == Format::F32) {
      FOR_ROW_TILES(TILE_ROWS, (float_tile<F, M, 1>(first, a, blocks, from + row, t.of + row, panel)));
      continue;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* block = first + b * width;
      fetch_ahead<F>(block);
      unpack<F>(block, unpacked);
      FOR_ROW_TILES(TILE_ROWS, (shared_block<F, M>(block, unpacked, tile_at(a, blocks, from + row, b),
                                                   t.of + row, panel)));
    }
  }
}

template <Format F, int S>
static void code_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                      Totals& t) {
  for (int64_t panel = 0; panel < 2; ++panel) {
    const uint8_t* first = data + panel * blocks * block_bytes(F);
    FOR_ROW_TILES(TILE_ROWS / S, (code_tile<F, M, S>(first, a, blocks, from + row, t.of + row, panel)));
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

template <Format F>
static void blocks_unit(const Linear& w, Rounding rounding, const uint8_t* data, const Activations& a,
                        int64_t from, int64_t rows, Totals& t) {
  const int64_t n = w.blocks();
  if (rounding == Rounding::INT8) return code_unit<F, 1>(data, a, n, from, rows, t);
  if (rounding == Rounding::INT16) return code_unit<F, 2>(data, a, n, from, rows, t);
  float_unit<F>(data, a, n, from, rows, t);
}

static void multiply_unit(const Linear& w, Rounding rounding, const uint8_t* data, const Activations& a,
                          int64_t from, int64_t rows, Totals& t) {
  switch (w.format) {
    case Format::F32:
      return float_unit<Format::F32>(data, a, w.blocks(), from, rows, t);
    case Format::BF16:
      return float_unit<Format::BF16>(data, a, w.blocks(), from, rows, t);
    case Format::Q8_0:
      return blocks_unit<Format::Q8_0>(w, rounding, data, a, from, rows, t);
    case Format::Q4_0:
      return blocks_unit<Format::Q4_0>(w, rounding, data, a, from, rows, t);
    case Format::Q4_1:
      return blocks_unit<Format::Q4_1>(w, rounding, data, a, from, rows, t);
  }
}

static void linear(const Linear& w, const Activations& x, Rounding rounding, int64_t m, const Output& out,
                   int64_t unit_begin, int64_t unit_end) {
  Totals t;
  const int64_t unit_bytes = 2 * w.blocks() * block_bytes(w.format);
  for (int64_t unit = unit_begin; unit < unit_end; ++unit)
    for (int64_t row = 0; row < m; row += ROW_CHUNK) {
      const int64_t rows = m - row < ROW_CHUNK ? m - row : ROW_CHUNK;
      __builtin_memset(t.of, 0, sizeof t.of[0] * static_cast<std::size_t>(rows));
      multiply_unit(w, rounding, w.data + unit * unit_bytes, x, row, rows, t);
      for (int64_t i = 0; i < rows; ++i) deliver(w, out, unit, row + i, t.of[i]);
    }
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
