// Row kernels for the baseline instruction set of the platform.
#include "rows.h"

#define ROW_ISA isa_default
#define ROW_TABLE rows_default
#include "rows_impl.inl"
