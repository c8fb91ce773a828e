#include "lockstep/optim/deferred_gradients.h"

#include <fmt/ranges.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::optim {
namespace {

// A weak reference keeps the address from being used again, so an entry is never another tensor's.
using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

struct Marks {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, Weak> tensors;
  std::atomic<bool> any{false};
};

Marks& marks() {
  static Marks* const all = new Marks;  // outlives every optimizer of static storage
  return *all;
}

}  // namespace

void mark_deferred(const std::vector<at::Tensor>& params) {
  Marks& all = marks();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.tensors, [](const auto& entry) { return entry.second.expired(); });
  for (const auto& param : params)
    all.tensors.insert_or_assign(param.unsafeGetTensorImpl(), Weak(param.getIntrusivePtr()));
  all.any = !all.tensors.empty();
}

void unmark_deferred(const std::vector<at::Tensor>& params) {
  Marks& all = marks();
  const std::lock_guard lock(all.mutex);
  for (const auto& param : params) all.tensors.erase(param.unsafeGetTensorImpl());
  all.any = !all.tensors.empty();
}

void refuse_if_deferred(const std::vector<at::Tensor>& params, std::string_view who) {
  Marks& all = marks();
  if (!all.any.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(all.mutex);
  for (const auto& param : params) {
    if (!param.defined() || !all.tensors.contains(param.unsafeGetTensorImpl())) continue;
    throw UsageError(
        who,
        "the parameter of shape [{}] belongs to a ShardedOptimizer, so its gradient is this rank's "
        "own until step() averages and uses it. Ask that optimizer instead: "
        "options().max_grad_norm "
        "clips, options().loss_scale unscales, options().skip_non_finite leaves a bad step out; "
        "reduce_now() shows averaged gradients.",
        fmt::join(param.sizes(), ", "));
  }
}

}  // namespace lockstep::optim
