// Working memory of a thread that chooses ids.
#pragma once
#include <memory>

#include "rows.h"

namespace blockpilot {

template <typename T>
inline std::unique_ptr<T[]> uninitialised(int64_t n) {
  return std::unique_ptr<T[]>(new T[static_cast<size_t>(n)]);
}

// Memory behind a RowScratch.
struct Scratch {
  Scratch(int64_t vocab, bool filtered)
      : masked(uninitialised<float>(vocab)),
        score(uninitialised<float>(vocab)),
        id(uninitialised<int32_t>(filtered ? vocab : 0)),
        key(uninitialised<uint32_t>(filtered ? vocab : 0)),
        weight(uninitialised<int64_t>(filtered ? vocab : 0)),
        highest(uninitialised<uint32_t>(filtered ? vocab : 0)) {}

  RowScratch rows() const {
    return {masked.get(), score.get(), id.get(), key.get(), weight.get(), highest.get()};
  }

  std::unique_ptr<float[]> masked, score;
  std::unique_ptr<int32_t[]> id;
  std::unique_ptr<uint32_t[]> key;
  std::unique_ptr<int64_t[]> weight;
  std::unique_ptr<uint32_t[]> highest;
};

}  // namespace blockpilot
