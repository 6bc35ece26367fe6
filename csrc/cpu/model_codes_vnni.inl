// Products of codes with VNNI, and with AMX from so many rows on that filling its tiles pays. Integers add up
// alike in any order, so both give the bits of model_codes.inl.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t GROUPS = BLOCK / 4;

// Unsigned codes of a block, four columns a vector; signed ones are raised by 128.
template <Format F>
static inline void unpack_codes(const uint8_t* block, vi* w) {
  const uint8_t* first = block + (F == Format::Q4_1 ? 64 : 32);
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

#if defined(MODEL_AMX)
// Tiles 0 and 1 are sums of 16 code rows by 16 outputs, 2 and 3 activations, 4 and 5 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 32, 32, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 8, 8};
};

// The compiler's own intrinsics do not tell it which memory they read.
template <int T>
static inline void load_activations(const int8_t* codes) {
  typedef const int8_t Memory[16][BLOCK];
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0"
                   :
                   : "i"(2 + T), "r"(codes), "r"(int64_t{BLOCK}), "m"(*(Memory*)codes));
}
template <int T>
static inline void load_weights(const uint8_t* codes) {
  typedef const uint8_t Memory[8][64];
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0"
                   :
                   : "i"(4 + T), "r"(codes), "r"(int64_t{64}), "m"(*(Memory*)codes));
}
template <int T, bool SIGNED>
static inline void dot_tiles() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
  if (SIGNED)
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(T), "i"(2 + T), "i"(4 + T));
  else
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(T), "i"(2 + T), "i"(4 + T));
}
template <int T>
static inline void store_dots(int32_t (*to)[16]) {
  typedef int32_t Memory[16][16];
  __asm__ volatile("tilestored %%tmm%c1, (%2,%3,1)"
                   : "=m"(*(Memory*)to)
                   : "i"(T), "r"(to), "r"(int64_t{64}));
}

constexpr int64_t STAGES = 4;  // blocks on their way through unpacking, tiles and finishing

struct alignas(64) Stages {
  uint8_t codes[STAGES][8][64];
  int32_t dots[STAGES][16][16];
};

template <Format F, int T>
static inline void dot_stage(const uint8_t* block, const Tile& x, int64_t b, Stages& s) {
  load_activations<T>(x.codes);
  load_weights<T>(F == Format::Q8_0 ? block + 32 : s.codes[b % STAGES][0]);
  dot_tiles<T, F == Format::Q8_0>();
  store_dots<T>(s.dots[b % STAGES]);
}

template <Format F>
static inline void unpack_stage(const uint8_t* data, int64_t b, Stages& s) {
  const uint8_t* block = data + b * block_bytes(F);
  fetch_ahead<F>(block);
  if (F == Format::Q8_0) return;
  vi w[GROUPS];
  unpack_codes<F>(block, w);
#pragma GCC unroll 8
  for (int64_t g = 0; g < GROUPS; ++g) __builtin_memcpy(s.codes[b % STAGES][g], &w[g], sizeof w[g]);
}

// As code_tile, for a tile of AMX: block b + 2 is unpacked and block b − 2 finished while b is multiplied.
template <Format F, int M, int S>
static inline void amx_tile(const uint8_t* data, const Activations& a, int64_t blocks, int64_t row,
                            float (*total)[UNIT], int64_t panel) {
  Stages s;
  vf sum[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) sum[m] = load(total[m] + panel * PANEL);
  for (int64_t b = 0; b < 2 && b < blocks; ++b) unpack_stage<F>(data, b, s);
  for (int64_t b = 0; b < blocks + 2; ++b) {
    if (b + 2 < blocks) unpack_stage<F>(data, b + 2, s);
    if (b < blocks) {
      const Tile x = tile_at(a, blocks, S * row, b);
      if (b % 2)
        dot_stage<F, 1>(data + b * block_bytes(F), x, b, s);
      else
        dot_stage<F, 0>(data + b * block_bytes(F), x, b, s);
    }
    if (b < 2) continue;
    const Tile x = tile_at(a, blocks, S * row, b - 2);
    const uint8_t* block = data + (b - 2) * block_bytes(F);
    const int32_t(*dots)[16] = s.dots[(b - 2) % STAGES];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      vi dot, low;
      __builtin_memcpy(&dot, dots[S * m], sizeof dot);
      if (S == 2) {
        __builtin_memcpy(&low, dots[S * m + 1], sizeof low);
        dot = (dot << 7) + low;
      }
      finish_block<F>(block, 0, to_float(dot), x.sums[S * m], x.scales[S * m], &sum[m]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) store(total[m] + panel * PANEL, sum[m]);
}

constexpr int64_t AMX_LINES = 8;  // code rows from which a tile pays
#endif

template <Format F, int S>
static void code_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                      Totals& t) {
  for (int64_t panel = 0; panel < 2; ++panel) {
    const uint8_t* first = data + panel * blocks * block_bytes(F);
    int64_t done = 0;
#if defined(MODEL_AMX)
    for (; (rows - done) * S >= AMX_LINES; done += TILE_ROWS / S)
      with_rows<TILE_ROWS / S>(rows - done, done, [&](auto m, int64_t row) {
        amx_tile<F, m.rows, S>(first, a, blocks, from + row, t.of + row, panel);
      });
#endif
    for_row_tiles<8 / S>(rows - done, [&](auto m, int64_t row) {
      code_tile<F, m.rows, S>(first, a, blocks, from + done + row, t.of + done + row, panel);
    });
  }
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
