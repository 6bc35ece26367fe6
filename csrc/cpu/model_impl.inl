// The decoder's kernels, compiled once per instruction set on top of a simd_*.inl.
#include "model_rowwise.inl"
#include "model_linear.inl"
#include "model_tiles.inl"
#if defined(MODEL_VNNI)
#include "model_codes_vnni.inl"
#if defined(MODEL_AMX)
#include "model_amx_tiles.inl"
#include "model_codes_amx.inl"
#include "model_bf16_amx.inl"
#endif
#else
#include "model_codes.inl"
#endif
#include "model_units.inl"
#include "model_attention.inl"
#include "model_table.inl"

namespace blockpilot {
extern const ModelKernels MODEL_TABLE = {
    MODEL_ISA::TILE_ROWS,  MODEL_ISA::TILE_QUERIES, MODEL_ISA::prepare, MODEL_ISA::linear,
    MODEL_ISA::rms_factor, MODEL_ISA::rms_norm,     MODEL_ISA::rope,    MODEL_ISA::attend,
    MODEL_ISA::embed,      MODEL_ISA::weighted_rows};
}
