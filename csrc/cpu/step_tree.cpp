#include "step_tree.h"

#include <algorithm>

#include "checks.h"
#include "move_places.h"

namespace blockpilot {

StepTrees::StepTrees(const StepState& state, const Members& members, at::TensorList drafted) : state_(state) {
  TORCH_CHECK_VALUE(drafted.size() == 3, "tree: expected parent, depth and nodes, got ", drafted.size(),
                    " tensors");
  const int64_t columns = state.widest - 1;
  for (int i = 0; i < 2; ++i) check_tensor("tree", drafted[i], at::kLong, {state.slots, columns});
  check_tensor("tree", drafted[2], at::kLong, {state.slots});
  const at::Tensor parent = drafted[0].contiguous(), depth = drafted[1].contiguous();
  const at::Tensor nodes = drafted[2].contiguous();
  for (std::size_t i = 0; i < members.slots.size(); ++i) {
    const int64_t r = members.slots[i];
    const int64_t room = state.capacity - state.cached(r);
    const int64_t count = state.done[r] ? 0 : std::min(nodes.const_data_ptr<int64_t>()[r], room);
    TORCH_CHECK_VALUE(state.done[r] || (1 <= count && count <= members.widths[i]), "tree: expected 1 … ",
                      members.widths[i], " nodes, got ", count);
    trees_.push_back({r, members.starts[i], state.cached(r), {}, {}, {}});
    read(trees_.back(), parent.const_data_ptr<int64_t>() + r * columns,
         depth.const_data_ptr<int64_t>() + r * columns, count);
  }
}

void StepTrees::read(Tree& tree, const int64_t* parent, const int64_t* depth, int64_t nodes) const {
  int64_t deepest = 0;
  for (int64_t c = 0; c < nodes; ++c) {
    const int64_t above = c ? parent[c - 1] + 1 : 0, down = c ? depth[c - 1] : 0;
    TORCH_CHECK_VALUE(c == 0 || (0 <= above && above < c), "tree: expected parents before node ", c, ", got ",
                      above);
    TORCH_CHECK_VALUE(c == 0 || down == tree.depth[static_cast<std::size_t>(above)] + 1,
                      "tree: expected node ", c, " one below its parent, got depth ", down);
    tree.parent.push_back(above);
    tree.depth.push_back(down);
    deepest = std::max(deepest, down);
  }
  state_.effective[tree.slot] = nodes ? deepest + 1 : 0;
}

Pass StepTrees::rows(const at::Tensor& cos, const at::Tensor& sin, const Cache& cache, const Shape& shape) {
  const int64_t covered = check_rope(cos, sin, shape);
  TORCH_CHECK_VALUE(state_.slots <= cache.slots, "state: expected at most ", cache.slots, " slots, got ",
                    state_.slots);
  Pass pass = empty_pass(cos, sin);
  for (const Tree& tree : trees_) {
    const int64_t nodes = static_cast<int64_t>(tree.depth.size()), end = tree.cached + nodes;
    TORCH_CHECK_VALUE(nodes == 0 || end <= std::min(cache.capacity, covered), "nodes: expected at most ",
                      std::min(cache.capacity, covered), " positions, got ", end);
    for (int64_t c = 0; c < nodes; ++c) {
      const int64_t depth = tree.depth[static_cast<std::size_t>(c)];
      std::vector<int64_t> places(static_cast<std::size_t>(depth) + 1);
      for (int64_t d = depth, at = c; d >= 0; at = tree.parent[static_cast<std::size_t>(at)], --d)
        places[static_cast<std::size_t>(d)] = tree.cached + at;
      paths_.push_back(std::move(places));  // its numbers stay where they are when `paths_` grows
      pass.rows.push_back({tree.start + c, tree.slot, tree.cached + depth, end, tree.cached + c});
      read_path(paths_.back().data(), depth + 1, pass.rows.back());
    }
  }
  return pass;
}

void StepTrees::follow() {
  std::vector<int64_t> ids(static_cast<std::size_t>(state_.widest)), choices(ids);
  std::vector<bool> finite(ids.size());
  for (Tree& tree : trees_) {
    if (tree.depth.empty()) continue;
    const int64_t first = tree.slot * state_.widest;
    int64_t *block = state_.block + first, *choice = state_.choice + first;
    bool* fine = state_.finite + first;
    tree.walk = {0};
    for (std::size_t c = 1; c < tree.depth.size(); ++c) {
      const int64_t at = tree.walk.back();
      if (tree.parent[c] == at && fine[at] && block[c] == choice[at])
        tree.walk.push_back(static_cast<int64_t>(c));
    }
    for (std::size_t c = 0; c < ids.size(); ++c) {
      const bool walked = c < tree.walk.size();
      const int64_t from = walked ? tree.walk[c] : 0;
      ids[c] = walked ? block[from] : -1;
      choices[c] = choice[from];
      finite[c] = fine[from];
    }
    std::copy(ids.begin(), ids.end(), block);
    std::copy(choices.begin(), choices.end(), choice);
    std::copy(finite.begin(), finite.end(), fine);
  }
}

void StepTrees::gather(const Cache& cache, const Shape& shape, int64_t layers, at::Tensor& features) const {
  const int64_t item = cache.bf16 ? 2 : 4, wide = features.size(1);
  const Places places = {static_cast<char*>(cache.keys),
                         static_cast<char*>(cache.values),
                         layers,
                         cache.slots,
                         shape.kv_heads,
                         cache.capacity,
                         shape.head_dim,
                         item,
                         cache.padded_dim * item};
  float* row = features.mutable_data_ptr<float>();
  for (const Tree& tree : trees_)
    for (int64_t d = 1; d < std::min<int64_t>(state_.count[tree.slot], tree.walk.size()); ++d) {
      const int64_t from = tree.walk[static_cast<std::size_t>(d)];
      places.copy(tree.slot, tree.cached + from, tree.cached + d);
      if (from != d) std::copy_n(row + (tree.start + from) * wide, wide, row + (tree.start + d) * wide);
    }
}

}  // namespace blockpilot
