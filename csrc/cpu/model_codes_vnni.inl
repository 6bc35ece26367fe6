// Products of codes with VNNI. Integers add up alike in any order, so it gives the bits of model_codes.inl.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t GROUPS = BLOCK / 4;

// Unsigned codes of a block, four columns a vector; signed ones are raised by 128.
template <Format F>
static inline void unpack_codes(const uint8_t* block, vi* w) {
  const uint8_t* first = codes_of<F>(block);
#pragma GCC unroll 8
  for (int64_t g = 0; g < GROUPS / HALVES<F>; ++g) {
    const vi codes = load_codes(first + 64 * g);
    if (F == Format::Q8_0) {
      w[g] = codes ^ (vi)_mm512_set1_epi8(-128);
    } else {
      w[g] = codes & 0x0f0f0f0f;
      w[4 + g] = (codes >> 4) & 0x0f0f0f0f;
    }
  }
}

static inline vi dot_line(const vi* w, const int8_t* codes) {
  __m512i even = _mm512_setzero_si512(), odd = even;
#pragma GCC unroll 4
  for (int64_t g = 0; g < GROUPS; g += 2) {
    int32_t four[2];
    __builtin_memcpy(four, codes + 4 * g, sizeof four);
    even = _mm512_dpbusd_epi32(even, (__m512i)w[g], _mm512_set1_epi32(four[0]));
    odd = _mm512_dpbusd_epi32(odd, (__m512i)w[g + 1], _mm512_set1_epi32(four[1]));
  }
  return (vi)even + (vi)odd;
}

// Every block of a panel for one tile of inputs of S code rows.
template <Format F, int M, int S>
static inline void code_tile(const uint8_t* data, const Activations& a, int64_t blocks, int64_t row,
                             float (*total)[UNIT], int64_t panel) {
  vf sum[M][VECTORS];
  load_totals<M, VECTORS>(total, panel, sum);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block = data + b * block_bytes(F);
    fetch_ahead<F>(block);
    const Tile x = tile_at(a, blocks, S * row, b);
    vi w[GROUPS];
    unpack_codes<F>(block, w);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      vi dot = dot_line(w, x.codes + S * m * BLOCK);
      if (S == 2) dot = (dot << 7) + dot_line(w, x.codes + (S * m + 1) * BLOCK);
      if (F == Format::Q8_0) dot -= x.code_sums[S * m] << 7;
      finish_block<F>(block, 0, to_float(dot), x.sums[S * m], x.scales[S * m], sum[m]);
    }
  }
  store_totals<M, VECTORS>(sum, panel, total);
}

#if !defined(MODEL_AMX)
template <Format F, int S>
static void code_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                      Totals& t) {
  for (int64_t panel = 0; panel < 2; ++panel)
    for_row_tiles<TILE_ROWS / S>(rows, [&](auto m, int64_t row) {
      code_tile<F, m.rows, S>(data + panel * blocks * block_bytes(F), a, blocks, from + row, t.of + row,
                              panel);
    });
}
#endif

}  // namespace MODEL_ISA
}  // namespace blockpilot
