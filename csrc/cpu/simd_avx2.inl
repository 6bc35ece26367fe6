// Eight lanes: AVX2 with FMA and F16C.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t LANES = 8;
constexpr int64_t TILE_ROWS = 4, FLOAT_ROWS = 4, TILE_QUERIES = 6;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));

typedef int8_t vb __attribute__((vector_size(8)));

static inline vf splat(float x) { return (vf)_mm256_set1_ps(x); }
static inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

// Halves are combined until one lane is left.
static inline float sum_lanes(vf v) {
  const float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
  return (a + c) + (b + d);
}
static inline float max_lanes(vf v) {
  float top = v[0];
  for (int64_t i = 1; i < LANES; ++i) top = v[i] > top ? v[i] : top;
  return top;
}
static inline vi larger(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
static inline int32_t max_codes(vi v) {
  const __m128i half =
      _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  const __m128i pair = _mm_max_epi32(half, _mm_unpackhi_epi64(half, half));
  return _mm_cvtsi128_si32(_mm_max_epi32(pair, _mm_shuffle_epi32(pair, 1)));
}
static inline vi nearest(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }
static inline int32_t sum_codes(vi v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

static inline vi load_codes(const uint8_t* p) { return (vi)_mm256_loadu_si256((const __m256i*)p); }

static inline vf load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (vf)_mm256_slli_epi32(wide, 16);
}

static inline vf load_half(const uint16_t* p) {
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}

// A pair sum of nibble · signed byte is at most 2 · 15 · 127 = 3810 in size, so the eight of a block stay
// below 2^15 and are added in 16 bits.
typedef __m256i Pairs;
static inline Pairs dot_nibbles(vi codes, int32_t x, Pairs sum) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x)));
  __asm__("" : "+x"(sum));  // added one by one: a tree of sums needs more registers than there are
  return sum;
}
static inline vi widen(Pairs sum) { return (vi)_mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

// The weight's sign moves to the activation: 2 · 128 · 127 fits in 16 bits.
static inline vi dot_bytes(vi codes, int32_t x, vi sum) {
  const __m256i w = (__m256i)codes;
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(_mm256_set1_epi32(x), w));
  sum += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  __asm__("" : "+x"(sum));
  return sum;
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
