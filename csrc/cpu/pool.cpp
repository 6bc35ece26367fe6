#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

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
constexpr int64_t PART = 4096;  // bytes that a waiting thread asks for before it looks for a loop again
constexpr int64_t LINE = 64;

thread_local bool inside = false;  // a chunk is running on this thread

struct Memory {
  const char* begin = nullptr;
  int64_t bytes = 0;
};
thread_local Memory noted;

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

// Chunks lie in one range per thread. A thread takes its own in order, so that what it fetches ahead is what
// it needs next, and then helps with the others. A word holds the job and how many chunks of a range are
// left: a thread that wakes late sees either the job it may help with or nothing left, so a new job may be
// written as soon as every chunk of the last one is finished.
class Pool {
 public:
  void run(int64_t threads, int64_t count, int64_t grain, ChunkFunction function, void* context) {
    const int64_t ranges = 1 + grow(std::min(threads, MAX_THREADS) - 1);
    const int64_t chunks = (count + grain - 1) / grain;
    ahead_left_.value.store(0, std::memory_order_relaxed);
    function_ = function;
    context_ = context;
    count_ = count;
    grain_ = grain;
    const int64_t before = finished_.value.load(std::memory_order_relaxed);
    const int64_t job = ((job_.load(std::memory_order_relaxed) >> 32) + 1) & 0x3fffffff;
    for (int64_t i = 0; i < ranges; ++i)
      left_[i].value.store(job << 32 | (end_of(i, ranges, chunks) - end_of(i - 1, ranges, chunks)),
                           std::memory_order_release);
    job_.store(job << 32 | ranges, std::memory_order_seq_cst);
    if (sleeping_.value.load(std::memory_order_seq_cst) > 0) wake();
    work(job, ranges, 0);
    const auto unfinished = [&] { return finished_.value.load(std::memory_order_acquire) - before < chunks; };
    while (!spin_while(unfinished)) std::this_thread::yield();
    if (failed_.exchange(false, std::memory_order_acq_rel))
      std::rethrow_exception(std::exchange(error_, nullptr));
  }

  void read_ahead(const Memory& memory) {
    ahead_.store(memory.begin, std::memory_order_relaxed);
    ahead_left_.value.store(memory.bytes, std::memory_order_relaxed);
  }

 private:
  // Alone on its cache line: threads that take from different ranges do not disturb each other.
  struct alignas(64) Word {
    std::atomic<int64_t> value{0};
  };

  static int64_t end_of(int64_t range, int64_t ranges, int64_t chunks) {
    return (range + 1) * chunks / ranges;
  }

  void work(int64_t job, int64_t ranges, int64_t own) {
    for (int64_t i = 0; i < ranges; ++i) drain(job, ranges, (own + i) % ranges);
  }

  void drain(int64_t job, int64_t ranges, int64_t range) {
    int64_t done = 0;
    for (;; ++done) {
      int64_t seen = left_[range].value.load(std::memory_order_acquire);
      do {
        if (seen >> 32 != job || (seen & 0xffffffff) == 0) {
          if (done > 0) finished_.value.fetch_add(done, std::memory_order_acq_rel);
          return;
        }
      } while (!left_[range].value.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel));
      const int64_t chunks = (count_ + grain_ - 1) / grain_;
      const int64_t begin = (end_of(range, ranges, chunks) - (seen & 0xffffffff)) * grain_;
      try {
        function_(context_, begin, std::min(begin + grain_, count_));
      } catch (...) {  // the others are still using what the caller will destroy: thrown when all are done
        const std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::current_exception();
        failed_.store(true, std::memory_order_release);
      }
    }
  }

  // How many of the wanted helpers there are: as many as the system lets start.
  int64_t grow(int64_t wanted) {
    for (; started_ < wanted; ++started_) {
      const int64_t index = started_;
      try {
        std::thread([this, index] { serve(index); }).detach();
      } catch (const std::system_error&) {
        return started_;
      }
    }
    return wanted;
  }

  [[noreturn]] void serve(int64_t index) {
    inside = true;
    int64_t last = 0;
    for (;;) {
      const auto idle = [&] { return job_.load(std::memory_order_seq_cst) >> 32 == last; };
      const auto waiting = [&] { return idle() && ahead_left_.value.load(std::memory_order_relaxed) <= 0; };
      if (!spin_while(waiting)) sleep_while(idle);
      while (idle() && fetch_part()) {
      }
      if (idle()) continue;
      const int64_t seen = job_.load(std::memory_order_acquire), ranges = seen & 0xffffffff;
      last = seen >> 32;
      if (index + 1 < ranges) work(last, ranges, index + 1);
    }
  }

  // Asks for a part of what is read next, if any is left. Nothing waits for this, and a stale address does no
  // harm: asking for memory that is not there is no access.
  bool fetch_part() {
    const int64_t left = ahead_left_.value.fetch_sub(PART, std::memory_order_relaxed);
    if (left <= 0) return false;
    const char* end = ahead_.load(std::memory_order_relaxed) + left;
    for (int64_t i = LINE; i <= std::min(PART, left); i += LINE) __builtin_prefetch(end - i, 0, 2);
    return true;
  }

  template <typename Condition>
  void sleep_while(const Condition& idle) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.value.fetch_add(1, std::memory_order_seq_cst);
    ready_.wait(lock, [&] { return !idle(); });
    sleeping_.value.fetch_sub(1, std::memory_order_relaxed);
  }

  void wake() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    ready_.notify_all();
  }

  int64_t started_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::condition_variable ready_;
  Word left_[MAX_THREADS];
  alignas(64) std::atomic<int64_t> job_{
      0};  // and how many ranges it has; what follows is read with it and written before it
  ChunkFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0, grain_ = 1;
  Word finished_, sleeping_, ahead_left_;
  std::atomic<const char*> ahead_{nullptr};
};

std::mutex caller;  // one loop at a time
std::atomic<Pool*> pool{nullptr};

// A forked child has the pool but not its threads, nor the thread that may have held the lock: it starts
// another pool and leaves the old one alone.
void forget_in_child() {
  pool = nullptr;
  new (&caller) std::mutex;
}

// Marks this thread as running chunks while it lives.
struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

}  // namespace

void note_read(const void* memory, int64_t bytes) { noted = {static_cast<const char*>(memory), bytes}; }

void read_again() {
  Pool* now = pool.load();
  if (now != nullptr && noted.bytes > 0) now->read_ahead(noted);
  noted = {};
}

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
  const Inside here;
  pool.load()->run(threads, count, grain, function, context);
}

}  // namespace blockpilot
