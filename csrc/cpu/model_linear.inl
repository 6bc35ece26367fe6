// Products with a packed matrix. A value's operations and their order depend on its own row and column alone:
// each block of 32 columns is summed from zero, and the blocks are added in order. How many rows share a
// tile, and whether a block was unpacked before, decide only what is loaded when.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t VECTORS = PANEL / LANES;  // of a panel's 16 rows
constexpr int64_t AHEAD_BYTES = 4096;
constexpr int64_t ROW_CHUNK = 64;  // activations whose totals are kept while a panel is read

static inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }

template <Format F>
constexpr int64_t HEAD_BYTES = F == Format::Q4_1 ? 64 : 32;
template <Format F>
constexpr int64_t CODE_BYTES = F == Format::Q8_0 ? 512 : 256;

// Of a quantised block: whether its scales lie behind its codes.
template <Format F>
static inline bool codes_first(const uint8_t* block) {
  return HEAD_BYTES<F> % LINE != 0 && reinterpret_cast<uintptr_t>(block) % LINE == 0;
}
template <Format F>
static inline const uint8_t* codes_of(const uint8_t* block) {
  return codes_first<F>(block) ? block : block + HEAD_BYTES<F>;
}
template <Format F>
static inline const uint16_t* scales_of(const uint8_t* block) {
  return (const uint16_t*)(codes_first<F>(block) ? block + CODE_BYTES<F> : block);
}

// Column 16·half + 4·g + c of a block as floats without the scale, for the v-th vector of a panel.
template <Format F>
static inline vf weight(const uint8_t* block, int64_t g, int64_t c, int64_t half, int64_t v) {
  const int64_t k = 16 * half + 4 * g + c;
  if (F == Format::F32) return load((const float*)block + k * PANEL + v * LANES);
  if (F == Format::BF16) {
    const vi pair = load_codes(block + 64 * (k / 2) + 4 * LANES * v);
    return (vf)(k % 2 == 0 ? pair << 16 : pair >> 16 << 16);
  }
  const vi codes = load_codes(codes_of<F>(block) + 64 * g + 4 * LANES * v);
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
  const uint16_t* numbers = scales_of<F>(block);
  const vf scale = load_half(numbers + v * LANES);
  const vf scaled = scale * splat(x_scale);
  *total = fma(scaled, dot, *total);
  if (F == Format::Q4_0) *total = fma(scale, splat(-8.0f * sum), *total);
  if (F == Format::Q4_1) *total = fma(load_half(numbers + PANEL + v * LANES), splat(sum), *total);
}

// Activations lie in tiles of TILE_ROWS rows: values [block][column][row], codes [block][row][32], scales and
// sums [block][row]. An input rounded to 16 bits takes two rows, high and low bytes, with scale and sums at
// the first.
struct Tile {
  const float* values;
  const int8_t* codes;
  const float* scales;
  const float* sums;
  const int32_t* code_sums;
};

static inline Tile tile_at(const Activations& a, int64_t blocks, int64_t row, int64_t b) {
  const int64_t first = (row / TILE_ROWS * blocks + b) * TILE_ROWS, r = row % TILE_ROWS;
  return {a.values + first * BLOCK + r, a.codes + (first + r) * BLOCK, a.scales + first + r,
          a.sums + first + r, a.code_sums + first + r};
}

// A block's columns in the order they are summed: nibbles go by the byte that holds two of them.
template <Format F>
constexpr int64_t HALVES = F == Format::Q4_0 || F == Format::Q4_1 ? 2 : 1;

// Adds one block for M rows and P panels to `sum`, float activations. `unpacked` holds [32][16] floats of one
// panel, or is null.
template <Format F, int M, int P, bool UNPACKED>
static inline void float_block(const uint8_t* const* block, const float* unpacked, const Tile& x,
                               vf (*sum)[P * VECTORS]) {
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
    for (int v = 0; v < N; ++v)
      finish_block<F>(block[v / VECTORS], v % VECTORS, dot[m][v], x.sums[m], 1.0f, &sum[m][v]);
}

template <Format F>
static void unpack(const uint8_t* block, float* to) {
  for (int64_t g = 0; g < 8 / HALVES<F>; ++g)
    for (int64_t c = 0; c < 4; ++c)
      for (int64_t half = 0; half < HALVES<F>; ++half)
        for (int64_t v = 0; v < VECTORS; ++v)
          store(to + (16 * half + 4 * g + c) * PANEL + v * LANES, weight<F>(block, g, c, half, v));
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
