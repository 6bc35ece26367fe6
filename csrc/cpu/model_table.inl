// The weighted sum of a table's rows: what a policy reads a distribution through.
namespace blockpilot {
namespace MODEL_ISA {

template <Format F>
static void weighted_block(const Linear& t, const float* weights, int64_t begin, int64_t end, int64_t b,
                           float* out) {
  vf sum[BLOCK];
  for (int64_t k = 0; k < BLOCK; ++k) sum[k] = splat(0.0f);
  const int64_t width = block_bytes(F);
  for (int64_t panel = begin; panel < end; ++panel) {
    const uint8_t* block = t.data + (panel * t.blocks() + b) * width;
    for (int64_t v = 0; v < VECTORS; ++v) {
      float padded[LANES];
      const int64_t first = panel * PANEL + v * LANES;
      for (int64_t i = 0; i < LANES; ++i) padded[i] = first + i < t.rows ? weights[first + i] : 0.0f;
      vf w = load(padded), offset = splat(0.0f);
      if (is_quantised(F)) {
        const vf scale = load_half((const uint16_t*)block + v * LANES);
        if (F == Format::Q4_0) offset = w * scale * splat(-8.0f);
        if (F == Format::Q4_1) offset = w * load_half((const uint16_t*)block + PANEL + v * LANES);
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

}  // namespace MODEL_ISA
}  // namespace blockpilot
