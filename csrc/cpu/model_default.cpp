// The decoder's kernels for the baseline instruction set of the platform.
#include "model_kernels.h"

#define MODEL_ISA model_isa_default
#define MODEL_TABLE model_default
#include "simd_default.inl"
#include "model_impl.inl"
