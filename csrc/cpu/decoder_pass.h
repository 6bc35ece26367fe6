// A packed decoder read from its plan, and its layers over the rows of a pass.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "decoder_inputs.h"
#include "model.h"

namespace blockpilot {

struct Decoder {
  Shape shape;
  Linear embedding, head;  // a drafter's head may lack rows of the vocabulary
  const float* norm;
  std::vector<Layer> layers;
  float embedding_scale, logit_scale;

  int64_t depth() const { return static_cast<int64_t>(layers.size()); }
};

// `scalars`: RMS epsilon, factor on embeddings, factor on logits.
Decoder read_decoder(at::TensorList weights, const at::Tensor& plan, at::ArrayRef<double> scalars);

// The same from a plan that goes on; `parts`: how many hidden sizes wide a layer's input is.
Decoder read_decoder(PlanReader& plan, at::ArrayRef<double> scalars, int64_t parts);

// Embedding and every layer: `ids` of the pass's rows → x [rows][hidden]. Returns the hidden states
// `feature_layers`, [n, count · hidden], 0 where no row of the pass has that source.
at::Tensor run_rows(const ModelKernels& k, const Decoder& d, const Cache& cache, Pass& pass,
                    const std::vector<int64_t>& ids, int64_t n, at::IntArrayRef feature_layers, float* x);

// Final norm and head of the asked rows [m], each below n, into `logits` [m][head rows]; a row that does not
// exist becomes 0.
void run_head(const ModelKernels& k, const Decoder& d, const Pass& pass, const float* x, int64_t n,
              const at::Tensor& head_rows, at::Tensor& logits);

// Paths [n, depths], contiguous, for layers that see no key beyond their own.
at::Tensor read_paths(const at::Tensor& path, int64_t n, const std::vector<Layer>& layers);

// `rows` [m], contiguous, each in 0 … n − 1.
at::Tensor read_head_rows(const at::Tensor& rows, int64_t n);

}  // namespace blockpilot
