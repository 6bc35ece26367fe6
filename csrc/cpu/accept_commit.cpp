#include "accept_commit.h"

#include <torch/library.h>

#include <algorithm>

#include "checks.h"

namespace blockpilot {
namespace {

enum Finish : int64_t { FINISH_NONE = 0, FINISH_STOP = 1, FINISH_LENGTH = 2, FINISH_ERROR = 3 };

using Row = at::TensorAccessor<int64_t, 1>;
using Flags = at::TensorAccessor<bool, 1>;

// Drafts in a row that equal the target's choice, cut at a row that is not finite.
int64_t accepted_prefix(const Row& block, const Row& choice, const Flags& finite, int64_t width) {
  int64_t a = 0;
  while (a + 1 < width && finite[a] && block[a + 1] == choice[a]) ++a;
  return a;
}

bool contains(const Row& ids, int64_t id) {
  for (int64_t s = 0; s < ids.size(0); ++s)
    if (ids[s] == id) return true;
  return false;
}

struct Walk {
  int64_t count;
  int64_t finish;
};

// Commits candidates in order until an event ends the walk.
Walk commit(const Row& choice, const Flags& finite, int64_t candidates, const Row& stop_ids, int64_t length,
            int64_t limit, Row tokens) {
  if (length >= limit) return {0, FINISH_LENGTH};
  TORCH_CHECK_VALUE(length >= 0, "length: expected 0 or more, got ", length);
  int64_t count = 0;
  while (count < candidates) {
    if (!finite[count]) return {count, FINISH_ERROR};
    const int64_t id = choice[count];
    tokens[length + count] = id;
    ++count;
    if (contains(stop_ids, id)) return {count, FINISH_STOP};
    if (length + count == limit) return {count, FINISH_LENGTH};
  }
  return {count, FINISH_NONE};
}

}  // namespace

void accept_commit(const at::Tensor& block, const at::Tensor& choice, const at::Tensor& finite,
                   const at::Tensor& width, const at::Tensor& stop_ids, const at::Tensor& limit,
                   const at::Tensor& tokens, const at::Tensor& length, const at::Tensor& done,
                   const at::Tensor& finish, const at::Tensor& accepted, const at::Tensor& count) {
  TORCH_CHECK_VALUE(block.dim() == 2 && stop_ids.dim() == 2 && tokens.dim() == 2,
                    "block, stop_ids, tokens: expected 2 dimensions, got ", block.dim(), ", ", stop_ids.dim(),
                    ", ", tokens.dim());
  const int64_t slots = block.size(0), widest = block.size(1), capacity = tokens.size(1);
  check_tensor("block", block, at::kLong, {slots, widest});
  check_tensor("choice", choice, at::kLong, {slots, widest});
  check_tensor("finite", finite, at::kBool, {slots, widest});
  check_tensor("stop_ids", stop_ids, at::kLong, {slots, stop_ids.size(1)});
  check_tensor("tokens", tokens, at::kLong, {slots, capacity});
  check_tensor("done", done, at::kBool, {slots});
  for (const at::Tensor* vector : {&width, &limit, &length, &finish, &accepted, &count})
    check_tensor("width, limit, length, finish, accepted, count", *vector, at::kLong, {slots});

  const auto block_ = block.accessor<int64_t, 2>(), choice_ = choice.accessor<int64_t, 2>();
  const auto finite_ = finite.accessor<bool, 2>();
  const auto stops_ = stop_ids.accessor<int64_t, 2>();
  const auto width_ = width.accessor<int64_t, 1>(), limit_ = limit.accessor<int64_t, 1>();
  auto tokens_ = tokens.accessor<int64_t, 2>();
  auto length_ = length.accessor<int64_t, 1>(), finish_ = finish.accessor<int64_t, 1>();
  auto accepted_ = accepted.accessor<int64_t, 1>(), count_ = count.accessor<int64_t, 1>();
  auto done_ = done.accessor<bool, 1>();
  for (int64_t r = 0; r < slots; ++r) {
    accepted_[r] = count_[r] = 0;
    if (done_[r]) continue;
    const int64_t columns = std::min(width_[r], widest);
    const int64_t prefix = accepted_prefix(block_[r], choice_[r], finite_[r], columns);
    const Walk walk = commit(choice_[r], finite_[r], std::min(prefix + 1, columns), stops_[r], length_[r],
                             std::min(limit_[r], capacity), tokens_[r]);
    accepted_[r] = std::min(prefix, walk.count);
    count_[r] = walk.count;
    length_[r] += walk.count;
    finish_[r] = walk.finish;
    done_[r] = walk.finish != FINISH_NONE;
  }
}

}  // namespace blockpilot

TORCH_LIBRARY_IMPL(blockpilot, CPU, m) { m.impl("accept_commit", &blockpilot::accept_commit); }
