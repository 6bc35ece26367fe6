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

// Multiplies block b of parity ODD into the sums that store_stage has emptied of block b − 2.
template <Format F, int P, bool ODD>
static inline INLINE void dot_stage(const uint8_t* const* data, const int8_t* codes, int64_t b, Stages& s) {
  constexpr bool SIGNED = F == Format::Q8_0;
  constexpr int SUM = ODD ? 2 : 0, A = ODD ? 5 : 4;
  const auto weights = [&](int p) {
    return SIGNED ? codes_of<F>(data[p] + b * block_bytes(F)) : s.codes[b % 4][p][0];
  };
  load_tile<A, TILE_ROWS, BLOCK>(codes);
  load_tile<6, GROUPS, 64>(weights(0));
  dot_tiles<SUM, A, 6, SIGNED>();
  if (P > 1) {
    load_tile<7, GROUPS, 64>(weights(P - 1));
    dot_tiles<SUM + 1, A, 7, SIGNED>();
  }
}

template <int P, bool ODD>
static inline INLINE void store_stage(Stages& s) {
  constexpr int SUM = ODD ? 2 : 0;
  store_tile<SUM, 64>(s.dots[ODD][0]);
  if (P > 1) store_tile<SUM + 1, 64>(s.dots[ODD][1]);
}

template <Format F, int M, int S, int P, bool ODD>
static inline INLINE void finish_stage(const uint8_t* const* data, const Tile& x, int64_t b, const Stages& s,
                                       vf (*sum)[M]) {
  repeat<P>([&](auto panel) INLINE {
    repeat<M>([&](auto input) INLINE {
      constexpr int p = panel.rows, m = input.rows;
      vi dot, low;
      __builtin_memcpy(&dot, s.dots[ODD][p][S * m], sizeof dot);
      if (S == 2) {
        __builtin_memcpy(&low, s.dots[ODD][p][2 * m + 1], sizeof low);
        dot = (dot << 7) + low;
      }
      finish_block<F>(data[p] + b * block_bytes(F), 0, to_float(dot), x.sums[S * m], x.scales[S * m],
                      &sum[p][m]);
    });
  });
}

// As code_tile, for a tile of AMX and P panels.
template <Format F, int M, int S, int P>
static inline void amx_tile(const uint8_t* first, const Activations& a, int64_t blocks, int64_t row,
                            float (*total)[UNIT], int64_t panel) {
  const uint8_t* const data[2] = {first, first + blocks * block_bytes(F)};
  // Later rows find the weights in the cache.
  const int64_t ahead = row == 0 ? P * blocks * block_bytes(F) : 0;
  Stages s;
  vf sum[P][M];
  repeat<P>([&](auto p) INLINE {
    repeat<M>([&](auto m) INLINE { sum[p.rows][m.rows] = load(total[m.rows] + (panel + p.rows) * PANEL); });
  });
  for (int64_t b = 0; b < 2 && b < blocks; ++b) unpack_stage<F, P>(data, b, ahead, s);
  const auto turn = [&](auto odd, int64_t b) INLINE {
    constexpr bool ODD = odd.rows == 2;
    if (b + 2 < blocks) unpack_stage<F, P>(data, b + 2, ahead, s);
    if (b >= 2 && b < blocks + 2) store_stage<P, ODD>(s);
    if (b < blocks) dot_stage<F, P, ODD>(data, tile_at(a, blocks, S * row, b).codes, b, s);
    if (b >= 2 && b < blocks + 2)
      finish_stage<F, M, S, P, ODD>(data, tile_at(a, blocks, S * row, b - 2), b - 2, s, sum);
  };
  for (int64_t b = 0; b < blocks + 2; b += 2) {
    turn(Rows<1>{}, b);
    turn(Rows<2>{}, b + 1);
  }
  repeat<P>([&](auto p) INLINE {
    repeat<M>([&](auto m) INLINE { store(total[m.rows] + (panel + p.rows) * PANEL, sum[p.rows][m.rows]); });
  });
}

constexpr int64_t AMX_LINES = 4;  // code rows from which a tile pays

template <Format F, int S>
static void code_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                      Totals& t) {
  const int64_t panel_bytes = blocks * block_bytes(F);
  int64_t done = 0;
  for (; (rows - done) * S >= AMX_LINES; done += TILE_ROWS / S)
    with_rows<TILE_ROWS / S>(rows - done, done, [&](auto m, int64_t row) {
      constexpr int P = m.rows > 8 ? 1 : 2;  // as the registers for their sums allow
      for (int64_t panel = 0; panel < 2; panel += P)
        amx_tile<F, m.rows, S, P>(data + panel * panel_bytes, a, blocks, from + row, t.of + row, panel);
    });
  for (int64_t panel = 0; panel < 2; ++panel)
    for_row_tiles<8 / S>(rows - done, [&](auto m, int64_t row) {
      code_tile<F, m.rows, S>(data + panel * panel_bytes, a, blocks, from + done + row, t.of + done + row,
                              panel);
    });
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
