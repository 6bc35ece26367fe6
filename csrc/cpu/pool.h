// A small pool of threads for loops of microseconds. Every CPU op uses it, and none OpenMP: an OpenMP team
// goes on spinning after its loop, on the cores that the next op's threads need. Threads that are done take
// chunks of those that are not, so one that was descheduled delays its own chunk only; waiting threads spin
// for a bounded time and then sleep.
#pragma once
#include <cstdint>

namespace blockpilot {

using ChunkFunction = void (*)(void* context, int64_t begin, int64_t end);

// Calls function(context, begin, end) for ranges of `grain` that cover [0, count), on at most `threads`
// threads, the caller's among them, fewer if no more can be started. Returns when all are done, or throws
// then what one of them threw. While one caller's loop runs on threads, those of other callers, and loops
// inside its chunks, run on their own thread alone.
void run_chunks(int64_t threads, int64_t count, int64_t grain, ChunkFunction function, void* context);

// Memory that the calling thread reads, and will read again after loops that drive it out of the caches.
void note_read(const void* memory, int64_t bytes);

// Threads that wait for a loop ask for what the calling thread noted last, once, until a loop begins: what
// its caller does in between leaves their cores and the memory idle.
void read_again();

template <typename Body>
void parallel_chunks(int64_t threads, int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (threads <= 1 || count <= grain) return body(0, count);
  run_chunks(
      threads, count, grain,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace blockpilot
