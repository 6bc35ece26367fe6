// What every way of multiplying a tile of rows shares.
namespace blockpilot {
namespace MODEL_ISA {

// A unit's totals of a chunk of rows.
struct alignas(LINE) Totals {
  float of[ROW_CHUNK][UNIT];
};

template <int N>
struct Rows {
  static constexpr int rows = N;
};

// Calls call(Rows<0>) … call(Rows<N − 1>): arrays indexed by constants stay in registers, which those indexed
// by a loop that is unrolled later may not.
template <int N, int I = 0, typename Call>
static inline __attribute__((always_inline)) void repeat(const Call& call) {
  if constexpr (I < N) {
    call(Rows<I>{});
    repeat<N, I + 1>(call);
  }
}
#define INLINE __attribute__((always_inline))

template <int M, typename Call>
static inline void with_rows(int64_t rows, int64_t row, const Call& call) {
  if constexpr (M > 1) {
    if (rows < M) return with_rows<M - 1>(rows, row, call);
  }
  call(Rows<M>{}, row);
}

// Calls call(Rows<M>, row) for tiles of at most MOST rows that cover [0, rows).
template <int MOST, typename Call>
static inline void for_row_tiles(int64_t rows, const Call& call) {
  for (int64_t row = 0; row < rows; row += MOST) with_rows<MOST>(rows - row, row, call);
}

// Asks for the block that comes `ahead` bytes later, into the second-level cache: the loads of a tile of
// several rows are too far apart for the processor to look ahead enough by itself.
template <Format F>
static inline void fetch_ahead(const uint8_t* block, int64_t ahead = AHEAD_BYTES) {
  constexpr int64_t BYTES = F == Format::F32    ? 2048
                            : F == Format::BF16 ? 1024
                            : F == Format::Q8_0 ? 544
                                                : 320;
  for (int64_t at = 0; at < BYTES; at += 64) __builtin_prefetch(block + ahead + at, 0, 2);
}

// A tile's totals to and from memory; those of P panels lie side by side.
template <int M, int N>
static inline void load_totals(const float (*total)[UNIT], int64_t panel, vf (*sum)[N]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) sum[m][v] = load(total[m] + panel * PANEL + v * LANES);
}
template <int M, int N>
static inline void store_totals(const vf (*sum)[N], int64_t panel, float (*total)[UNIT]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) store(total[m] + panel * PANEL + v * LANES, sum[m][v]);
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
