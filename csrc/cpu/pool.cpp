#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace blockpilot {
namespace {

constexpr auto SPIN = std::chrono::microseconds(50);
constexpr int64_t MAX_THREADS = 256;

thread_local bool inside = false;  // a chunk is running on this thread

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins while `waiting` holds and time is left; then yields, so that whoever is waited for can have the core.
template <typename Condition>
bool spin_while(const Condition& waiting) {
  const auto end = std::chrono::steady_clock::now() + SPIN;
  for (int i = 1; waiting(); ++i) {
    relax();
    if (i % 64 == 0 && std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}

// The job and how many of its chunks are left share one word. A thread that wakes late sees either the job it
// may help with or nothing left, so a new job may be written as soon as every chunk of the last one is
// finished.
class Pool {
 public:
  void run(int64_t threads, int64_t count, int64_t grain, ChunkFunction function, void* context) {
    const int64_t helpers = std::min(threads, MAX_THREADS) - 1;
    grow(helpers);
    helpers_.store(helpers, std::memory_order_relaxed);
    function_ = function;
    context_ = context;
    count_ = count;
    grain_ = grain;
    const int64_t chunks = (count + grain - 1) / grain;
    finished_.store(0, std::memory_order_relaxed);
    job_ = (job_ + 1) & 0x3fffffff;
    left_.store(job_ << 32 | chunks, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) wake();
    work(job_);
    const auto unfinished = [&] { return finished_.load(std::memory_order_acquire) < chunks; };
    while (!spin_while(unfinished)) std::this_thread::yield();
  }

 private:
  void work(int64_t job) {
    for (;;) {
      int64_t seen = left_.load(std::memory_order_acquire);
      do {
        if (seen >> 32 != job || (seen & 0xffffffff) == 0) return;
      } while (!left_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel));
      const int64_t begin = ((seen & 0xffffffff) - 1) * grain_;
      function_(context_, begin, std::min(begin + grain_, count_));
      finished_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  void grow(int64_t wanted) {
    while (static_cast<int64_t>(threads_.size()) < wanted) {
      const int64_t index = static_cast<int64_t>(threads_.size());
      threads_.emplace_back([this, index] { serve(index); });
      threads_.back().detach();
    }
  }

  [[noreturn]] void serve(int64_t index) {
    inside = true;
    int64_t last = 0;
    for (;;) {
      const auto idle = [&] { return left_.load(std::memory_order_seq_cst) >> 32 == last; };
      if (!spin_while(idle)) sleep_while(idle);
      last = left_.load(std::memory_order_acquire) >> 32;
      if (index < helpers_.load(std::memory_order_relaxed)) work(last);
    }
  }

  template <typename Condition>
  void sleep_while(const Condition& idle) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    ready_.wait(lock, [&] { return !idle(); });
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }

  void wake() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    ready_.notify_all();
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::atomic<int64_t> left_{0}, finished_{0}, sleeping_{0}, helpers_{0};
  ChunkFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0, grain_ = 1, job_ = 0;
};

std::mutex caller;  // one loop at a time
std::atomic<Pool*> pool{nullptr};

// A forked child has the pool but not its threads: it starts another and leaves the old one alone.
void forget_in_child() { pool = nullptr; }

}  // namespace

void run_chunks(int64_t threads, int64_t count, int64_t grain, ChunkFunction function, void* context) {
  std::unique_lock<std::mutex> lock(caller, std::defer_lock);
  if (inside || !lock.try_lock()) return function(context, 0, count);
  if (pool.load() == nullptr) {
#if defined(__linux__) || defined(__APPLE__)
    static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
    (void)registered;
#endif
    pool = new Pool;  // lives as long as the process: its threads may outlast static destruction
  }
  inside = true;
  pool.load()->run(threads, count, grain, function, context);
  inside = false;
}

}  // namespace blockpilot
