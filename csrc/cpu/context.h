// What a DFlash drafter keeps of committed tokens: keys and values made of the target's features.
#pragma once
#include <vector>

#include "decoder_inputs.h"

namespace blockpilot {

struct Context {
  Shape shape;
  Linear fc, project;  // of all layers' keys and values
  const float* norm;
  std::vector<const float*> key_norms;  // by layer

  int64_t depth() const { return static_cast<int64_t>(key_norms.size()); }
};

Context read_context(at::TensorList weights, const at::Tensor& plan, double eps);

// Writes the keys and values of the pass's rows; features [sources][fc.columns].
void append_context(const ModelKernels& k, const Context& c, const Cache& cache, const Pass& pass,
                    const float* features);

}  // namespace blockpilot
