// Loops whose chunks throw: the exception must arrive when every chunk is done, and the pool must go on working.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>

#include "pool.h"

using blockpilot::parallel_chunks;

// Chunks that ran after the loop over them had returned or thrown.
static int late(int64_t bad) {
  std::atomic<bool> over{false};
  std::atomic<int> found{0}, ran{0};
  bool thrown = false;
  try {
    parallel_chunks(3, 12, 1, [&](int64_t begin, int64_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (over) ++found;
      ++ran;
      if (begin == bad || bad < 0) throw std::runtime_error("chunk");
    });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  over = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return found + (thrown ? 0 : 100) + (ran == 12 ? 0 : 1000);
}

static int threads_used() {
  std::atomic<int> others{0};
  const auto self = std::this_thread::get_id();
  parallel_chunks(3, 12, 1, [&](int64_t, int64_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (std::this_thread::get_id() != self) ++others;
  });
  return others;
}

int main() {
  int wrong = 0;
  for (int64_t bad : {-1, 0, 3, 7, 11}) wrong += late(bad);
  const int others = threads_used();
  std::printf("late %d, chunks on other threads %d\n", wrong, others);
  return wrong == 0 && others > 0 ? 0 : 1;
}
