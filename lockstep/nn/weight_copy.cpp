#include "lockstep/nn/weight_copy.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace lockstep::nn {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

struct Copy {
  WeakTensor of;  // the address may be another tensor's later
  at::Tensor tensor;
  std::uint32_t version = 0;
  const void* memory = nullptr;  // set_data() replaces it without another version
};

class Copies {
 public:
  // Null where there is none.
  Copy* find(const at::Tensor& parameter) {
    const auto at = copies_.find(parameter.unsafeGetTensorImpl());
    if (at == copies_.end()) return nullptr;
    if (!at->second.of.expired()) return &at->second;
    copies_.erase(at);
    return nullptr;
  }

  Copy& make(const at::Tensor& parameter, at::ScalarType dtype) {
    std::erase_if(copies_, [](const auto& item) { return item.second.of.expired(); });
    const c10::InferenceMode no_inference(false);  // training uses it too
    Copy copy{.of = WeakTensor(parameter.getIntrusivePtr()),
              .tensor = at::empty_like(parameter, parameter.options().dtype(dtype))};
    return copies_.insert_or_assign(parameter.unsafeGetTensorImpl(), std::move(copy)).first->second;
  }

  std::mutex mutex;

 private:
  std::unordered_map<at::TensorImpl*, Copy> copies_;
};

Copies& copies() {
  static auto* const all = new Copies;  // tensors on a device outlive no driver
  return *all;
}

bool current(const Copy& copy, const at::Tensor& parameter) {
  return copy.memory == parameter.const_data_ptr() &&
         copy.version == static_cast<std::uint32_t>(parameter._version());
}

void mark(Copy& copy, const at::Tensor& parameter) {
  copy.memory = parameter.const_data_ptr();
  copy.version = static_cast<std::uint32_t>(parameter._version());
}

void convert(Copy& copy, const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  copy.tensor.copy_(parameter.detach());
  mark(copy, parameter);
}

bool fits(const Copy& copy, const at::Tensor& parameter, at::ScalarType dtype) {
  return copy.tensor.scalar_type() == dtype && copy.tensor.device() == parameter.device() &&
         copy.tensor.sizes() == parameter.sizes();
}

}  // namespace

at::Tensor weight_copy(const at::Tensor& parameter, at::ScalarType dtype) {
  if (parameter.scalar_type() == dtype) return parameter.detach();
  const std::lock_guard lock(copies().mutex);
  Copy* copy = copies().find(parameter);
  if (copy == nullptr || !fits(*copy, parameter, dtype)) copy = &copies().make(parameter, dtype);
  if (!current(*copy, parameter)) convert(*copy, parameter);
  return copy->tensor;
}

at::Tensor find_weight_copy(const at::Tensor& parameter) {
  const std::lock_guard lock(copies().mutex);
  const Copy* const copy = copies().find(parameter);
  return copy != nullptr ? copy->tensor : at::Tensor();
}

bool weight_copy_is_current(const at::Tensor& parameter) {
  const std::lock_guard lock(copies().mutex);
  const Copy* const copy = copies().find(parameter);
  return copy != nullptr && current(*copy, parameter);
}

void mark_weight_copy_current(const at::Tensor& parameter) {
  const std::lock_guard lock(copies().mutex);
  if (Copy* const copy = copies().find(parameter)) mark(*copy, parameter);
}

void expire_weight_copy(const at::Tensor& parameter) {
  const std::lock_guard lock(copies().mutex);
  if (Copy* const copy = copies().find(parameter)) copy->memory = nullptr;
}

void refresh_weight_copies(const std::vector<at::Tensor>& parameters) {
  const std::lock_guard lock(copies().mutex);
  for (const at::Tensor& parameter : parameters) {
    Copy* const copy = copies().find(parameter);
    if (copy != nullptr && !current(*copy, parameter)) convert(*copy, parameter);
  }
}

}  // namespace lockstep::nn
