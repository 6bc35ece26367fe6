// Products of bfloat16 numbers with AMX, at every number of rows: a value's bits are those of the
// instruction, which sums the even and the odd columns of a block from zero, adds the two sums, and adds that
// to the total. It takes numbers below the normal range for zero and gives zero in their place.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t NEAR_BLOCKS = 8;  // of a unit, that stay in the first-level cache beside those of 32 rows

template <int SUM, int A, int W>
static inline void add_products() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(W));
}

// Adds the blocks [begin, end) of a unit for R tiles of rows.
template <int R>
static inline void bf16_tiles(const uint8_t* data, const Activations& a, int64_t blocks, int64_t begin,
                              int64_t end, int64_t row, float (*total)[UNIT]) {
  constexpr int64_t WIDTH = block_bytes(Format::BF16);
  const auto sums = [&](int s) { return total[s / 2 * TILE_ROWS] + s % 2 * PANEL; };
  repeat<2 * R>([&](auto s) INLINE { load_tile<s.rows, 16, sizeof *total>(sums(s.rows)); });
  for (int64_t b = begin; b < end; ++b) {
    const uint8_t *first = data + b * WIDTH, *second = first + blocks * WIDTH;
    if (row == 0) {  // later rows find the weights in the cache
      fetch_ahead<Format::BF16>(first);
      fetch_ahead<Format::BF16>(second);
    }
    load_tile<4, 16, LINE>(bf16_block(a, blocks, row, b));
    load_tile<6, 16, LINE>(first);
    add_products<0, 4, 6>();
    load_tile<7, 16, LINE>(second);
    add_products<1, 4, 7>();
    if (R > 1) {
      load_tile<5, 16, LINE>(bf16_block(a, blocks, row + TILE_ROWS, b));
      add_products<2, 5, 6>();
      add_products<3, 5, 7>();
    }
  }
  repeat<2 * R>([&](auto s) INLINE { store_tile<s.rows, sizeof *total>(sums(s.rows)); });
}

static void bf16_unit(const uint8_t* data, const Activations& a, int64_t blocks, int64_t from, int64_t rows,
                      Totals& t) {
  const int64_t together = rows > 2 * TILE_ROWS ? NEAR_BLOCKS : blocks;
  for (int64_t begin = 0; begin < blocks; begin += together) {
    const int64_t end = begin + together < blocks ? begin + together : blocks;
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
      const auto tiles = rows - row > TILE_ROWS ? bf16_tiles<2> : bf16_tiles<1>;
      tiles(data, a, blocks, begin, end, from + row, t.of + row);
    }
  }
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
