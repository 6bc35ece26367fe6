#include "head_choice.h"

#include <algorithm>

#include "pool.h"
#include "scratch.h"

namespace blockpilot {
namespace {

constexpr int64_t COLUMNS_A_PART = 4096;  // of a draw: a part's logits, noise and scores fit the first cache

// Best of the parts of a row.
struct Part {
  Best best = {-__builtin_inff(), 0};
  bool finite = true;
};

// Parts of every row, in the order of their columns.
class Parts {
 public:
  Parts(int64_t rows, int64_t count) : count_(count), parts_(static_cast<std::size_t>(rows * count)) {}

  Part& at(int64_t row, int64_t part) { return parts_[static_cast<std::size_t>(row * count_ + part)]; }

  // The lowest index among equals, as parts come in order.
  Part whole(int64_t row) const {
    Part found;
    found.finite = true;
    for (int64_t i = 0; i < count_; ++i) {
      const Part& part = parts_[static_cast<std::size_t>(row * count_ + i)];
      found.finite = found.finite && part.finite;
      if (part.best.value > found.best.value) found.best = part.best;
    }
    return found;
  }

 private:
  int64_t count_;
  std::vector<Part> parts_;
};

class HeadChoice {
 public:
  HeadChoice(const Isa& isa, const Head& head, const std::vector<Draw>& draws, int64_t threads)
      : isa_(isa), head_(head), draws_(draws), threads_(threads), columns_(head.matrix.rows) {}

  std::vector<Choice> run(Rounding rounding, const Input& input) {
    const int64_t rows = input.rows;
    logits_ = arena().take<float>(rows * columns_);
    const int64_t grain = product_grain(head_.matrix, threads_);
    Parts parts(rows, (head_.matrix.units() + grain - 1) / grain);
    std::vector<float*> to;
    for (int64_t i = 0; i < rows; ++i) to.push_back(row(i));
    multiply(*isa_.model, head_.matrix, rounding, input, to.data(), Epilogue::STORE, threads_,
             [&](int64_t begin, int64_t end) {
               const int64_t first = begin * UNIT, last = std::min(end * UNIT, columns_);
               for (int64_t i = 0; i < rows; ++i) finish(i, first, last, parts.at(i, begin / grain));
             });
    std::vector<Choice> choices(static_cast<std::size_t>(rows));
    std::vector<int64_t> drawn, whole;
    for (int64_t i = 0; i < rows; ++i) {
      const Part found = parts.whole(i);
      maxima_.push_back(found.best.value);
      choices[static_cast<std::size_t>(i)] = {found.finite ? found.best.index : 0, found.finite};
      if (!found.finite) continue;
      if (draw(i).whole())
        whole.push_back(i);
      else if (!draw(i).greedy())
        drawn.push_back(i);
    }
    draw_parts(drawn, choices);
    draw_whole(whole, choices);
    if (head_.ids)
      for (Choice& choice : choices) choice.id = head_.ids[choice.id];
    return choices;
  }

 private:
  float* row(int64_t i) const { return logits_ + i * columns_; }
  const Draw& draw(int64_t i) const { return draws_[static_cast<std::size_t>(i)]; }

  // Logits [first, last) of a row as the draw sees them.
  void finish(int64_t i, int64_t first, int64_t last, Part& part) const {
    float* x = row(i);
    if (head_.scale != 1.0f)
      for (int64_t c = first; c < last; ++c) x[c] *= head_.scale;
    part.best = isa_.rows->highest(x + first, last - first, &part.finite);
    part.best.index += first;
  }

  // Noise of the columns [first, first + n): in place, or gathered into `room`.
  const float* noise(int64_t i, int64_t first, int64_t n, float* room) const {
    const float* by_id = draw(i).noise;
    if (!head_.ids) return by_id + first;
    for (int64_t c = 0; c < n; ++c) room[c] = by_id[head_.ids[first + c]];
    return room;
  }

  void draw_parts(const std::vector<int64_t>& rows, std::vector<Choice>& choices) const {
    const int64_t count = (columns_ + COLUMNS_A_PART - 1) / COLUMNS_A_PART;
    const int64_t total = static_cast<int64_t>(rows.size()) * count;
    Parts parts(static_cast<int64_t>(rows.size()), count);
    parallel_chunks(threads_, total, 1, [&](int64_t begin, int64_t end) {
      float room[COLUMNS_A_PART], score[COLUMNS_A_PART];
      for (int64_t j = begin; j < end; ++j) {
        const int64_t i = rows[static_cast<std::size_t>(j / count)], first = j % count * COLUMNS_A_PART;
        const int64_t n = std::min(COLUMNS_A_PART, columns_ - first);
        Best& best = parts.at(j / count, j % count).best;
        best = isa_.rows->highest_score(row(i) + first, n, maxima_[static_cast<std::size_t>(i)],
                                        draw(i).params.temperature, noise(i, first, n, room), score);
        best.index += first;
      }
    });
    for (std::size_t r = 0; r < rows.size(); ++r)
      choices[static_cast<std::size_t>(rows[r])].id = parts.whole(static_cast<int64_t>(r)).best.index;
  }

  void draw_whole(const std::vector<int64_t>& rows, std::vector<Choice>& choices) const {
    parallel_chunks(threads_, static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
      const Scratch scratch(columns_, true);
      std::vector<float> room(head_.ids ? static_cast<std::size_t>(columns_) : 0);
      for (int64_t j = begin; j < end; ++j) {
        const int64_t i = rows[static_cast<std::size_t>(j)];
        const Draw& how = draw(i);
        std::vector<int64_t> banned(how.banned, how.banned + how.banned_count);
        for (int64_t& id : banned) id = column(id);
        const float* given = how.noise ? noise(i, 0, columns_, room.data()) : nullptr;
        Choice& choice = choices[static_cast<std::size_t>(i)];
        choice.id = isa_.rows->choose(row(i), given, columns_, banned.data(), how.banned_count, how.params,
                                      scratch.rows(), &choice.finite);
      }
    });
  }

  // Column of an id, -1 if it has none.
  int64_t column(int64_t id) const {
    if (!head_.ids) return id;
    const int64_t* end = head_.ids + columns_;
    const int64_t* found = std::lower_bound(head_.ids, end, id);
    return found != end && *found == id ? found - head_.ids : -1;
  }

  const Isa& isa_;
  const Head& head_;
  const std::vector<Draw>& draws_;
  const int64_t threads_, columns_;
  float* logits_ = nullptr;
  std::vector<float> maxima_;
};

}  // namespace

std::vector<Choice> choose_head(const Isa& isa, const Head& head, Rounding rounding, const Input& input,
                                const std::vector<Draw>& draws, int64_t threads) {
  if (input.rows == 0) return {};
  const Arena::Scope scope(arena());
  return HeadChoice(isa, head, draws, threads).run(rounding, input);
}

}  // namespace blockpilot
