// Top-k and top-p without a sort. Both keep a prefix of the order "highest logit first, lowest id first among
// equals". Weights are integers, so that no sum depends on an order, and only ids that can be in the prefix
// are looked at.
namespace blockpilot {
namespace ROW_ISA {

constexpr int64_t BLOCK = 64;
constexpr float MINUS_INFINITY = -__builtin_inff();
constexpr float LOWEST = -0x1.fffffep127f;

// One row at its temperature: x holds −inf at banned ids.
struct Scaled {
  const float* x;
  int64_t vocab;
  float max;
  float temperature;
};

// (x − max) / temperature, never below the lowest finite float.
static inline float z_of(const Scaled& row, int64_t id) {
  const float z = (row.x[id] - row.max) / row.temperature;
  return z < LOWEST ? LOWEST : z;
}

// Probability relative to the most probable id's.
static inline float relative_of(const Scaled& row, int64_t id) { return exp_not_positive(z_of(row, id)); }

// Unsigned integer in the order of the floats; −0 and 0 are one value.
static inline uint32_t order_key(float x) {
  const uint32_t bits = bits_of(x + 0.0f);
  return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}

// Mass in units of 2^-40 of the most probable id's, summed over the row. Its two halves of 20 bits are summed
// apart because only 32-bit conversions exist on every instruction set.
static int64_t total_mass(const Scaled& row) {
  int64_t total = 0;
  for (int64_t start = 0; start < row.vocab; start += 1024) {
    const int64_t end = row.vocab - start < 1024 ? row.vocab : start + 1024;
    int32_t high = 0, low = 0;  // at most 1024 · 2^20
    for (int64_t id = start; id < end; ++id) {
      const float scaled = relative_of(row, id) * 0x1p20f;
      const int32_t whole = static_cast<int32_t>(scaled);
      high += whole;
      low += static_cast<int32_t>((scaled - static_cast<float>(whole)) * 0x1p20f);
    }
    total += (static_cast<int64_t>(high) << 20) + low;
  }
  return total;
}

// Radix select: the highest key at which the weight (1 each if null), summed from the highest key down,
// reaches `limit`. False if all of it stays below. `above` becomes the weight of the higher keys.
static bool find_key(const uint32_t* key, const int64_t* weight, int64_t n, int64_t limit, uint32_t* found,
                     int64_t* above) {
  constexpr int WIDTH[3] = {11, 11, 10};
  int64_t sum[1 << 11];
  *above = 0;
  *found = 0;
  int shift = 32;
  for (int level = 0; level < 3; ++level) {
    const int outer = shift;
    shift -= WIDTH[level];
    const int digits = 1 << WIDTH[level];
    for (int d = 0; d < digits; ++d) sum[d] = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (static_cast<uint64_t>(key[i]) >> outer != *found) continue;
      sum[(key[i] >> shift) & static_cast<uint32_t>(digits - 1)] += weight ? weight[i] : 1;
    }
    int digit = digits - 1;
    while (digit >= 0 && *above + sum[digit] < limit) *above += sum[digit--];
    if (digit < 0) return false;
    *found = (*found << WIDTH[level]) | static_cast<uint32_t>(digit);
  }
  return true;
}

// Some ids of a row, ascending.
struct List {
  int64_t n;
  int32_t* id;
  uint32_t* key;
  int64_t* weight;
};

// Keeps the ids that have less than `limit` of weight before them in the order.
static void keep_prefix(List& list, int64_t limit) {
  uint32_t last;
  int64_t before;
  if (!find_key(list.key, list.weight, list.n, limit, &last, &before)) return;
  int64_t n = 0;
  for (int64_t i = 0; i < list.n; ++i) {
    const bool tie = list.key[i] == last;
    const bool kept = list.key[i] > last || (tie && before < limit);
    if (tie) before += list.weight[i];
    list.id[n] = list.id[i];
    list.key[n] = list.key[i];
    list.weight[n] = list.weight[i];
    n += kept;
  }
  list.n = n;
}

// Highest key of every block of ids.
static void block_keys(const Scaled& row, uint32_t* highest) {
  for (int64_t start = 0; start < row.vocab; start += BLOCK) {
    const int64_t end = row.vocab - start < BLOCK ? row.vocab : start + BLOCK;
    uint32_t best = 0;
    for (int64_t id = start; id < end; ++id) {
      const uint32_t key = order_key(row.x[id]);
      best = key > best ? key : best;
    }
    highest[start / BLOCK] = best;
  }
}

// Lists every id whose key is at least that of the `want`-th highest block: `want` ids or more, the highest
// of the row. True if that is the whole row.
static bool list_highest(const Scaled& row, const uint32_t* highest, int64_t want, List& list) {
  const int64_t blocks = (row.vocab + BLOCK - 1) / BLOCK;
  uint32_t least = 0;
  int64_t above;
  if (want < blocks) find_key(highest, nullptr, blocks, want, &least, &above);
  list.n = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    if (highest[block] < least) continue;
    const int64_t end = row.vocab - block * BLOCK < BLOCK ? row.vocab : (block + 1) * BLOCK;
    for (int64_t id = block * BLOCK; id < end; ++id) {
      const uint32_t key = order_key(row.x[id]);
      list.id[list.n] = static_cast<int32_t>(id);
      list.key[list.n] = key;
      list.n += key >= least;
    }
  }
  return least == 0;
}

// Sets every weight to the id's mass; returns their sum.
static int64_t weigh(const Scaled& row, List& list) {
  int64_t total = 0;
  for (int64_t i = 0; i < list.n; ++i) {
    list.weight[i] = static_cast<int64_t>(relative_of(row, list.id[i]) * 0x1p40f);
    total += list.weight[i];
  }
  return total;
}

static int64_t mass_limit(float top_p, int64_t total) {
  const float share = top_p * static_cast<float>(total);
  return share > 1.0f ? static_cast<int64_t>(share) : 1;  // the first id always stays
}

// Lists what top_k and then top_p of the remaining mass keep. False: neither is on, nothing is listed.
static bool list_kept(const Scaled& row, const RowParams& params, uint32_t* highest, List& list) {
  const bool by_count = params.top_k > 0 && params.top_k < row.vocab;
  const bool by_mass = params.top_p < 1.0f;
  if (!by_count && !by_mass) return false;
  block_keys(row, highest);
  if (by_count) {
    list_highest(row, highest, params.top_k, list);
    for (int64_t i = 0; i < list.n; ++i) list.weight[i] = 1;
    keep_prefix(list, params.top_k);
    if (by_mass) keep_prefix(list, mass_limit(params.top_p, weigh(row, list)));
    return true;
  }
  const int64_t limit = mass_limit(params.top_p, total_mass(row));
  for (int64_t want = 64;; want *= 8) {
    const bool whole = list_highest(row, highest, want, list);
    if (weigh(row, list) >= limit || whole) break;
  }
  keep_prefix(list, limit);
  return true;
}

}  // namespace ROW_ISA
}  // namespace blockpilot
