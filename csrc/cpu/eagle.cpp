#include "eagle.h"

#include <algorithm>

namespace blockpilot {

Eagle read_eagle(at::TensorList weights, const at::Tensor& plan, double eps) {
  PlanReader reader(weights, plan);
  Eagle e;
  e.decoder = read_decoder(reader, {eps, 1.0, 1.0}, 2);
  TORCH_CHECK_VALUE(e.decoder.depth() == 1, "plan: expected one layer, got ", e.decoder.depth());
  e.fc = reader.linear(e.decoder.shape.hidden, -1);
  e.hidden_norm = reader.norm(e.decoder.shape.hidden, false);
  e.normed_residual = reader.word(0, 1) == 1;
  reader.finish();
  return e;
}

void fuse(const ModelKernels& k, const Eagle& e, const float* features, int64_t rows, int64_t threads,
          float* x) {
  std::vector<float*> to;
  for (int64_t i = 0; i < rows; ++i) to.push_back(x + i * e.decoder.shape.hidden);
  multiply(k, e.fc, e.decoder.shape.rounding, {features, rows}, to.data(), Epilogue::STORE, threads);
}

void run_pairs(const ModelKernels& k, const Eagle& e, const Cache& cache, Pass& pass,
               const std::vector<int64_t>& ids, float* x) {
  const Decoder& d = e.decoder;
  const Shape& s = d.shape;
  const Layer& layer = d.layers[0];
  const int64_t rows = static_cast<int64_t>(pass.rows.size());
  const Arena::Scope scope(arena());
  float* both = arena().take<float>(rows * 2 * s.hidden);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t id = ids[static_cast<std::size_t>(i)];
    TORCH_CHECK_VALUE(0 <= id && id < d.embedding.rows, "tokens: expected 0 … ", d.embedding.rows - 1,
                      ", got ", id);
    float *said = both + i * 2 * s.hidden, *normed = said + s.hidden, *own = x + i * s.hidden;
    k.embed(d.embedding, id, 1.0f, said);
    k.rms_norm(said, layer.input_norm, s.hidden, s.eps, said);
    k.rms_norm(own, e.hidden_norm, s.hidden, s.eps, normed);
    if (e.normed_residual) std::copy_n(normed, s.hidden, own);
  }
  pass.tiles = query_tiles(pass.rows, s, k.tile_queries, pass.threads);
  run_layer(k, s, layer, cache, 0, pass, {both, rows}, x);
}

}  // namespace blockpilot
