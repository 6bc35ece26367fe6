// Row kernels for AVX512. Headers come first, at the baseline; only our own functions follow the target
// pragma.
#include "rows.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,prefer-vector-width=512")
#endif
#define ROW_ISA isa_avx512
#define ROW_TABLE rows_avx512
#include "rows_impl.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
