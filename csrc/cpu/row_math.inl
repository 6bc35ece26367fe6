// float log and exp written so that compilers vectorise them: no branches, no table, no library call.
namespace blockpilot {
namespace ROW_ISA {

// log 2 in two parts: n · LN2_HIGH is exact for |n| < 256.
constexpr float LN2_HIGH = 0x1.62e4p-1f;
constexpr float LN2_LOW = 0x1.7f7d1cp-20f;

static inline uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}

static inline float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

// log x for normal x > 0, about 1 ulp. x = 2^e · m with m in [√½, √2), f = m − 1, s = f / (2 + f):
// log m = 2 (s + s³/3 + s⁵/5 + …) = f − s (f − 2 (s²/3 + s⁴/5 + …)).
static inline float log_normal(float x) {
  const uint32_t half_root = 0x3f3504f3u;  // √½
  const uint32_t bits = bits_of(x);
  const int32_t e = static_cast<int32_t>(bits - half_root) >> 23;
  const float f = float_of(bits - (static_cast<uint32_t>(e) << 23)) - 1.0f;
  const float s = f / (2.0f + f);
  const float q = s * s;
  const float tail = q * (1.0f / 3 + q * (1.0f / 5 + q * (1.0f / 7 + q * (1.0f / 9))));
  const float n = static_cast<float>(e);
  return n * LN2_HIGH + (f - (s * (f - 2.0f * tail) - n * LN2_LOW));
}

// log(1 − u) for 2^-40 < u < 1: the rounding error of 1 − u is divided out again.
static inline float log_one_minus(float u) {
  const float w = 1.0f - u;
  const float step = 1.0f - w;  // exact
  const bool tiny = step == 0.0f;
  const float divisor = tiny ? 1.0f : step;
  const float curved = log_normal(w) * (u / divisor);
  return tiny ? -u : curved;
}

// exp x for x ≤ 0, about 1 ulp, 0 below −87. exp 0 = 1.
static inline float exp_not_positive(float x) {
  const float lowest = -87.0f;
  const float shift = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  const float c = x < lowest ? lowest : x;
  const float n = (c * 1.44269504f + shift) - shift;
  const float r = (c - n * LN2_HIGH) - n * LN2_LOW;
  float p = 1.0f / 5040;  // Taylor series, |r| ≤ ½ log 2
  p = 1.0f / 720 + r * p;
  p = 1.0f / 120 + r * p;
  p = 1.0f / 24 + r * p;
  p = 1.0f / 6 + r * p;
  p = 1.0f / 2 + r * p;
  p = 1.0f + r * p;
  p = 1.0f + r * p;
  const float scale = float_of(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  return x < lowest ? 0.0f : p * scale;
}

}  // namespace ROW_ISA
}  // namespace blockpilot
