// The chosen id of one row.
namespace blockpilot {
namespace ROW_ISA {

constexpr int LANES = 32;

static bool all_finite(const float* x, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
  return bad == 0;
}

// Largest value; NaN is passed over.
static float maximum(const float* x, int64_t n) {
  float best[LANES];
  for (int j = 0; j < LANES; ++j) best[j] = MINUS_INFINITY;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; ++j) best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
  for (; i < n; ++i) best[0] = x[i] > best[0] ? x[i] : best[0];
  for (int j = 1; j < LANES; ++j) best[0] = best[j] > best[0] ? best[j] : best[0];
  return best[0];
}

// Lowest index that holds `value`, 0 if none does.
static int64_t first_equal(const float* x, int64_t n, float value) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    uint32_t found = 0;
    for (int j = 0; j < LANES; ++j) found |= x[i + j] == value;
    if (found) break;
  }
  for (; i < n; ++i)
    if (x[i] == value) return i;
  return 0;
}

// The row with −inf at the banned ids: the row itself if none of them lies inside it.
static const float* without_banned(const float* logits, int64_t vocab, const int64_t* banned,
                                   int64_t banned_count, float* masked) {
  const float* row = logits;
  for (int64_t s = 0; s < banned_count; ++s) {
    if (banned[s] < 0 || banned[s] >= vocab) continue;
    if (row == logits) __builtin_memcpy(masked, logits, static_cast<std::size_t>(vocab) * sizeof(float));
    row = masked;
    masked[banned[s]] = MINUS_INFINITY;
  }
  return row;
}

// argmax of z + noise over the whole row. `least` is the min_p threshold; 0 turns it off.
static int64_t draw(const Scaled& row, const float* noise, float least, float* score) {
  for (int64_t id = 0; id < row.vocab; ++id) {
    const float z = z_of(row, id);
    const float s = z + noise[id];
    score[id] = row.x[id] == MINUS_INFINITY ? MINUS_INFINITY : s;
  }
  if (least > 0.0f)
    for (int64_t id = 0; id < row.vocab; ++id)
      score[id] = relative_of(row, id) >= least ? score[id] : MINUS_INFINITY;
  return first_equal(score, row.vocab, maximum(score, row.vocab));
}

// argmax of z + noise over the ids of a list.
static int64_t draw_listed(const Scaled& row, const float* noise, float least, const List& list) {
  int64_t found = 0;
  float best = MINUS_INFINITY;
  for (int64_t i = 0; i < list.n; ++i) {
    const int64_t id = list.id[i];
    const float s = z_of(row, id) + noise[id];
    const bool kept = row.x[id] != MINUS_INFINITY && relative_of(row, id) >= least;
    if (!kept || !(s > best)) continue;
    best = s;
    found = id;
  }
  return found;
}

static int64_t choose(const float* logits, const float* noise, int64_t vocab, const int64_t* banned,
                      int64_t banned_count, const RowParams& params, const RowScratch& scratch,
                      bool* finite) {
  *finite = all_finite(logits, vocab);
  if (!*finite) return 0;
  const float* x = without_banned(logits, vocab, banned, banned_count, scratch.masked);
  const float max = maximum(x, vocab);
  if (noise == nullptr || !(params.temperature > 0.0f) || max == MINUS_INFINITY)
    return first_equal(x, vocab, max);
  const Scaled row = {x, vocab, max, params.temperature};
  if (!params.filtered) return draw(row, noise, 0.0f, scratch.score);
  const float least = params.min_p < 1.0f ? params.min_p : 1.0f;
  List list = {0, scratch.id, scratch.key, scratch.weight};
  if (list_kept(row, params, scratch.highest, list)) return draw_listed(row, noise, least, list);
  return draw(row, noise, least, scratch.score);
}

static Best highest(const float* logits, int64_t n, bool* finite) {
  *finite = all_finite(logits, n);
  const float max = maximum(logits, n);
  return {max, first_equal(logits, n, max)};
}

static Best highest_score(const float* logits, int64_t n, float max, float temperature, const float* noise,
                          float* score) {
  const int64_t index = draw({logits, n, max, temperature}, noise, 0.0f, score);
  return {score[index], index};
}

}  // namespace ROW_ISA
}  // namespace blockpilot
