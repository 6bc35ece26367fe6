#include "isa.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>
#include <vector>

#if defined(BLOCKPILOT_X86)
#include <cpuid.h>
#endif
#if defined(BLOCKPILOT_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace blockpilot {
namespace {

struct Candidate {
  Isa isa;
  bool supported;
};

#if defined(BLOCKPILOT_X86)
// Whether the processor has tiles of bytes and of bfloat16 numbers and the system lets this process use them:
// it must be asked once, and threads started later inherit its answer.
bool amx_allowed() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr unsigned NEEDED = 1u << 22 | 1u << 24 | 1u << 25;  // CPUID leaf 7, EDX
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & NEEDED) != NEEDED) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

// Best first.
const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> all = [] {
    std::vector<Candidate> list;
#if defined(BLOCKPILOT_X86)
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    list.push_back({{"amx", &rows_avx512, &model_amx}, vnni && amx_allowed()});
    list.push_back({{"vnni", &rows_avx512, &model_vnni}, vnni});
    list.push_back({{"avx512", &rows_avx512, &model_avx512}, avx512});
    list.push_back({{"avx2", &rows_avx2, &model_avx2}, avx2});
#endif
    list.push_back({{"default", &rows_default, &model_default}, true});
    return list;
  }();
  return all;
}

}  // namespace

Isa current_isa() {
  const char* wanted = std::getenv("BLOCKPILOT_ISA");
  const bool forced = wanted != nullptr && *wanted != '\0';
  std::string known;
  for (const Candidate& candidate : candidates()) {
    known += known.empty() ? candidate.isa.name : std::string(", ") + candidate.isa.name;
    if (!forced && candidate.supported) return candidate.isa;
    if (forced && std::string(wanted) == candidate.isa.name) {
      TORCH_CHECK(candidate.supported, "BLOCKPILOT_ISA=", wanted,
                  ": this machine lacks these instructions; unset it");
      return candidate.isa;
    }
  }
  TORCH_CHECK_VALUE(false, "BLOCKPILOT_ISA: expected one of ", known, ", got '", wanted, "'; unset it");
}

}  // namespace blockpilot
