// Attention of queries of one slot and KV head over its keys. Positions are taken in order in chunks at fixed
// places, so an output depends on its query, the query's position and the keys it sees: queries that are
// taken together share loads and nothing else.
namespace blockpilot {
namespace MODEL_ISA {

constexpr int64_t SUMS = LANES == 16 ? 24 : 12;  // that stay in registers
constexpr int64_t NEAR = 32;                     // positions

// Vectors of a tile of Q queries: the largest power of two whose sums do.
constexpr int64_t values_together(int64_t q) {
  int64_t n = 8;
  while (n > 1 && n * q > SUMS) n /= 2;
  return n;
}
constexpr int64_t chunks_together(int64_t q) {
  const int64_t n = SUMS / (q * (PANEL / LANES));
  return n < 1 ? 1 : n < 4 ? n : 4;
}

template <bool BF16>
static inline vf load_kv(const void* base, int64_t at) {
  if (BF16) return load_bf16((const uint16_t*)base + at);
  vf v;
  __builtin_memcpy(&v, (const float*)base + at, sizeof v);
  return v;
}

// Scores of Q queries with C consecutive chunks of 16 positions. Of keys and queries the fewer are held in
// registers beside the sums.
template <bool BF16, int Q, int C>
static inline void score_chunks(const Attended& a, const Query* query, int64_t chunk) {
  constexpr int N = PANEL / LANES, V = C * N;
  vf dot[Q][V];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) dot[q][v] = splat(0.0f);
  // The values of these positions, wanted next, come in meanwhile.
  constexpr int64_t SIZE = BF16 ? 2 : 4;
  const uint8_t* values = static_cast<const uint8_t*>(a.values) + chunk * PANEL * a.padded_dim * SIZE;
  for (int64_t d = 0; d < a.dim; ++d) {
    for (int64_t i = 0; i < C * PANEL * SIZE / 64; ++i)
      __builtin_prefetch(values + (d * (C * PANEL * SIZE / 64) + i) * 64, 0, 2);
    const auto key = [&](int v) {
      return load_kv<BF16>(a.keys, ((chunk + v / N) * a.dim + d) * PANEL + v % N * LANES);
    };
    vf held[Q < V ? Q : V];
#pragma GCC unroll 8
    for (int i = 0; i < (Q < V ? Q : V); ++i) held[i] = Q < V ? splat(query[i].x[d]) : key(i);
#pragma GCC unroll 8
    for (int i = 0; i < (Q < V ? V : Q); ++i) {
      const vf other = Q < V ? key(i) : splat(query[i].x[d]);
#pragma GCC unroll 8
      for (int j = 0; j < (Q < V ? Q : V); ++j) {
        vf& sum = Q < V ? dot[j][i] : dot[i][j];
        sum = fma(held[j], other, sum);
      }
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) {
      const vf scaled = dot[q][v] * splat(a.scale);
      __builtin_memcpy(query[q].scores + chunk * PANEL + v * LANES, &scaled, sizeof scaled);
    }
}

// Scores of what lies on a path move to its positions, so that sums run over them as over a plain row's. A
// place is never below its position: none is overwritten before it is read.
static inline void take_path(const Query& a) {
  for (int64_t p = a.low < a.path.from ? a.path.from : a.low; p < a.high; ++p)
    a.scores[p] = a.scores[a.path.of[p - a.path.from]];
}

// Weights in place of scores, those of unseen positions dropped; returns the weights' sum.
static inline float soften(const Query& a) {
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
  const float top = max_lanes(tops);
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

// Adds the values of positions that all Q queries see, N vectors from column `from` on.
template <bool BF16, int Q, int N>
static inline void mix_columns(const Attended& a, const Query* query, int64_t from, int64_t begin,
                               int64_t end) {
  vf sum[Q][N];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v)
      __builtin_memcpy(&sum[q][v], query[q].sums + from + v * LANES, sizeof sum[q][v]);
  for (int64_t p = begin; p < end; ++p) {
    vf value[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) value[v] = load_kv<BF16>(a.values, p * a.padded_dim + from + v * LANES);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sum[q][v] = fma(splat(query[q].scores[p]), value[v], sum[q][v]);
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v)
      __builtin_memcpy(query[q].sums + from + v * LANES, &sum[q][v], sizeof sum[q][v]);
}

// All columns, for so few positions at a time that they are still near when the next columns are read.
template <bool BF16, int Q>
static inline void mix(const Attended& a, const Query* query, int64_t begin, int64_t end) {
  constexpr int N = values_together(Q);
  for (int64_t p = begin; p < end; p += NEAR) {
    const int64_t stop = p + NEAR < end ? p + NEAR : end;
    int64_t from = 0;
    for (; from + N * LANES <= a.padded_dim; from += N * LANES)
      mix_columns<BF16, Q, N>(a, query, from, p, stop);
    for (; from < a.padded_dim; from += LANES) mix_columns<BF16, Q, 1>(a, query, from, p, stop);
  }
}

// The same for one query that finds positions from `begin` on along its path.
template <bool BF16>
static inline void mix_path(const Attended& a, const Query& query, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    const int64_t at = query.path.of[p - query.path.from] * a.padded_dim;
    for (int64_t v = 0; v < a.padded_dim; v += LANES) {
      vf sum;
      __builtin_memcpy(&sum, query.sums + v, sizeof sum);
      sum = fma(splat(query.scores[p]), load_kv<BF16>(a.values, at + v), sum);
      __builtin_memcpy(query.sums + v, &sum, sizeof sum);
    }
  }
}

// One query's own positions, those on its path last.
template <bool BF16>
static inline void mix_own(const Attended& a, const Query* query, int64_t begin, int64_t end) {
  const int64_t from = query->path.from;
  mix<BF16, 1>(a, query, begin, end < from ? end : from);
  if (from < end) mix_path<BF16>(a, *query, begin < from ? from : begin, end);
}

// Mean values. Those that only some of the queries see are read for these alone: others may find anything
// there.
template <bool BF16, int Q>
static inline void mix_visible(const Attended& a, const Query* query) {
  int64_t low = query[0].low, high = query[0].high;
  for (int q = 0; q < Q; ++q) {
    low = query[q].low > low ? query[q].low : low;
    high = query[q].high < high ? query[q].high : high;
    high = query[q].path.from < high ? query[q].path.from : high;
  }
  high = high < low ? low : high;
  for (int q = 0; q < Q; ++q) {
    __builtin_memset(query[q].sums, 0, sizeof(float) * static_cast<std::size_t>(a.padded_dim));
    mix_own<BF16>(a, query + q, query[q].low, low < query[q].high ? low : query[q].high);
  }
  mix<BF16, Q>(a, query, low, high);
  for (int q = 0; q < Q; ++q) mix_own<BF16>(a, query + q, high, query[q].high);
}

template <bool BF16, int Q>
static void attend_tile(const Attended& a, const Query* query) {
  constexpr int C = chunks_together(Q);
  int64_t chunk = query[0].low / PANEL, chunks = 0;
  for (int q = 0; q < Q; ++q) {
    const int64_t first = query[q].low / PANEL, end = (query[q].places() + PANEL - 1) / PANEL;
    chunk = first < chunk ? first : chunk;
    chunks = end > chunks ? end : chunks;
  }
  for (; chunk + C <= chunks; chunk += C) score_chunks<BF16, Q, C>(a, query, chunk);
  for (; chunk < chunks; ++chunk) score_chunks<BF16, Q, 1>(a, query, chunk);
  float mass[Q];
  for (int q = 0; q < Q; ++q) {
    if (query[q].path.of) take_path(query[q]);
    mass[q] = soften(query[q]);
  }
  mix_visible<BF16, Q>(a, query);
  for (int q = 0; q < Q; ++q)
    for (int64_t i = 0; i < a.dim; ++i) query[q].out[i] = query[q].sums[i] / mass[q];
}

// Tiles of Q queries, and one of those that remain.
template <bool BF16, int Q>
static void attend_tiles(const Attended& a, const Query* query, int64_t count) {
  for (; count >= Q; query += Q, count -= Q) attend_tile<BF16, Q>(a, query);
  if constexpr (Q > 1) {
    if (count > 0) attend_tiles<BF16, Q - 1>(a, query, count);
  }
}

static void attend(const Attended& a, const Query* query, int64_t count) {
  return a.bf16 ? attend_tiles<true, TILE_QUERIES>(a, query, count)
                : attend_tiles<false, TILE_QUERIES>(a, query, count);
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
