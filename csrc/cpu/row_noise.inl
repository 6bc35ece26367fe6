// Philox4x32-10 (Salmon et al., SC 2011) and the Gumbel transform.
namespace blockpilot {
namespace ROW_ISA {

constexpr int COUNTERS = 16;       // counters a chunk, side by side
constexpr int IDS = 4 * COUNTERS;  // ids a chunk: four lanes a counter

// Ten rounds on COUNTERS states side by side. Kept out of line: inlined, compilers unroll the inner loop
// before they could vectorise it.
__attribute__((noinline)) static void philox_rounds(uint32_t k0, uint32_t k1, uint32_t* __restrict c0,
                                                    uint32_t* __restrict c1, uint32_t* __restrict c2,
                                                    uint32_t* __restrict c3) {
  for (int round = 0; round < 10; ++round) {
    for (int j = 0; j < COUNTERS; ++j) {
      const uint64_t a = static_cast<uint64_t>(c0[j]) * 0xD2511F53u;
      const uint64_t b = static_cast<uint64_t>(c2[j]) * 0xCD9E8D57u;
      c0[j] = static_cast<uint32_t>(b >> 32) ^ c1[j] ^ k0;
      c1[j] = static_cast<uint32_t>(b);
      c2[j] = static_cast<uint32_t>(a >> 32) ^ c3[j] ^ k1;
      c3[j] = static_cast<uint32_t>(a);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// Integers of ids 4·first … 4·first + IDS − 1, in id order.
static void philox_chunk(int64_t seed, int64_t position, uint32_t first, uint32_t* out) {
  uint32_t c0[COUNTERS], c1[COUNTERS], c2[COUNTERS], c3[COUNTERS];
  for (int j = 0; j < COUNTERS; ++j) {
    c0[j] = first + static_cast<uint32_t>(j);
    c1[j] = static_cast<uint32_t>(position);
    c2[j] = 0;
    c3[j] = 0;
  }
  const uint64_t key = static_cast<uint64_t>(seed);
  philox_rounds(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), c0, c1, c2, c3);
  for (int j = 0; j < COUNTERS; ++j) {
    out[4 * j] = c0[j];
    out[4 * j + 1] = c1[j];
    out[4 * j + 2] = c2[j];
    out[4 * j + 3] = c3[j];
  }
}

// u = (i + ½) · 2^-32 in float, kept below 1 (the largest i round to 1, whose g would be −inf); g =
// −log(−log(1 − u)).
static inline float gumbel(uint32_t i) {
  const float below_one = 0x1.fffffep-1f;
  const float u = (static_cast<float>(i) + 0.5f) * 0x1p-32f;
  return -log_normal(-log_one_minus(u < below_one ? u : below_one));
}

static void philox(int64_t seed, int64_t position, int64_t first, int64_t n, int64_t* out) {
  for (int64_t at = 0; at < n; at += IDS) {
    uint32_t integers[IDS];
    philox_chunk(seed, position, static_cast<uint32_t>((first + at) / 4), integers);
    const int64_t some = n - at < IDS ? n - at : IDS;
    for (int64_t j = 0; j < some; ++j) out[at + j] = integers[j];
  }
}

static void gumbel_noise(int64_t seed, int64_t position, int64_t first, int64_t n, float* out) {
  for (int64_t at = 0; at < n; at += IDS) {
    uint32_t integers[IDS];
    float noise[IDS];
    philox_chunk(seed, position, static_cast<uint32_t>((first + at) / 4), integers);
    for (int j = 0; j < IDS; ++j) noise[j] = gumbel(integers[j]);
    const int64_t some = n - at < IDS ? n - at : IDS;
    __builtin_memcpy(out + at, noise, static_cast<std::size_t>(some) * sizeof(float));
  }
}

static void gumbel_from_integers(const int64_t* integers, int64_t n, float* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = gumbel(static_cast<uint32_t>(integers[j]));
}

}  // namespace ROW_ISA
}  // namespace blockpilot
