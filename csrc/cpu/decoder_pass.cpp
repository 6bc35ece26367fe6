#include "decoder_pass.h"

#include <algorithm>

#include "step_tensor.h"

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
  PlanReader reader(weights, plan);
  const Decoder d = read_decoder(reader, scalars, 1);
  reader.finish();
  return d;
}

Decoder read_decoder(PlanReader& reader, at::ArrayRef<double> scalars, int64_t parts) {
  TORCH_CHECK_VALUE(scalars.size() == 3, "scalars: expected eps, embedding scale, logit scale, got ",
                    scalars.size());
  const Header h = read_header(reader, scalars[0]);
  Decoder d;
  d.shape = h.shape;
  d.embedding = reader.linear(-1, h.shape.hidden);
  d.head = reader.linear(-1, h.shape.hidden);
  d.norm = reader.norm(h.shape.hidden, false);
  for (int64_t i = 0; i < h.layers; ++i)
    d.layers.push_back(read_layer(reader, h.shape, parts * h.shape.hidden));
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
  at::Tensor features = step_zeros(n, static_cast<int64_t>(feature_layers.size()) * s.hidden);
  keep_features(feature_layers, 0, s.hidden, pass, x, features);
  for (int64_t i = 0; i < d.depth(); ++i) {
    run_layer(k, s, d.layers[static_cast<std::size_t>(i)], cache, i, pass, x);
    keep_features(feature_layers, i + 1, s.hidden, pass, x, features);
  }
  return features;
}

void run_head(const ModelKernels& k, const Decoder& d, const Pass& pass, const float* x, int64_t n,
              const at::Tensor& head_rows, at::Tensor& logits) {
  const Shape& s = d.shape;
  const Linear& head = d.head;
  std::vector<int64_t> at(static_cast<std::size_t>(n), -1);
  for (std::size_t i = 0; i < pass.rows.size(); ++i)
    at[static_cast<std::size_t>(pass.rows[i].source)] = static_cast<int64_t>(i);
  const Arena::Scope scope(arena());
  const int64_t asked = head_rows.numel();
  float* kept = arena().take<float>(asked * s.hidden);
  std::vector<float*> to;
  for (int64_t i = 0; i < asked; ++i) {
    const int64_t row = head_rows.const_data_ptr<int64_t>()[i];
    float* out = logits.mutable_data_ptr<float>() + i * head.rows;
    const int64_t from = at[static_cast<std::size_t>(row)];
    if (from < 0) {
      std::fill(out, out + head.rows, 0.0f);
      continue;
    }
    std::copy_n(x + from * s.hidden, s.hidden, kept + static_cast<int64_t>(to.size()) * s.hidden);
    to.push_back(out);
  }
  const int64_t live = static_cast<int64_t>(to.size());
  multiply(k, head, s.rounding, {kept, live, d.norm, s.eps}, to.data(), Epilogue::STORE, pass.threads);
  if (d.logit_scale != 1.0f)
    for (float* row : to)
      for (int64_t v = 0; v < head.rows; ++v) row[v] *= d.logit_scale;
}

at::Tensor read_paths(const at::Tensor& path, int64_t n, const std::vector<Layer>& layers) {
  TORCH_CHECK_VALUE(path.dim() == 2 && path.size(1) > 0, "path: expected [", n, ", depths]");
  check_tensor("path", path, at::kLong, {n, path.size(1)});
  for (const Layer& layer : layers) TORCH_CHECK_VALUE(layer.causal, "path: expected causal layers");
  return path.contiguous();
}

at::Tensor read_head_rows(const at::Tensor& rows, int64_t n) {
  check_tensor("head_rows", rows, at::kLong, {rows.numel()});
  const at::Tensor asked = rows.contiguous();
  const int64_t* at = asked.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < asked.numel(); ++i)
    TORCH_CHECK_VALUE(0 <= at[i] && at[i] < n, "head_rows: expected 0 … ", n - 1, ", got ", at[i]);
  return asked;
}

}  // namespace blockpilot
