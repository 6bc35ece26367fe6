// Rows of a table, and their weighted sum: what a policy reads a distribution through.
namespace blockpilot {
namespace MODEL_ISA {

// Whether the 16 weights of a panel are all zero, as nearly all of a distribution's are.
static inline bool weightless(const float* weights, int64_t count) {
  uint32_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= weights[i] != 0.0f;
  return any == 0;
}

template <Format F>
static void weighted_block(const Linear& t, const float* weights, int64_t begin, int64_t end, int64_t b,
                           float* out) {
  vf sum[BLOCK];
  for (int64_t k = 0; k < BLOCK; ++k) sum[k] = splat(0.0f);
  const int64_t width = block_bytes(F);
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t left = t.rows - panel * PANEL, count = left < PANEL ? left : PANEL;
    if (count <= 0 || weightless(weights + panel * PANEL, count)) continue;
    const uint8_t* block = t.data + (panel * t.blocks() + b) * width;
    for (int64_t v = 0; v < VECTORS; ++v) {
      float padded[LANES];
      const int64_t first = panel * PANEL + v * LANES;
      for (int64_t i = 0; i < LANES; ++i) padded[i] = first + i < t.rows ? weights[first + i] : 0.0f;
      vf w = load(padded), offset = splat(0.0f);
      if (is_quantised(F)) {
        const vf scale = load_half(scales_of<F>(block) + v * LANES);
        if (F == Format::Q4_0) offset = w * scale * splat(-8.0f);
        if (F == Format::Q4_1) offset = w * load_half(scales_of<F>(block) + PANEL + v * LANES);
        w = w * scale;
      }
      for (int64_t k = 0; k < BLOCK; ++k) {
        const int64_t half = HALVES<F> == 2 ? k / 16 : 0, g = HALVES<F> == 2 ? k % 16 / 4 : k / 4;
        sum[k] = fma(weight<F>(block, g, k % 4, half, v), w, sum[k]) + offset;
      }
    }
  }
  for (int64_t k = 0; k < BLOCK && b * BLOCK + k < t.columns; ++k) out[b * BLOCK + k] = sum_lanes(sum[k]);
}

template <Format F>
static void weighted_panels(const Linear& t, const float* weights, int64_t begin, int64_t end, float* out) {
  for (int64_t b = 0; b < t.blocks(); ++b) weighted_block<F>(t, weights, begin, end, b, out);
}

static void weighted_rows(const Linear& table, const float* weights, int64_t begin, int64_t end, float* out) {
  switch (table.format) {
    case Format::F32:
      return weighted_panels<Format::F32>(table, weights, begin, end, out);
    case Format::BF16:
      return weighted_panels<Format::BF16>(table, weights, begin, end, out);
    case Format::Q8_0:
      return weighted_panels<Format::Q8_0>(table, weights, begin, end, out);
    case Format::Q4_0:
      return weighted_panels<Format::Q4_0>(table, weights, begin, end, out);
    case Format::Q4_1:
      return weighted_panels<Format::Q4_1>(table, weights, begin, end, out);
  }
}

// Column c of a packed table's row.
template <Format F>
static inline float entry(const uint8_t* block, int64_t lane, int64_t k) {
  if (F == Format::F32) return ((const float*)block)[k * PANEL + lane];
  if (F == Format::BF16) {
    const uint16_t stored = ((const uint16_t*)block)[(k / 2 * PANEL + lane) * 2 + k % 2];
    const uint32_t u = static_cast<uint32_t>(stored) << 16;
    float x;
    __builtin_memcpy(&x, &u, sizeof x);
    return x;
  }
  const float scale = load_half(scales_of<F>(block) + lane / LANES * LANES)[lane % LANES];
  if (F == Format::Q8_0)
    return scale *
           static_cast<float>(static_cast<int8_t>(codes_of<F>(block)[64 * (k / 4) + 4 * lane + k % 4]));
  const uint8_t both = codes_of<F>(block)[64 * (k % 16 / 4) + 4 * lane + k % 4];
  const float code = static_cast<float>(k < 16 ? both & 15 : both >> 4);
  if (F == Format::Q4_0) return scale * (code - 8.0f);
  const float offset = load_half(scales_of<F>(block) + PANEL + lane / LANES * LANES)[lane % LANES];
  return scale * code + offset;
}

template <Format F>
static void embed_row(const Linear& t, int64_t id, float scale, float* out) {
  const uint8_t* panel = t.data + id / PANEL * t.blocks() * block_bytes(F);
  for (int64_t c = 0; c < t.columns; ++c)
    out[c] = entry<F>(panel + c / BLOCK * block_bytes(F), id % PANEL, c % BLOCK) * scale;
}

static void embed(const Linear& table, int64_t id, float scale, float* out) {
  switch (table.format) {
    case Format::F32:
      return embed_row<Format::F32>(table, id, scale, out);
    case Format::BF16:
      return embed_row<Format::BF16>(table, id, scale, out);
    case Format::Q8_0:
      return embed_row<Format::Q8_0>(table, id, scale, out);
    case Format::Q4_0:
      return embed_row<Format::Q4_0>(table, id, scale, out);
    case Format::Q4_1:
      return embed_row<Format::Q4_1>(table, id, scale, out);
  }
}

}  // namespace MODEL_ISA
}  // namespace blockpilot
