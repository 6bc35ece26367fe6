// Keys and values that change their places in the packed decoder's cache.
#pragma once
#include <cstdint>

namespace blockpilot {

// Keys [layer][slot][head][chunk of 16 positions][dim][16] and values [layer][slot][head][position][wide],
// `item` bytes each key and value, `wide` bytes a position's values.
struct Places {
  char *keys, *values;
  int64_t layers, slots, heads, capacity, dim, item, wide;

  // Every layer's key and value of one place of a slot, to another.
  void copy(int64_t slot, int64_t from, int64_t to) const;
};

}  // namespace blockpilot
