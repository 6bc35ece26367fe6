#include "decoder_pass.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace blockpilot {
namespace {

// Hidden state `state` into the places of `features` that ask for it.
void keep_features(at::IntArrayRef layers, int64_t state, int64_t hidden, const Pass& pass, const float* x,
                   at::Tensor& features) {
  const int64_t wanted = static_cast<int64_t>(layers.size());
  float* base = features.mutable_data_ptr<float>();
  for (int64_t f = 0; f < wanted; ++f) {
    if (layers[static_cast<std::size_t>(f)] != state) continue;
    for (std::size_t i = 0; i < pass.rows.size(); ++i) {
      const float* from = x + static_cast<int64_t>(i) * hidden;
      std::copy(from, from + hidden, base + (pass.rows[i].source * wanted + f) * hidden);
    }
  }
}

}  // namespace

Decoder read_decoder(at::TensorList weights, const at::Tensor& plan, at::ArrayRef<double> scalars) {
  TORCH_CHECK_VALUE(scalars.size() == 3, "scalars: expected eps, embedding scale, logit scale, got ",
                    scalars.size());
  PlanReader reader(weights, plan);
  const Header h = read_header(reader, scalars[0]);
  Decoder d;
  d.shape = h.shape;
  d.embedding = reader.linear(-1, h.shape.hidden);
  d.head = reader.linear(-1, h.shape.hidden);
  d.norm = reader.norm(h.shape.hidden, false);
  for (int64_t i = 0; i < h.layers; ++i) d.layers.push_back(read_layer(reader, h.shape));
  reader.finish();
  d.embedding_scale = static_cast<float>(scalars[1]);
  d.logit_scale = static_cast<float>(scalars[2]);
  return d;
}

at::Tensor run_rows(const ModelKernels& k, const Decoder& d, const Cache& cache, Pass& pass,
                    const std::vector<int64_t>& ids, int64_t n, at::IntArrayRef feature_layers, float* x) {
  const Shape& s = d.shape;
  for (const int64_t layer : feature_layers)
    TORCH_CHECK_VALUE(0 <= layer && layer <= d.depth(), "feature_layers: expected 0 … ", d.depth(), ", got ",
                      layer);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    TORCH_CHECK_VALUE(0 <= ids[i] && ids[i] < d.embedding.rows, "tokens: expected 0 … ", d.embedding.rows - 1,
                      ", got ", ids[i]);
    k.embed(d.embedding, ids[i], d.embedding_scale, x + static_cast<int64_t>(i) * s.hidden);
  }
  pass.tiles = query_tiles(pass.rows, s, k.tile_queries, pass.threads);
  at::Tensor features = at::zeros({n, static_cast<int64_t>(feature_layers.size()) * s.hidden}, at::kFloat);
  keep_features(feature_layers, 0, s.hidden, pass, x, features);
  for (int64_t i = 0; i < d.depth(); ++i) {
    run_layer(k, s, d.layers[static_cast<std::size_t>(i)], cache, i, pass, x);
    keep_features(feature_layers, i + 1, s.hidden, pass, x, features);
  }
  return features;
}

}  // namespace blockpilot
