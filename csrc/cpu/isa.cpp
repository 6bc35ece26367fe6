#include "isa.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace blockpilot {
namespace {

struct Candidate {
  Isa isa;
  bool supported;
};

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
