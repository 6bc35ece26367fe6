// Products of codes with AMX, from so many rows on that filling its tiles pays. Integers add up alike in any
// order, so it gives the bits of model_codes.inl.
namespace blockpilot {
namespace MODEL_ISA {

template <int SUM, int A, int W, bool SIGNED>
static inline void dot_tiles() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(SUM));
  if (SIGNED)
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(W));
  else
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(W));
}
// Blocks on their way: unpacked two ahead, multiplied, stored and finished two later.
struct alignas(64) Stages {
  uint8_t codes[4][2][8][64];
  int32_t dots[2][2][16][16];
};

template <Format F, int P>
static inline INLINE void unpack_stage(const uint8_t* const* data, int64_t b, int64_t ahead, Stages& s) {
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
    const uint8_t* block = data[p] + b * block_bytes(F);
    if (ahead > 0) fetch_ahead<F>(block, ahead);
    if (F == Format::Q8_0) continue;
    vi w[GROUPS];
    unpack_codes<F>(block, w);
#pragma GCC unroll 8
    for (int64_t g = 0; g < GROUPS; ++g) __builtin_memcpy(s.codes[b % 4][p][g], &w[g], sizeof w[g]);
  }
}

// Multiplies block b of parity ODD into the sums that store_stage has emptied of block b − 2: P panels by one
// tile of inputs, or one panel by R tiles.
template <Format F, int P, int R, bool ODD>
static inline INLINE void dot_stage(const uint8_t* const* data, const int8_t* codes, int64_t next, int64_t b,
                                    Stages& s) {
  constexpr bool SIGNED = F == Format::Q8_0;
  constexpr int SUM = ODD ? 2 : 0, A = R > 1 ? 4 : ODD ? 5 : 4, W = R > 1 && ODD ? 7 : 6;
  const auto weights = [&](int p) {
    return SIGNED ? codes_of<F>(data[p] + b * block_bytes(F)) : s.codes[b % 4][p][0];
  };
  load_tile<A, TILE_ROWS, BLOCK>(codes);
  load_tile<W, GROUPS, 64>(weights(0));
  dot_tiles<SUM, A, W, SIGNED>();
  if (P > 1) {
    load_tile<7, GROUPS, 64>(weights(P - 1));
    dot_tiles<SUM + 1, A, 7, SIGNED>();
  }
  if (R > 1) {
    load_tile<5, TILE_ROWS, BLOCK>(codes + next);
    dot_tiles<SUM + 1, 5, W, SIGNED>();
  }
}

template <int T, bool ODD>
static inline INLINE void store_stage(Stages& s) {
  constexpr int SUM = ODD ? 2 : 0;
  store_tile<SUM, 64>(s.dots[ODD][0]);
  if (T > 1) store_tile<SUM + 1, 64>(s.dots[ODD][1]);
}

// The sums of M inputs with one panel, which lie in tile T.
template <Format F, int M, int S, int T, bool ODD>
static inline INLINE void finish_stage(const uint8_t* block, const Tile& x, const Stages& s, vf* sum) {
  repeat<M>([&](auto input) INLINE {
    constexpr int m = input.rows;
    vi dot, low;
    __builtin_memcpy(&dot, s.dots[ODD][T][S * m], sizeof dot);
    if (S == 2) {
      __builtin_memcpy(&low, s.dots[ODD][T][2 * m + 1], sizeof low);
      dot = (dot << 7) + low;
    }
    finish_block<F>(block, 0, to_float(dot), x.sums[S * m], x.scales[S * m], &sum[m]);
  });
}

// As code_tile, for P panels and M inputs, a tile of AMX; or for one panel and R = 2 tiles, a full one and M
// inputs.
template <Format F, int M, int S, int P, int R>
static inline void amx_tile(const uint8_t* first, const Activations& a, int64_t blocks, int64_t row,
                            float (*total)[UNIT], int64_t panel) {
  constexpr int FULL = TILE_ROWS / S, M0 = R > 1 ? FULL : M;
  const uint8_t* const data[2] = {first, first + blocks * block_bytes(F)};
  // Later rows find the weights in the cache.
  const int64_t ahead = row == 0 ? P * blocks * block_bytes(F) : 0, next = blocks * TILE_ROWS * BLOCK;
  Stages s;
  vf sum[2][M0];
  const auto totals = [&](const auto& move) INLINE {
    repeat<M0>([&](auto m) INLINE { move(sum[0][m.rows], total[m.rows] + panel * PANEL); });
    if constexpr (P > 1)
      repeat<M>([&](auto m) INLINE { move(sum[1][m.rows], total[m.rows] + (panel + 1) * PANEL); });
    if constexpr (R > 1)
      repeat<M>([&](auto m) INLINE { move(sum[1][m.rows], total[FULL + m.rows] + panel * PANEL); });
  };
  totals([](vf& v, const float* at) INLINE { v = load(at); });
  for (int64_t b = 0; b < 2 && b < blocks; ++b) unpack_stage<F, P>(data, b, ahead, s);
  const auto turn = [&](auto odd, int64_t b) INLINE {
    constexpr bool ODD = odd.rows == 2;
    if (b + 2 < blocks) unpack_stage<F, P>(data, b + 2, ahead, s);
    if (b >= 2 && b < blocks + 2) store_stage<P * R, ODD>(s);
    if (b < blocks) dot_stage<F, P, R, ODD>(data, tile_at(a, blocks, S * row, b).codes, next, b, s);
    if (b < 2 || b >= blocks + 2) return;
    const int64_t at = (b - 2) * block_bytes(F);
    finish_stage<F, M0, S, 0, ODD>(data[0] + at, tile_at(a, blocks, S * row, b - 2), s, sum[0]);
    if constexpr (P > 1)
      finish_stage<F, M, S, 1, ODD>(data[1] + at, tile_at(a, blocks, S * row, b - 2), s, sum[1]);
    if constexpr (R > 1)
      finish_stage<F, M, S, 1, ODD>(data[0] + at, tile_at(a, blocks, S * (row + FULL), b - 2), s, sum[1]);
  };
  for (int64_t b = 0; b < blocks + 2; b += 2) {
    turn(Rows<1>{}, b);
    turn(Rows<2>{}, b + 1);
  }
  totals([](vf v, float* at) INLINE { store(at, v); });
}

constexpr int64_t AMX_LINES = 4;  // code rows from which a tile pays

template <Format F, int S>
static void code_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                      Totals& t) {
  const int64_t panel_bytes = blocks * block_bytes(F);
  constexpr int64_t FULL = TILE_ROWS / S;
  int64_t done = 0;
  // The sums of 16 inputs and a panel fill the registers as those of 8 and two panels do, and its codes are
  // unpacked once for both tiles.
  if constexpr (S == 2)
    for (; rows - done > FULL; done += 2 * FULL)
      with_rows<FULL>(rows - done - FULL, done, [&](auto m, int64_t row) {
        for (int64_t panel = 0; panel < 2; ++panel)
          amx_tile<F, m.rows, S, 1, 2>(data + panel * panel_bytes, a, blocks, from + row, t.of + row, panel);
      });
  for (; (rows - done) * S >= AMX_LINES; done += FULL)
    with_rows<FULL>(rows - done, done, [&](auto m, int64_t row) {
      constexpr int P = m.rows > 8 ? 1 : 2;  // as the registers for their sums allow
      for (int64_t panel = 0; panel < 2; panel += P)
        amx_tile<F, m.rows, S, P, 1>(data + panel * panel_bytes, a, blocks, from + row, t.of + row, panel);
    });
  for (int64_t panel = 0; panel < 2; ++panel)
    for_row_tiles<8 / S>(rows - done, [&](auto m, int64_t row) {
      code_tile<F, m.rows, S>(data + panel * panel_bytes, a, blocks, from + done + row, t.of + done + row,
                              panel);
    });
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
