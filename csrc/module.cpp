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
}

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  return PyModule_Create(&definition);
}
