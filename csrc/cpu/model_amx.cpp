// The decoder's kernels for AVX-512 with VNNI and AMX. Headers come first, at the baseline; only our own functions follow the
// pragma.
#include <immintrin.h>

#include "model_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512vnni,amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512vnni,amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define MODEL_ISA model_isa_amx
#define MODEL_TABLE model_amx
#define MODEL_VNNI 1
#define MODEL_AMX 1
#include "simd_avx512.inl"
#include "model_impl.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
