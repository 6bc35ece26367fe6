// Python module whose import loads this library and so registers the operators below.
#include <Python.h>
#include <torch/library.h>

#include <string>

#include "cpu/isa.h"

TORCH_LIBRARY(blockpilot, m) {
  m.def("isa() -> str", [] { return std::string(blockpilot::current_isa().name); });
  m.def("philox(Tensor seed, Tensor position, int vocab) -> Tensor");
  m.def("gumbel_noise(Tensor seed, Tensor position, int vocab) -> Tensor");
  m.def("gumbel_from_integers(Tensor integers) -> Tensor");
  m.def(
      "choose(Tensor logits, Tensor? noise, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor? banned, bool filtered) -> (Tensor, Tensor)");
  m.def(
      "accept_commit(Tensor block, Tensor choice, Tensor finite, Tensor width, Tensor stop_ids, Tensor "
      "limit, "
      "Tensor(a!) tokens, Tensor(b!) length, Tensor(c!) done, Tensor(d!) finish, Tensor(e!) accepted, "
      "Tensor(f!) count) -> ()");
  m.def(
      "draft_tree(Tensor score, Tensor deepest, Tensor budget, int nodes, Tensor? cost=None) -> (Tensor, "
      "Tensor, Tensor, Tensor)");
  m.def(
      "decoder_forward(Tensor[] weights, Tensor plan, float[] scalars, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor cos, Tensor sin, Tensor tokens, Tensor slot, Tensor position, Tensor exists, Tensor extent, "
      "int[] feature_layers, Tensor head_rows, Tensor? path=None) -> (Tensor, Tensor)");
  m.def("prompt_lookup(Tensor known, Tensor length, Tensor drafts, int shortest, int longest) -> Tensor");
  m.def("largest(Tensor scores, int count) -> Tensor");
  m.def("move_places(Tensor(a!) keys, Tensor(b!) values, Tensor slot, Tensor from, Tensor to) -> ()");
  const std::string pass =
      "(Tensor[] weights, Tensor plan, float[] scalars, Tensor(a!) keys, Tensor(b!) values, Tensor cos, "
      "Tensor sin, Tensor(c!)[] state, int[] slots, int[] widths, ";
  const std::string verify =
      "verify_commit" + pass +
      "int[] feature_layers, Tensor? noise, bool bans, bool filtered, Tensor[] drafted) -> (Tensor, int[])";
  const std::string draft = "draft_block" + pass +
                            "int[] sources, int mask, Tensor? draft_ids, Tensor? noise, float temperature, "
                            "bool bans, Tensor(d!) drafts, Tensor? copied=None) -> int";
  m.def(
      "commit_context(Tensor[] weights, Tensor plan, float eps, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor cos, Tensor sin, Tensor[] state, int[] slots, int[] widths, int[] sources, Tensor features) -> "
      "()");
  m.def(verify.c_str());
  m.def(draft.c_str());
  m.def(
      "context_append(Tensor[] weights, Tensor plan, float eps, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor cos, Tensor sin, Tensor features, Tensor slot, Tensor position, Tensor exists) -> ()");
  const std::string layers =
      "(Tensor[] weights, Tensor plan, float eps, Tensor(a!) keys, Tensor(b!) values, Tensor cos, Tensor "
      "sin, ";
  const std::string eagle_forward =
      "eagle_forward" + layers +
      "Tensor x, bool fuse, Tensor tokens, Tensor slot, Tensor position, Tensor exists, Tensor extent, "
      "Tensor head_rows, Tensor? path=None) -> (Tensor, Tensor)";
  const std::string drafts =
      "Tensor(c!)[] state, int[] slots, int[] widths, int[] sources, Tensor pending, Tensor? draft_ids, "
      "Tensor? noise, float temperature, bool bans, Tensor(d!) drafts, Tensor? copied=None) -> int";
  const std::string specblock_forward =
      "specblock_forward" + layers +
      "Tensor x, bool features, Tensor tokens, Tensor[] where, Tensor exists, Tensor extent, Tensor "
      "head_rows) -> (Tensor, Tensor, Tensor)";
  m.def(eagle_forward.c_str());
  m.def(specblock_forward.c_str());
  m.def(("draft_chain" + layers + drafts).c_str());
  m.def(("specblock_chain" + layers + drafts).c_str());
  m.def("packed_linear(Tensor x, Tensor weights, Tensor record, int rounding) -> Tensor");
  m.def("weighted_rows(Tensor p, Tensor weights, Tensor record) -> Tensor");
}

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  return PyModule_Create(&definition);
}
