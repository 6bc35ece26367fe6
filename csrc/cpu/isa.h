// Choice of the instruction set at run time.
#pragma once
#include "model_kernels.h"
#include "rows.h"

namespace blockpilot {

struct Isa {
  const char* name;
  const RowKernels* rows;
  const ModelKernels* model;
};

// The best instruction set of this machine, or the one that the environment variable BLOCKPILOT_ISA names.
// Throws ValueError for a name that does not exist here, RuntimeError for one this machine cannot run.
Isa current_isa();

}  // namespace blockpilot
