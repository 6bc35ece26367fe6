// The layer of an EAGLE-3 drafter (arXiv 2503.01840).
#pragma once
#include <vector>

#include "decoder_pass.h"

namespace blockpilot {

struct Eagle {
  Decoder decoder;  // one layer, whose queries, keys and values are made of [normed embedding; normed x]
  Linear fc;        // features to hidden
  const float* hidden_norm;  // of x
  bool normed_residual;
};

// A plan of `decoder_plan`'s words, then fc, hidden_norm and whether the residual is normed.
Eagle read_eagle(at::TensorList weights, const at::Tensor& plan, double eps);

// Features [rows][fc.columns] → x [rows][hidden].
void fuse(const ModelKernels& k, const Eagle& e, const float* features, int64_t rows, int64_t threads,
          float* x);

// One pass over pairs of x [rows][hidden], in place, and the embedding of `ids`; writes keys and values.
void run_pairs(const ModelKernels& k, const Eagle& e, const Cache& cache, Pass& pass,
               const std::vector<int64_t>& ids, float* x);

}  // namespace blockpilot
