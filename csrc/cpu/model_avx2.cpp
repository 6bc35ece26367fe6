// The decoder's kernels for AVX2. Headers come first, at the baseline; only our own functions follow the
// pragma.
#include <immintrin.h>

#include "model_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define MODEL_ISA model_isa_avx2
#define MODEL_TABLE model_avx2
#include "simd_avx2.inl"
#include "model_impl.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
