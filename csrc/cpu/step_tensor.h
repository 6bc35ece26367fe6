// Tensors that live for one step.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#if defined(__unix__)
#include <sys/mman.h>
#endif

namespace blockpilot {

// An uninitialised float32 or int64 matrix. Large ones get pages of their own, which go back to the system
// with them: rows come and go in every number, and the C library would keep what it freed between them, in
// pieces that fit no later one, until a process held many times what it uses.
inline at::Tensor step_tensor(int64_t rows, int64_t columns, at::ScalarType dtype) {
#if defined(MAP_ANONYMOUS)
  constexpr std::size_t large = std::size_t{1} << 20;
  const std::size_t bytes = static_cast<std::size_t>(rows * columns) * c10::elementSize(dtype);
  if (bytes >= large) {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages != MAP_FAILED)
      return at::from_blob(
          pages, {rows, columns}, [bytes](void* p) { munmap(p, bytes); }, at::TensorOptions().dtype(dtype));
  }
#endif
  return at::empty({rows, columns}, at::TensorOptions().dtype(dtype));
}

// A float32 matrix of zeros. `at::zeros` has a team of OpenMP write large ones, which then spins for a while
// on the cores that the pass needs.
inline at::Tensor step_zeros(int64_t rows, int64_t columns) {
  at::Tensor made = step_tensor(rows, columns, at::kFloat);
  std::fill_n(made.mutable_data_ptr<float>(), made.numel(), 0.0f);
  return made;
}

}  // namespace blockpilot
