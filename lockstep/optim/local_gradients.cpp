#include "lockstep/optim/local_gradients.h"

#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/COWDeleter.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "lockstep/core/error.h"

namespace lockstep::optim {
namespace {

template <typename Condition>
bool has_hook(const at::Tensor& param, Condition&& condition) {
  if (!param.defined() || !param.requires_grad() || !param.is_leaf()) return false;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
  if (!accumulator) return false;
  const auto& hooks = accumulator->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& each) {
    const auto* hook = dynamic_cast<const GradientHook*>(each.get());
    return hook != nullptr && condition(*hook);
  });
}

bool has_local_gradient(const at::Tensor& param) {
  return has_hook(param, [](const GradientHook& hook) { return hook.is_local(); });
}

}  // namespace

bool is_watched(const at::Tensor& param) {
  return has_hook(param, [](const GradientHook&) { return true; });
}

void refuse_local_gradients(const std::vector<at::Tensor>& params, std::string_view who) {
  for (const auto& param : params) {
    if (!has_local_gradient(param)) continue;
    throw UsageError(
        who,
        "the parameter of shape [{}] belongs to FullyShard, Pipeline or TensorParallel, where a "
        "rank's gradient is a part, or not averaged before the step (shard_optimizer). Make the "
        "optimizer by model.make_optimizer() instead of on the parameters, and leave clipping and "
        "unscaling to it: step({{.max_grad_norm = 1, .scaler = &scaler, .skip_non_finite = true}}) "
        "also skips a bad step.",
        fmt::join(param.sizes(), ", "));
  }
}

// ---------------------------------------------------------------- incomplete steps

namespace {

struct Marks {
  struct Mark {
    // Nothing else gets the gradient's address.
    c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> gradient;
    std::int64_t version;
  };
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, Mark> of;  // by gradient
};
Marks& marks() {
  static auto* const all = new Marks;
  return *all;
}

// Null: there is none that could be marked.
const at::TensorImpl* gradient_of(const at::Tensor& param) {
  if (!param.defined() || !param.grad().defined() || param.grad().is_inference()) return nullptr;
  return param.grad().unsafeGetTensorImpl();
}

}  // namespace

void mark_pass(const std::vector<at::Tensor>& params, bool last) {
  const std::lock_guard lock(marks().mutex);
  auto& marked = marks().of;
  std::erase_if(marked, [](const auto& each) { return each.second.gradient.expired(); });
  if (last && marked.empty()) return;
  for (const at::Tensor& param : params) {
    const at::TensorImpl* const gradient = gradient_of(param);
    if (last) {
      marked.erase(gradient);
    } else if (gradient != nullptr) {
      marked.insert_or_assign(
          gradient, Marks::Mark{decltype(Marks::Mark::gradient)(param.grad().getIntrusivePtr()),
                                param.grad()._version()});
    }
  }
}

void refuse_incomplete(const std::vector<at::Tensor>& params, std::string_view who) {
  const std::lock_guard lock(marks().mutex);
  if (marks().of.empty()) return;
  for (const at::Tensor& param : params) {
    const auto mark = marks().of.find(gradient_of(param));
    if (mark == marks().of.end() || mark->second.version != param.grad()._version()) continue;
    throw UsageError(who,
                     "a step's backward passes are not complete: the gradient of the parameter of "
                     "shape [{}] is what backward(loss, /*last=*/false) has left on this rank. "
                     "This was probably called for each micro-batch instead of for each window. "
                     "Call it after the backward whose `last` is true; zero_grad() drops a window "
                     "that is given up.",
                     fmt::join(param.sizes(), ", "));
  }
}

// ---------------------------------------------------------------- what others write

namespace {

// The memory of watched storages, by address, until the last tensor releases it. A copy-on-write
// storage has no other reference to the memory.
struct Owners {
  std::mutex mutex;
  std::unordered_multimap<void*, c10::Storage> storages;
};
Owners& owners() {
  static auto* const all = new Owners;  // there may be tensors at the very end
  return *all;
}

void release_owner(void* data) {
  c10::Storage owner;  // ends after the unlock
  const std::lock_guard lock(owners().mutex);
  const auto found = owners().storages.find(data);
  owner = std::move(found->second);
  owners().storages.erase(found);
}

c10::Storage watched_storage(const c10::Storage& own) {
  void* const data = const_cast<void*>(own.data());
  {
    const std::lock_guard lock(owners().mutex);
    owners().storages.emplace(data, own);
  }
  using c10::impl::cow::COWDeleterContext;
  auto* const context =
      new COWDeleterContext(COWDeleterContext::LastReference(data, release_owner));
  return c10::Storage(c10::Storage::use_byte_size_t(), own.nbytes(),
                      c10::DataPtr(data, context, c10::impl::cow::cow_deleter, own.device()));
}

}  // namespace

bool GradientWatch::Gradient::written() const {
  return !c10::impl::cow::is_cow_data_ptr(watched.data_ptr()) && tensor._version() == version;
}

void GradientWatch::see(std::string_view name, const at::Tensor& parameter) {
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined() || grad.layout() != at::kStrided || grad.storage().nbytes() == 0) return;
  gradients_.push_back(
      {name, grad, grad.storage(), watched_storage(grad.storage()), grad._version()});
  grad.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
  grad.unsafeGetTensorImpl()->set_storage_keep_dtype(gradients_.back().watched);
}

std::string GradientWatch::find_written() const {
  if (!written_.empty()) return written_;
  const auto found = std::ranges::find_if(gradients_, &Gradient::written);
  return found == gradients_.end() ? "" : std::string(found->name);
}

void GradientWatch::refuse_written(std::string_view who) const {
  const std::string name = find_written();
  if (name.empty()) return;
  throw UsageError(
      who,
      "the gradient of parameter '{}' was written after backward, past its version counter. It was "
      "probably clipped by torch::nn::utils::clip_grad_norm_, which sees only this rank's "
      "gradients: a part of them, or not averaged yet. Call zero_grad(), and clip in the step: "
      "step({{.max_grad_norm = 1}}) of the optimizer that make_optimizer() returns. "
      "Operations on .grad itself (mul_, clamp_) are allowed; its memory is read through "
      "const_data_ptr().",
      name);
}

void GradientWatch::forget() {
  written_ = find_written();
  for (const Gradient& gradient : gradients_)
    if (gradient.tensor.storage().unsafeGetStorageImpl() == gradient.watched.unsafeGetStorageImpl())
      gradient.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(gradient.own);
  gradients_.clear();
}

void GradientWatch::reset() {
  forget();
  written_.clear();
}

}  // namespace lockstep::optim
