#pragma once
#include <ATen/core/Tensor.h>

namespace blockpilot {

// The op of that name.
void accept_commit(const at::Tensor& block, const at::Tensor& choice, const at::Tensor& finite,
                   const at::Tensor& width, const at::Tensor& stop_ids, const at::Tensor& limit,
                   const at::Tensor& tokens, const at::Tensor& length, const at::Tensor& done,
                   const at::Tensor& finish, const at::Tensor& accepted, const at::Tensor& count);

}  // namespace blockpilot
