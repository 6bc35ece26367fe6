// Row kernels of the CPU ops, one table per instruction set. No torch header may be included here: the units
// behind these tables are compiled for several instruction sets, and an inline function shared with the rest
// of the library would be merged by the linker and run on machines that lack its instructions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace blockpilot {

struct RowParams {
  float temperature;
  float top_p;
  float min_p;
  int64_t top_k;
  bool filtered;
};

// Working memory of one thread, uninitialised: [vocab] each, `highest` [blocks of ids]. The part from `id` on
// is used by filtered rows only.
struct RowScratch {
  float* masked;
  float* score;
  int32_t* id;
  uint32_t* key;
  int64_t* weight;
  uint32_t* highest;
};

// The highest value of a part of a row, and the lowest index in the part that holds it.
struct Best {
  float value;
  int64_t index;
};

struct RowKernels {
  // Raw Philox integers, and the Gumbel noise made of them, of ids first … first + n − 1; first is a multiple
  // of 4.
  void (*philox)(int64_t seed, int64_t position, int64_t first, int64_t n, int64_t* out);
  void (*gumbel_noise)(int64_t seed, int64_t position, int64_t first, int64_t n, float* out);
  void (*gumbel_from_integers)(const int64_t* integers, int64_t n, float* out);
  // The chosen id of one row, 0 if the row is not finite. noise is null for a greedy row.
  int64_t (*choose)(const float* logits, const float* noise, int64_t vocab, const int64_t* banned,
                    int64_t banned_count, const RowParams& params, const RowScratch& scratch, bool* finite);
  // Parts of `choose` for a row that neither filters nor bans: the highest logit; the highest score, given
  // the highest logit of the whole row.
  Best (*highest)(const float* logits, int64_t n, bool* finite);
  Best (*highest_score)(const float* logits, int64_t n, float max, float temperature, const float* noise,
                        float* score);
};

extern const RowKernels rows_default;
#if defined(BLOCKPILOT_X86)
extern const RowKernels rows_avx2;
extern const RowKernels rows_avx512;
#endif

}  // namespace blockpilot
