// Trees of drafts in a fused step, as `blockpilot.tree` has them op by op.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "step_state.h"

namespace blockpilot {

class StepTrees {
 public:
  // `drafted`: parent, depth [slots][widest − 1] and nodes [slots] of a `Proposal` whose ids `state.block`
  // holds; `members` have a row for each node that may be. Sets effective widths to those of the deepest
  // paths. Throws ValueError where these are no trees.
  StepTrees(const StepState& state, const Members& members, at::TensorList drafted);

  // A row for every node, checked against the cache and the rotary tables. It reads these trees, so they must
  // outlive it.
  Pass rows(const at::Tensor& cos, const at::Tensor& sin, const Cache& cache, const Shape& shape);

  // From every anchor to the child that equals the target's choice, as far as there is one: block, choice and
  // finite become those of that path.
  void follow();

  // Once they are committed, their keys, values and features take the places and rows that are now theirs.
  void gather(const Cache& cache, const Shape& shape, int64_t layers, at::Tensor& features) const;

 private:
  struct Tree {
    int64_t slot, start, cached;
    std::vector<int64_t> parent, depth;  // of every node, by column; the anchor is 0
    std::vector<int64_t> walk;           // columns of the path that was taken
  };

  void read(Tree& tree, const int64_t* parent, const int64_t* depth, int64_t nodes) const;

  const StepState& state_;
  std::vector<Tree> trees_;
  std::vector<std::vector<int64_t>> paths_;  // places of every row's ancestors, by depth
};

}  // namespace blockpilot
