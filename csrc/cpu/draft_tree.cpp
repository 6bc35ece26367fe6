#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"

namespace blockpilot {
namespace {

struct Node {
  float total;
  int64_t depth, tried;  // candidates below it that were taken
};

// The node whose next candidate makes the best path, the earliest of equals; −1 if there is none.
template <typename Scores>
int64_t best_parent(const std::vector<Node>& nodes, const Scores& score, int64_t deepest, float* best) {
  int64_t at = -1;
  *best = -INFINITY;
  for (std::size_t m = 0; m < nodes.size(); ++m) {
    const Node& node = nodes[m];
    if (node.depth >= deepest || node.tried >= score.size(1)) continue;
    const float total = node.total + score[node.depth][node.tried];
    if (!(total > *best)) continue;
    *best = total;
    at = static_cast<int64_t>(m);
  }
  return at;
}

// How many of the nodes, found best first, make the most tokens per second; the fewest of equals.
int64_t worthwhile(const std::vector<Node>& nodes, const float* cost) {
  float expected = 1.0f, best = 1.0f / cost[0];
  int64_t count = 1;
  for (std::size_t n = 1; n < nodes.size(); ++n) {
    expected += std::exp(nodes[n].total);
    const float pace = expected / cost[n];
    if (!(pace > best)) continue;
    best = pace;
    count = static_cast<int64_t>(n) + 1;
  }
  return count;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> draft_tree(const at::Tensor& score,
                                                                      const at::Tensor& deepest,
                                                                      const at::Tensor& budget, int64_t most,
                                                                      const std::optional<at::Tensor>& cost) {
  TORCH_CHECK_VALUE(score.dim() == 3, "score: expected 3 dimensions, got ", score.dim());
  TORCH_CHECK_VALUE(most >= 1, "nodes: expected at least 1, got ", most);
  const int64_t slots = score.size(0);
  check_tensor("score", score, at::kFloat, {slots, score.size(1), score.size(2)});
  check_tensor("deepest", deepest, at::kLong, {slots});
  check_tensor("budget", budget, at::kLong, {slots});
  if (cost) check_tensor("cost", *cost, at::kFloat, {most});
  const at::Tensor costs = cost ? cost->contiguous() : at::Tensor();
  at::Tensor candidate = at::zeros({slots, most - 1}, deepest.options()), depth = candidate.clone();
  at::Tensor parent = at::full({slots, most - 1}, -1, deepest.options());
  at::Tensor count = at::zeros({slots}, deepest.options());
  const auto score_ = score.accessor<float, 3>();
  const auto deepest_ = deepest.accessor<int64_t, 1>(), budget_ = budget.accessor<int64_t, 1>();
  auto candidate_ = candidate.accessor<int64_t, 2>(), parent_ = parent.accessor<int64_t, 2>();
  auto depth_ = depth.accessor<int64_t, 2>();
  auto count_ = count.accessor<int64_t, 1>();
  std::vector<Node> nodes;
  for (int64_t r = 0; r < slots; ++r) {
    const int64_t limit = std::min(budget_[r], most), depths = std::min(deepest_[r], score.size(1));
    if (limit <= 0) continue;
    nodes.assign(1, {0.0f, 0, 0});
    for (int64_t n = 0; n + 1 < limit; ++n) {
      float total;
      const int64_t at = best_parent(nodes, score_[r], depths, &total);
      if (at < 0) break;
      Node& above = nodes[static_cast<std::size_t>(at)];
      candidate_[r][n] = above.tried++;
      parent_[r][n] = at - 1;
      depth_[r][n] = above.depth + 1;
      nodes.push_back({total, above.depth + 1, 0});
    }
    const int64_t grown = static_cast<int64_t>(nodes.size());
    count_[r] = cost ? worthwhile(nodes, costs.const_data_ptr<float>()) : grown;
    for (int64_t n = count_[r]; n < grown; ++n)
      candidate_[r][n - 1] = depth_[r][n - 1] = 0, parent_[r][n - 1] = -1;
  }
  return {candidate, parent, depth, count};
}

// Columns of the largest scores of a row, falling, the lower one first among equals.
void largest_of(const float* score, int64_t columns, int64_t count, std::vector<float>& kept, int64_t* to) {
  int64_t n = 0;
  for (int64_t c = 0; c < columns; ++c) {
    const float s = score[c];
    if (n == count && !(s > kept[static_cast<std::size_t>(n - 1)])) continue;
    int64_t at = n < count ? n++ : n - 1;
    for (; at > 0 && s > kept[static_cast<std::size_t>(at - 1)]; --at) {
      kept[static_cast<std::size_t>(at)] = kept[static_cast<std::size_t>(at - 1)];
      to[at] = to[at - 1];
    }
    kept[static_cast<std::size_t>(at)] = s;
    to[at] = c;
  }
}

at::Tensor largest(const at::Tensor& scores, int64_t count) {
  TORCH_CHECK_VALUE(scores.dim() == 2, "scores: expected 2 dimensions, got ", scores.dim());
  const int64_t rows = scores.size(0), columns = scores.size(1);
  check_tensor("scores", scores, at::kFloat, {rows, columns});
  TORCH_CHECK_VALUE(1 <= count && count <= columns, "count: expected 1 … ", columns, ", got ", count);
  const at::Tensor input = scores.contiguous();
  at::Tensor found = at::zeros({rows, count}, scores.options().dtype(at::kLong));
  std::vector<float> kept(static_cast<std::size_t>(count));
  for (int64_t r = 0; r < rows; ++r)
    largest_of(input.const_data_ptr<float>() + r * columns, columns, count, kept,
               found.mutable_data_ptr<int64_t>() + r * count);
  return found;
}

}  // namespace
}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) {
  m.impl("draft_tree", &blockpilot::draft_tree);
  m.impl("largest", &blockpilot::largest);
}
