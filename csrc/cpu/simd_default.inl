// Four lanes in the compiler's vector extension: SSE2, NEON or scalar code, whatever the platform has.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t LANES = 4;
constexpr int64_t TILE_ROWS = 2, FLOAT_ROWS = 2, TILE_QUERIES = 3;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

typedef int8_t vb __attribute__((vector_size(4)));

static inline vf splat(float x) { return vf{x, x, x, x}; }
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }

// Halves are combined until one lane is left.
static inline float sum_lanes(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float max_lanes(vf v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
static inline vi larger(vi a, vi b) {
  for (int64_t i = 0; i < LANES; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
  return a;
}
static inline int32_t max_codes(vi v) {
  const int32_t a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
static inline vi nearest(vf x) {
  const vf shift = splat(12582912.0f);  // 1.5 · 2^23 rounds
  return __builtin_convertvector((x + shift) - shift, vi);
}
static inline int32_t sum_codes(vi v) { return (v[0] + v[2]) + (v[1] + v[3]); }

static inline vi load_codes(const uint8_t* p) {
  vi v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

static inline vf load_bf16(const uint16_t* p) {
  const vi v = {p[0] << 16, p[1] << 16, p[2] << 16, p[3] << 16};
  return (vf)v;
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  const uint32_t wide = rest >= 0x7c00u ? 0x7f800000u | (rest & 0x3ffu) << 13 : (rest << 13) + 0x38000000u;
  float x;
  if (rest < 0x400u) {  // a float16 below its normal range, or zero
    x = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -x : x;
  }
  const uint32_t bits = sign | wide;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

static inline vf load_half(const uint16_t* p) {
  return vf{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}

// Σ over the four bytes of each lane of unsigned · signed, of one group, in 32 bits.
typedef vi Pairs;
static inline Pairs dot_nibbles(vi codes, int32_t x, Pairs sum) {
  for (int64_t i = 0; i < LANES; ++i)
    for (int j = 0; j < 4; ++j) sum[i] += (codes[i] >> 8 * j & 255) * static_cast<int8_t>(x >> 8 * j);
  return sum;
}
static inline vi widen(Pairs sum) { return sum; }

static inline vi dot_bytes(vi codes, int32_t x, vi sum) {
  for (int64_t i = 0; i < LANES; ++i)
    for (int j = 0; j < 4; ++j)
      sum[i] += static_cast<int8_t>(codes[i] >> 8 * j) * static_cast<int8_t>(x >> 8 * j);
  return sum;
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
