#include "specblock.h"

#include <algorithm>
#include <numeric>

namespace blockpilot {
namespace {

std::vector<float*> rows_of(float* base, int64_t rows, int64_t stride) {
  std::vector<float*> at;
  for (int64_t i = 0; i < rows; ++i) at.push_back(base + i * stride);
  return at;
}

// What the first layer reads, x [rows][hidden]. All slots of a block share all but their query.
void open_blocks(const ModelKernels& k, const SpecBlock& b, const Blocks& blocks, const float* conditions,
                 float* x) {
  const Decoder& d = b.decoder;
  const int64_t hidden = d.shape.hidden, count = blocks.count();
  const Arena::Scope scope(arena());
  float *parts = arena().take<float>(count * 2 * hidden), *opened = arena().take<float>(count * hidden);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = blocks.ids[static_cast<std::size_t>(i)];
    TORCH_CHECK_VALUE(0 <= id && id < d.embedding.rows, "tokens: expected 0 … ", d.embedding.rows - 1,
                      ", got ", id);
    float *normed = parts + i * 2 * hidden, *said = normed + hidden;
    k.rms_norm(conditions + i * hidden, b.condition_norm, hidden, d.shape.eps, normed);
    k.embed(d.embedding, id, 1.0f, said);
    k.rms_norm(said, b.token_norm, hidden, d.shape.eps, said);
  }
  multiply(k, b.fuse, d.shape.rounding, {parts, count}, rows_of(opened, count, hidden).data(),
           Epilogue::STORE, blocks.pass.threads);
  for (int64_t i = 0; i < count; ++i) {
    const float* query = b.queries;
    for (int64_t row = blocks.first[static_cast<std::size_t>(i)]; row < blocks.end(i); ++row, query += hidden)
      for (int64_t c = 0; c < hidden; ++c) x[row * hidden + c] = opened[i * hidden + c] + query[c];
  }
}

// x ← shift [x; x of the slot before], which slot 0 has itself for.
void shift_rows(const ModelKernels& k, const SpecBlock& b, const Linear& shift, const Blocks& blocks,
                float* x) {
  const int64_t hidden = b.decoder.shape.hidden, rows = blocks.rows();
  const Arena::Scope scope(arena());
  float* both = arena().take<float>(rows * 2 * hidden);
  for (int64_t i = 0; i < blocks.count(); ++i) {
    const int64_t first = blocks.first[static_cast<std::size_t>(i)];
    for (int64_t row = first; row < blocks.end(i); ++row) {
      const float* before = x + std::max(first, row - 1) * hidden;
      std::copy_n(x + row * hidden, hidden, both + row * 2 * hidden);
      std::copy_n(before, hidden, both + (row * 2 + 1) * hidden);
    }
  }
  multiply(k, shift, b.decoder.shape.rounding, {both, rows}, rows_of(x, rows, hidden).data(), Epilogue::STORE,
           blocks.pass.threads);
}

// The last layer: what nobody asks for leaves its keys and values and no more.
void end_blocks(const ModelKernels& k, const Decoder& d, const Cache& cache, const Blocks& blocks,
                const std::vector<int64_t>& asked, const float* x, float* out) {
  const Shape& s = d.shape;
  const int64_t last = d.depth() - 1, width = (s.heads + 2 * s.kv_heads) * s.head_dim;
  const int64_t count = static_cast<int64_t>(asked.size());
  const Layer& layer = d.layers.back();
  const Input input = {x, blocks.rows(), layer.input_norm, s.eps};
  if (asked.empty()) return keep_layer(k, s, layer, cache, last, blocks.pass, input);
  const Arena::Scope scope(arena());
  float *qkv = arena().take<float>(blocks.rows() * width), *kept = arena().take<float>(count * width);
  open_layer(k, s, layer, cache, last, blocks.pass, input, qkv);
  Pass pass = blocks.pass;
  pass.rows.clear();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = asked[static_cast<std::size_t>(i)];
    pass.rows.push_back(blocks.pass.rows[static_cast<std::size_t>(row)]);
    std::copy_n(qkv + row * width, s.heads * s.head_dim, kept + i * width);
    std::copy_n(x + row * s.hidden, s.hidden, out + i * s.hidden);
  }
  pass.tiles = query_tiles(pass.rows, s, k.tile_queries, pass.threads);
  close_layer(k, s, layer, cache, last, pass, kept, out);
}

}  // namespace

SpecBlock read_specblock(at::TensorList weights, const at::Tensor& plan, double eps) {
  PlanReader reader(weights, plan);
  SpecBlock b;
  b.decoder = read_decoder(reader, {eps, 1.0, 1.0}, 1);
  const int64_t hidden = b.decoder.shape.hidden;
  b.slots = reader.word(1, 64);
  b.condition = reader.linear(hidden, -1);
  b.fuse = reader.linear(hidden, 2 * hidden);
  b.condition_norm = reader.norm(hidden, false);
  b.token_norm = reader.norm(hidden, false);
  b.queries = reader.norm(b.slots * hidden, false);
  const bool shifted = reader.word(0, 1) == 1;
  for (int64_t i = 1; shifted && i < b.decoder.depth(); ++i)
    b.shifts.push_back(reader.linear(hidden, 2 * hidden));
  reader.finish();
  for (const Layer& layer : b.decoder.layers) TORCH_CHECK_VALUE(layer.causal, "plan: expected causal layers");
  return b;
}

void Blocks::add(const Place& p, int64_t said, int64_t count) {
  TORCH_CHECK_VALUE(0 <= p.slot && p.slot < cache_.slots, "slot: expected 0 … ", cache_.slots - 1, ", got ",
                    p.slot);
  TORCH_CHECK_VALUE(0 <= p.extent && p.extent <= cache_.capacity, "extent: expected 0 … ", cache_.capacity,
                    ", got ", p.extent);
  TORCH_CHECK_VALUE(0 <= p.begin && p.begin <= p.at && p.at <= p.extent - count, "place: expected 0 … ",
                    p.extent - count, " and none before its position, got ", p.at, " of ", p.begin);
  TORCH_CHECK_VALUE(0 <= p.turn && p.turn <= covered_ - count, "pair: expected a rotation of 0 … ",
                    covered_ - count, ", got ", p.turn);
  Path path;
  if (p.at > p.begin) {
    paths_.emplace_back(static_cast<std::size_t>(count));
    std::iota(paths_.back().begin(), paths_.back().end(), p.at);
    path = {p.begin, paths_.back().data()};
  }
  ids.push_back(said);
  first.push_back(rows());
  for (int64_t j = 0; j < count; ++j)
    pass.rows.push_back({rows(), p.slot, p.begin + j, p.extent, p.at + j, path, p.turn + j});
}

void make_conditions(const ModelKernels& k, const SpecBlock& b, const float* features, int64_t blocks,
                     int64_t threads, float* conditions) {
  const Shape& s = b.decoder.shape;
  multiply(k, b.condition, s.rounding, {features, blocks}, rows_of(conditions, blocks, s.hidden).data(),
           Epilogue::STORE, threads);
}

void run_blocks(const ModelKernels& k, const SpecBlock& b, const Cache& cache, Blocks& blocks,
                const float* conditions, const std::vector<int64_t>& asked, float* out) {
  const Decoder& d = b.decoder;
  const Arena::Scope scope(arena());
  float* x = arena().take<float>(blocks.rows() * d.shape.hidden);
  open_blocks(k, b, blocks, conditions, x);
  blocks.pass.tiles = query_tiles(blocks.pass.rows, d.shape, k.tile_queries, blocks.pass.threads);
  for (int64_t i = 0; i < d.depth(); ++i) {
    if (i > 0 && !b.shifts.empty()) shift_rows(k, b, b.shifts[static_cast<std::size_t>(i - 1)], blocks, x);
    if (i + 1 < d.depth())
      run_layer(k, d.shape, d.layers[static_cast<std::size_t>(i)], cache, i, blocks.pass, x);
  }
  end_blocks(k, d, cache, blocks, asked, x, out);
}

}  // namespace blockpilot
