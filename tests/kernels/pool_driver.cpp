// Loops whose chunks throw: the exception must arrive when every chunk is done, and the pool must go on working. Loops
// beside memory that is read ahead: every chunk runs once.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

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

// Loops that begin while threads still ask for memory, every second time for some that is not there.
static int beside_reads() {
  const std::vector<char> memory(1 << 20);
  int wrong = 0;
  for (int i = 0; i < 300; ++i) {
    blockpilot::note_read(i % 2 == 0 ? memory.data() : reinterpret_cast<const char*>(64), 1 << 20);
    blockpilot::read_again();
    if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::atomic<int64_t> sum{0};
    parallel_chunks(3, 12, 1, [&](int64_t begin, int64_t) { sum += begin + 1; });
    if (sum != 78) ++wrong;
  }
  return wrong;
}

int main() {
  int wrong = beside_reads();
  for (int64_t bad : {-1, 0, 3, 7, 11}) wrong += late(bad);
  const int others = threads_used();
  std::printf("wrong %d, chunks on other threads %d\n", wrong, others);
  return wrong == 0 && others > 0 ? 0 : 1;
}
