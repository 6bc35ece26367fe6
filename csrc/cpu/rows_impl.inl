// Row kernels, compiled once per instruction set. Every loop does the same operations in the same order for a
// value wherever it stands, and nothing is contracted, so the results do not depend on the instruction set.
#include "row_math.inl"
#include "row_noise.inl"
#include "row_filter.inl"
#include "row_choose.inl"

namespace blockpilot {
extern const RowKernels ROW_TABLE = {ROW_ISA::philox, ROW_ISA::gumbel_noise, ROW_ISA::gumbel_from_integers,
                                     ROW_ISA::choose, ROW_ISA::highest,      ROW_ISA::highest_score};
}
