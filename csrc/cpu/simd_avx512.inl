// Sixteen lanes: AVX-512 F, BW, VL and DQ.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t LANES = 16;
#if defined(MODEL_AMX)
constexpr int64_t TILE_ROWS = 16;
#else
constexpr int64_t TILE_ROWS = 8;
#endif
constexpr int64_t FLOAT_ROWS = 8, TILE_QUERIES = 8;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

typedef int8_t vb __attribute__((vector_size(16)));

static inline vf splat(float x) { return (vf)_mm512_set1_ps(x); }
static inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// Halves are combined until one lane is left.
static inline float sum_lanes(vf v) { return _mm512_reduce_add_ps((__m512)v); }
static inline float max_lanes(vf v) { return _mm512_reduce_max_ps((__m512)v); }
static inline int32_t max_codes(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
static inline vi larger(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
static inline vi nearest(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
static inline int32_t sum_codes(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }

static inline vi load_codes(const uint8_t* p) { return (vi)_mm512_loadu_si512(p); }

static inline vf load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (vf)_mm512_slli_epi32(wide, 16);
}

static inline vf load_half(const uint16_t* p) {
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

#if !defined(MODEL_VNNI)
// A pair sum of nibble · signed byte is at most 2 · 15 · 127 = 3810 in size, so the eight of a block stay
// below 2^15 and are added in 16 bits.
typedef __m512i Pairs;
static inline Pairs dot_nibbles(vi codes, int32_t x, Pairs sum) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(x)));
}
static inline vi widen(Pairs sum) { return (vi)_mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }

// The weight's sign moves to the activation: 2 · 128 · 127 fits in 16 bits.
static inline vi dot_bytes(vi codes, int32_t x, vi sum) {
  const __m512i w = (__m512i)codes, a = _mm512_set1_epi32(x);
  const __m512i signed_a = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(w), _mm512_setzero_si512(), a);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_a);
  return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#endif

}  // namespace MODEL_ISA
}  // namespace blockpilot
