// Products of codes, in 16-bit pairs.
namespace blockpilot {
namespace MODEL_ISA {

// Adds one block for M inputs of S code rows and one panel to `sum`. Integers add up alike
// in any order.
template <Format F, int M, int S>
static inline void code_block(const uint8_t* block, const Tile& x, vf (*sum)[VECTORS]) {
  constexpr bool BYTES = F == Format::Q8_0;
  constexpr int C = M * S;
  const uint8_t* first = codes_of<F>(block);
  vi bytes[C][VECTORS] = {};
  Pairs pairs[C][VECTORS] = {};
#pragma GCC unroll 1
  for (int64_t g = 0; g < 8 / HALVES<F>; ++g) {
    vi low[VECTORS], high[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const vi both = load_codes(first + 64 * g + 4 * LANES * v);
      low[v] = BYTES ? both : both & 0x0f0f0f0f;
      high[v] = (both >> 4) & 0x0f0f0f0f;
    }
#pragma GCC unroll 8
    for (int m = 0; m < C; ++m) {
      int32_t four, later;
      __builtin_memcpy(&four, x.codes + BLOCK * m + 4 * g, sizeof four);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        if (BYTES)
          bytes[m][v] = dot_bytes(low[v], four, bytes[m][v]);
        else
          pairs[m][v] = dot_nibbles(low[v], four, pairs[m][v]);
      if (!BYTES) {
        __builtin_memcpy(&later, x.codes + BLOCK * m + 16 + 4 * g, sizeof later);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) pairs[m][v] = dot_nibbles(high[v], later, pairs[m][v]);
      }
      // Loading the next input's codes early would take the registers of the sums.
      __asm__ volatile("" ::: "memory");
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      vi dot = BYTES ? bytes[S * m][v] : widen(pairs[S * m][v]);
      if (S == 2) dot = (dot << 7) + (BYTES ? bytes[S * m + S - 1][v] : widen(pairs[S * m + S - 1][v]));
      finish_block<F>(block, v, to_float(dot), x.sums[S * m], x.scales[S * m], &sum[m][v]);
    }
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

template <Format F, int S>
static void code_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                      Totals& t) {
  for (int64_t panel = 0; panel < 2; ++panel) {
    const uint8_t* first = data + panel * blocks * block_bytes(F);
    for_row_tiles<TILE_ROWS / S>(rows, [&](auto m, int64_t row) {
      code_tile<F, m.rows, S>(first, a, blocks, from + row, t.of + row, panel);
    });
  }
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
