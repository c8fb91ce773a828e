// Staging memory for calls whose tensors are not one plain array.
//
//   Outputs outputs;
//   at::Tensor data = outputs.stage(tensor, true);  // the tensor itself, if it is contiguous
//   engine.all_reduce(data.mutable_data_ptr(), count_of(data), how.dtype, how.op);
//   call.finish = outputs.finish();                 // copies back what was staged
//
// Belongs to one call. Everything is inline: for the backend's one source file.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::python {

using Tensors = std::vector<at::Tensor>;

// Autograd and version counters do not see this, as with every backend of torch.distributed.
using PlainTensors = at::AutoDispatchBelowADInplaceOrView;

// The results of an operation: the tensors themselves where they are plain arrays, else staging
// memory and the copy back.
class Outputs {
 public:
  // `filled`: the operation reads it too.
  at::Tensor stage(const at::Tensor& tensor, bool filled = false) {
    if (tensor.is_contiguous()) return tensor;
    at::Tensor staged = filled ? tensor.contiguous() : at::empty(tensor.sizes(), tensor.options());
    copy_back(tensor, staged);
    return staged;
  }
  // One array for tensors of equal size, which may already be one.
  at::Tensor stage_all(const Tensors& tensors) {
    if (auto whole = as_one(tensors)) return *whole;
    const auto n = static_cast<std::int64_t>(tensors.size());
    at::Tensor staged = at::empty({n, tensors[0].numel()}, tensors[0].options());
    for (std::int64_t i = 0; i < n; ++i) {
      const at::Tensor& tensor = tensors[static_cast<std::size_t>(i)];
      copy_back(tensor, staged.select(0, i).view(tensor.sizes()));
    }
    held.push_back(staged);
    return staged;
  }
  void copy_back(const at::Tensor& to, const at::Tensor& from) {
    held.push_back(from);
    pairs.emplace_back(to, from);
  }
  std::function<void()> finish() {
    if (pairs.empty()) return nullptr;
    return [copies = std::move(pairs)] {
      const PlainTensors plain;
      for (const auto& [to, from] : copies) to.copy_(from);
    };
  }
  // The tensors as one, when they follow each other in memory.
  static std::optional<at::Tensor> as_one(const Tensors& tensors) {
    const at::Tensor& first = tensors[0];
    const auto* place = static_cast<const std::byte*>(first.const_data_ptr());
    for (const auto& tensor : tensors) {
      if (!tensor.is_contiguous() || tensor.const_data_ptr() != place ||
          !tensor.storage().is_alias_of(first.storage()))
        return std::nullopt;
      place += tensor.nbytes();
    }
    const auto n = static_cast<std::int64_t>(tensors.size());
    return first.as_strided({n, first.numel()}, {first.numel(), 1});
  }

  Tensors held;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
};

inline at::Tensor as_input(const Tensors& tensors) {
  if (tensors.size() == 1) return tensors[0].contiguous();
  if (auto whole = Outputs::as_one(tensors)) return *whole;
  Tensors flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

}  // namespace lockstep::python
