// Row kernels for AVX2. Headers come first, at the baseline; only our own functions follow the target pragma.
#include "rows.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#define ROW_ISA isa_avx2
#define ROW_TABLE rows_avx2
#include "rows_impl.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
