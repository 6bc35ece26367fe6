// Attention of one query row and head over its visible keys. Positions are taken in order in chunks at fixed
// places, so the result depends on the row, its position and the keys it sees, and on nothing beside them.
namespace blockpilot {
namespace MODEL_ISA {

template <bool BF16>
static inline vf load_kv(const void* base, int64_t at) {
  if (BF16) return load_bf16((const uint16_t*)base + at);
  vf v;
  __builtin_memcpy(&v, (const float*)base + at, sizeof v);
  return v;
}

// Scores of C consecutive chunks of 16 positions.
template <bool BF16, int C>
static inline void score_chunks(const AttendOne& a, int64_t chunk) {
  constexpr int N = PANEL / LANES;
  vf dot[C][N];
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < N; ++v) dot[c][v] = splat(0.0f);
  for (int64_t d = 0; d < a.dim; ++d) {
    const vf q = splat(a.query[d]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        const int64_t at = ((chunk + c) * a.dim + d) * PANEL + v * LANES;
        dot[c][v] = fma(q, load_kv<BF16>(a.keys, at), dot[c][v]);
      }
  }
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < N; ++v) {
      const vf scaled = dot[c][v] * splat(a.scale);
      __builtin_memcpy(a.scores + (chunk + c) * PANEL + v * LANES, &scaled, sizeof scaled);
    }
}

// Weights in place of scores; returns their sum.
static inline float soften(const AttendOne& a) {
  const int64_t first = a.low / PANEL * PANEL, last = (a.high + PANEL - 1) / PANEL * PANEL;
  const float never = -__builtin_inff();
  for (int64_t p = first; p < a.low; ++p) a.scores[p] = never;
  for (int64_t p = a.high; p < last; ++p) a.scores[p] = never;
  vf tops = splat(never);
  for (int64_t p = first; p < last; p += LANES) {
    vf s;
    __builtin_memcpy(&s, a.scores + p, sizeof s);
    const vi more = s > tops;
    tops = (vf)(((vi)s & more) | ((vi)tops & ~more));
  }
  float top = tops[0];
  for (int64_t i = 1; i < LANES; ++i) top = tops[i] > top ? tops[i] : top;
  vf mass = splat(0.0f);
  for (int64_t p = first; p < last; p += LANES) {
    vf s;
    __builtin_memcpy(&s, a.scores + p, sizeof s);
    s = exp_vector(s - splat(top));
    __builtin_memcpy(a.scores + p, &s, sizeof s);
    mass = mass + s;
  }
  return sum_lanes(mass);
}

template <bool BF16, int N>
static inline void mix(const AttendOne& a, int64_t from, float mass) {
  vf sum[N];
  for (int v = 0; v < N; ++v) sum[v] = splat(0.0f);
  for (int64_t p = a.low; p < a.high; ++p) {
    const vf w = splat(a.scores[p]);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v)
      sum[v] = fma(w, load_kv<BF16>(a.values, p * a.padded_dim + from + v * LANES), sum[v]);
  }
  for (int v = 0; v < N; ++v) {
    const vf mean = sum[v] / splat(mass);
    for (int64_t i = 0; i < LANES; ++i)
      if (from + v * LANES + i < a.dim) a.out[from + v * LANES + i] = mean[i];
  }
}

template <bool BF16>
static void attend_one(const AttendOne& a) {
  const int64_t chunks = (a.high + PANEL - 1) / PANEL;
  int64_t chunk = a.low / PANEL;
  for (; chunk + 4 <= chunks; chunk += 4) score_chunks<BF16, 4>(a, chunk);
  for (; chunk < chunks; ++chunk) score_chunks<BF16, 1>(a, chunk);
  const float mass = soften(a);
  int64_t from = 0;
  for (; from + 8 * LANES <= a.padded_dim; from += 8 * LANES) mix<BF16, 8>(a, from, mass);
  for (; from < a.padded_dim; from += LANES) mix<BF16, 1>(a, from, mass);
}

static void attend(const AttendOne& a) { return a.bf16 ? attend_one<true>(a) : attend_one<false>(a); }

}  // namespace MODEL_ISA
}  // namespace blockpilot
