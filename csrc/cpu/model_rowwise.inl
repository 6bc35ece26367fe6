// Row-wise parts of a decoder layer. Sums run over lanes first and then over the lanes in order, so a row's
// bits depend on the row alone.
namespace blockpilot {
namespace MODEL_ISA {

static inline vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }

// exp x, about 1 ulp; 0 below −87, +inf above 88.7, NaN stays. log 2 comes in two parts whose high one is
// exact.
static inline vf exp_vector(vf x) {
  const vf lowest = splat(-87.0f), highest = splat(88.7f), shift = splat(12582912.0f);  // 1.5 · 2^23 rounds
  const vi low = x<lowest, high = x> highest;
  const vf c = (vf)(((vi)x & ~(low | high)) | ((vi)lowest & low) | ((vi)highest & high));
  const vf n = (c * splat(1.44269504f) + shift) - shift;
  const vf r = (c - n * splat(0x1.62e4p-1f)) - n * splat(0x1.7f7d1cp-20f);
  vf p = splat(1.0f / 5040);
  p = splat(1.0f / 720) + r * p;
  p = splat(1.0f / 120) + r * p;
  p = splat(1.0f / 24) + r * p;
  p = splat(1.0f / 6) + r * p;
  p = splat(1.0f / 2) + r * p;
  p = splat(1.0f) + r * p;
  p = splat(1.0f) + r * p;
  // 2^n in two factors: n may be 128. A NaN converts to anything and stays NaN through p.
  const vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
  const vf y = p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
  const vf infinite = splat(__builtin_inff());
  return (vf)(((vi)y & ~(low | high)) | ((vi)infinite & high));
}

static float rms_factor(const float* x, int64_t n, float eps) {
  vf squares = splat(0.0f);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const vf v = load(x + i);
    squares = fma(v, v, squares);
  }
  float total = sum_lanes(squares);
  for (int64_t j = i; j < n; ++j) total += x[j] * x[j];
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
}

static void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float factor = rms_factor(x, n, eps);
  for (int64_t j = 0; j < n; ++j) out[j] = x[j] * factor * weight[j];
}

// Halves (a, b) → (a·cos − b·sin, b·cos + a·sin).
static void rope(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// The nearest bfloat16, in the low half of each lane.
static inline vi round_bf16(vf x) {
  const vi u = (vi)x, special = (u & 0x7f800000) == 0x7f800000, nan = x != x;
  const vi half = ((u >> 16 & 1) + 0x7fff) & ~special;
  return ((u + half) >> 16 & ~nan) | (nan & 0x7fc0);
}

static inline float sum_block(const float* x) {
  float lanes[8] = {};
  for (int64_t j = 0; j < BLOCK; j += 8)
    for (int64_t i = 0; i < 8; ++i) lanes[i] += x[j + i];
  float sum = lanes[0];
  for (int64_t i = 1; i < 8; ++i) sum += lanes[i];
  return sum;
}

// Codes of one block, at most ±`most`, into the rows of a tile that stand for input `row`, with their scale,
// the sum of what they stand for, and their own sum. A block with NaN or ±inf gets the scale NaN, so that
// whatever it meets becomes NaN; one so small that its inverse scale would overflow counts as zero.
static inline void place_codes(const float* x, Rounding rounding, int64_t row, int64_t blocks, int64_t b,
                               const Activations& to) {
  const bool two = rounding == Rounding::INT16;
  const int64_t line = two ? 2 * row : row;
  const int64_t at = (line / TILE_ROWS * blocks + b) * TILE_ROWS + line % TILE_ROWS;
  const float most = two ? 16256.0f : 127.0f;
  vi largest = {}, total = {};
  for (int64_t j = 0; j < BLOCK; j += LANES) largest = larger(largest, (vi)load(x + j) & 0x7fffffff);
  const int32_t bits = max_codes(largest);
  const bool wrong = bits >= 0x7f800000;
  float top;
  __builtin_memcpy(&top, &bits, sizeof top);
  const float inverse = top > 0x1p-110f && !wrong ? most / top : 0.0f;
  for (int64_t j = 0; j < BLOCK; j += LANES) {
    const vi code = wrong ? vi{} : nearest(load(x + j) * splat(inverse)),
             upper = two ? (code + 64) >> 7 : code;
    const vb high = __builtin_convertvector(upper, vb),
             low = __builtin_convertvector(code - (upper << 7), vb);
    total += code;
    __builtin_memcpy(to.codes + at * BLOCK + j, &high, sizeof high);
    if (two) __builtin_memcpy(to.codes + (at + 1) * BLOCK + j, &low, sizeof low);
  }
  const float step = wrong ? __builtin_nanf("") : top / most;
  to.scales[at] = step;
  to.code_sums[at] = sum_codes(total);
  to.sums[at] = step * static_cast<float>(to.code_sums[at]);
}

// Whether a product multiplies rows of bfloat16 numbers as they are.
static inline bool takes_bf16(Format format, Rounding rounding) {
#if defined(MODEL_AMX)
  return format == Format::BF16 && rounding == Rounding::BF16;
#else
  (void)format, (void)rounding;
  return false;
#endif
}

// Where block b of a row lies then: tiles [16 rows][32 columns] in place of float values.
static inline uint16_t* bf16_block(const Activations& a, int64_t blocks, int64_t row, int64_t b) {
  const int64_t line = (row / TILE_ROWS * blocks + b) * TILE_ROWS + row % TILE_ROWS;
  return reinterpret_cast<uint16_t*>(a.values) + line * BLOCK;
}

static inline void place_bf16(const float* x, uint16_t* to) {
  typedef int16_t Halves __attribute__((vector_size(2 * LANES)));
  for (int64_t j = 0; j < BLOCK; j += LANES) {
    vf v;
    __builtin_memcpy(&v, x + j, sizeof v);
    const Halves rounded = __builtin_convertvector(round_bf16(v), Halves);
    __builtin_memcpy(to + j, &rounded, sizeof rounded);
  }
}

static void prepare(const float* x, const float* norm, float factor, const Linear& w, Rounding rounding,
                    int64_t row, int64_t begin, int64_t end, const Activations& to) {
  const int64_t columns = w.columns, blocks = w.blocks(), r = row % TILE_ROWS;
  for (int64_t b = begin; b < end; ++b) {
    float padded[BLOCK];
    const int64_t count = columns - b * BLOCK < BLOCK ? columns - b * BLOCK : BLOCK;
    const float* from = x + b * BLOCK;
    if (norm || count < BLOCK) {
      for (int64_t j = 0; j < count; ++j) padded[j] = norm ? from[j] * factor * norm[b * BLOCK + j] : from[j];
      for (int64_t j = count; j < BLOCK; ++j) padded[j] = 0.0f;
      from = padded;
    }
    if (code_rows(rounding) > 0) {
      place_codes(from, rounding, row, blocks, b, to);
      continue;
    }
    if (takes_bf16(w.format, rounding)) {
      place_bf16(from, bf16_block(to, blocks, row, b));
      continue;
    }
    const int64_t at = row / TILE_ROWS * blocks + b;
    if (rounding == Rounding::BF16) {
      for (int64_t j = 0; j < BLOCK; j += LANES) {
        vf v;
        __builtin_memcpy(&v, from + j, sizeof v);
        v = (vf)(round_bf16(v) << 16);
        __builtin_memcpy(padded + j, &v, sizeof v);
      }
      from = padded;
    }
    to.sums[at * TILE_ROWS + r] = sum_block(from);
    for (int64_t j = 0; j < BLOCK; ++j) to.values[(at * BLOCK + j) * TILE_ROWS + r] = from[j];
  }
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
