// A pass of a SpecBlock drafter (arXiv 2605.07243).
#pragma once
#include <vector>

#include "decoder_pass.h"

namespace blockpilot {

struct SpecBlock {
  Decoder decoder;
  int64_t slots;
  Linear condition;  // features to hidden
  Linear fuse;       // [normed condition; normed embedding] to hidden
  const float *condition_norm, *token_norm;
  const float* queries;  // [slots][hidden], what a slot adds to that
  std::vector<Linear>
      shifts;  // [row; the row of the slot before] to hidden, before every layer but the first
};

// A plan of `decoder_plan`'s words, then those that `specblock_plan` adds.
SpecBlock read_specblock(at::TensorList weights, const at::Tensor& plan, double eps);

// Where a block lies, by its first slot.
struct Place {
  int64_t slot;    // of the cache
  int64_t begin;   // as attention counts
  int64_t at;      // in the cache: `begin`, but in a tree
  int64_t turn;    // row of the rotary tables
  int64_t extent;  // places of its slot that hold keys once this pass has written
};

// Blocks of one pass, each of as many rows as it has slots.
class Blocks {
 public:
  Blocks(const Pass& empty, const Cache& cache, int64_t covered)
      : pass(empty), cache_(cache), covered_(covered) {}

  // A block of `rows` slots that goes on from the id `said`, checked against the cache and the rotary tables.
  void add(const Place& place, int64_t said, int64_t rows);

  int64_t count() const { return static_cast<int64_t>(ids.size()); }
  int64_t rows() const { return static_cast<int64_t>(pass.rows.size()); }
  int64_t end(int64_t block) const {
    return block + 1 < count() ? first[static_cast<std::size_t>(block + 1)] : rows();
  }

  Pass pass;
  std::vector<int64_t> ids, first;  // by block: the id said, its first row

 private:
  const Cache& cache_;
  const int64_t covered_;
  std::vector<std::vector<int64_t>> paths_;  // of those in trees, where their rows lie
};

// Features [blocks][condition.columns] → conditions [blocks][hidden].
void make_conditions(const ModelKernels& k, const SpecBlock& b, const float* features, int64_t blocks,
                     int64_t threads, float* conditions);

// Every layer, whose keys and values are written of all rows; the hidden states of the rows `asked`, before
// the final norm, go to x [asked][hidden]. conditions [blocks][hidden].
void run_blocks(const ModelKernels& k, const SpecBlock& b, const Cache& cache, Blocks& blocks,
                const float* conditions, const std::vector<int64_t>& asked, float* x);

}  // namespace blockpilot
