// The token each row chooses, without its logits leaving the head.
#pragma once
#include <vector>

#include "isa.h"
#include "model.h"

namespace blockpilot {

// How one row chooses; see `choose` in rows.h.
struct Draw {
  const float* noise;  // by id, null: the row is greedy
  RowParams params = {0, 1, 0, 0, false};
  const int64_t* banned = nullptr;  // ids; those that are no column of the head are ignored
  int64_t banned_count = 0;

  bool greedy() const { return noise == nullptr || !(params.temperature > 0.0f); }
  bool whole() const { return params.filtered || banned_count > 0; }  // needs the row in one piece
};

// What the head multiplies and what becomes of its products.
struct Head {
  const Linear& matrix;
  const int64_t* ids;  // of each column, rising; null: column and id are the same
  float scale;         // of logits
};

struct Choice {
  int64_t id;
  bool finite;
};

// One choice per row of `input`: its head product, scaled, then the draw.
std::vector<Choice> choose_head(const Isa& isa, const Head& head, Rounding rounding, const Input& input,
                                const std::vector<Draw>& draws, int64_t threads);

}  // namespace blockpilot
