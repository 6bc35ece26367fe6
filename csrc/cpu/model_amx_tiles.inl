// Tiles of AMX: their configuration, loads and stores.
namespace blockpilot {
namespace MODEL_ISA {

// Tiles 0 … 3 are sums of 16 rows by 16 outputs, 4 and 5 activations, 6 and 7 weights: here of codes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 32, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 8, 8};
};

// For a product of so many lines of activations. Tiles of fewer than 16 hold no others, which would cost
// time; the processor refuses tiles without rows.
static inline TileConfig tile_config(int64_t lines, bool bf16) {
  TileConfig config;
  const uint8_t rows = static_cast<uint8_t>(lines < 1 ? 1 : lines < TILE_ROWS ? lines : TILE_ROWS);
  for (int i = 0; i < 6; ++i) config.rows[i] = rows;
  for (int i = 4; bf16 && i < 8; ++i) config.row_bytes[i] = 64;
  for (int i = 6; bf16 && i < 8; ++i) config.rows[i] = 16;
  return config;
}

// Tiles are configured as it says while it lives, and as they were afterwards: the calling thread may belong
// to a library that configured them once and relies on that.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config) {
    __asm__ volatile("sttilecfg %0" : "=m"(before_));
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() {
    if (before_.palette == 0)
      __asm__ volatile("tilerelease");
    else
      __asm__ volatile("ldtilecfg %0" : : "m"(before_));
  }
  Tiles(const Tiles&) = delete;

 private:
  TileConfig before_;
};

// At most ROWS rows, BYTES apart. The compiler's own intrinsics do not tell it which memory they read.
template <int T, int64_t ROWS, int64_t BYTES>
static inline void load_tile(const void* from) {
  typedef const uint8_t Memory[(ROWS - 1) * BYTES + (BYTES < 64 ? BYTES : 64)];
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(BYTES), "m"(*(Memory*)from));
}
template <int T, int64_t BYTES>
static inline void store_tile(void* to) {
  typedef uint8_t Memory[15 * BYTES + 64];
  __asm__ volatile("tilestored %%tmm%c1, (%2,%3,1)" : "+m"(*(Memory*)to) : "i"(T), "r"(to), "r"(BYTES));
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
