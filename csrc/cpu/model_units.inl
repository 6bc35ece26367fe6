// Units of a product: which rows and panels meet when, and what becomes of the totals.
namespace blockpilot {
namespace MODEL_ISA {

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
    if (rows <= FLOAT_ROWS || F == Format::F32) {
      for_row_tiles<FLOAT_ROWS>(rows, [&](auto m, int64_t row) {
        float_tile<F, m.rows, 1>(first, a, blocks, from + row, t.of + row, panel);
      });
      continue;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* block = first + b * width;
      fetch_ahead<F>(block);
      unpack<F>(block, unpacked);
      for_row_tiles<FLOAT_ROWS>(rows, [&](auto m, int64_t row) {
        shared_block<F, m.rows>(block, unpacked, tile_at(a, blocks, from + row, b), t.of + row, panel);
      });
    }
  }
}

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
#if defined(MODEL_AMX)
      if (takes_bf16(w.format, rounding)) return bf16_unit(data, a, w.blocks(), from, rows, t);
#endif
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
#if defined(MODEL_AMX)
  const int64_t codes = code_rows(rounding);
  const Tiles tiles(tile_config(codes > 0 ? m * codes : m, takes_bf16(w.format, rounding)));
#endif
  const int64_t unit_bytes = 2 * w.blocks() * block_bytes(w.format);
  // The first bytes, all at once: waited for one after another they would cost as much as a small matrix.
  for (int64_t at = 0; at < AHEAD_BYTES; at += LINE)
    __builtin_prefetch(w.data + unit_begin * unit_bytes + at, 0, 2);
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
