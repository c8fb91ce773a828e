#include "lockstep/parallel/bucket_set.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/kernels/step.h"
#include "lockstep/memory/cpu_cache.h"

namespace lockstep::parallel {
namespace {

constexpr std::int64_t kFlagBytes = 64;  // and aligns the next bucket
// A block that is larger than the cache is written past the cache, which would have dropped the
// first gradients again when the last ones come. Small tensors are not worth the store's fence.
constexpr std::size_t kCacheBytes = 4 << 20;
constexpr std::size_t kStreamedBytes = 64 << 10;
constexpr std::int64_t kGrainBytes = 1 << 20;  // for each thread

// Every rank's memory, or nothing where they cannot share so much. Zeros; collective.
std::vector<at::Tensor> shared_block(World& world, std::int64_t bytes) {
  if (bytes == 0) return {};
  try {
    return world.symmetric({bytes}, at::kByte);
  } catch (const UsageError& e) {
    // All ranks identically.
    log::warning("reducer", "gradients stay in every rank's own memory, which is slower: {}",
                 e.what());
    return {};
  }
}

at::Tensor cut(const at::Tensor& bytes, std::int64_t offset, std::int64_t numel,
               at::ScalarType dtype) {
  const auto length = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, offset, length).view(dtype);
}

bool lies_in(const at::Tensor& block, const at::Tensor& tensor) {
  // By its address: a gradient that was allocated in place has a storage of its own.
  if (!block.defined() || !tensor.is_cpu() || !tensor.has_storage()) return false;
  const auto* const begin = static_cast<const std::byte*>(block.const_data_ptr());
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return data >= begin && data < begin + block.nbytes();
}

}  // namespace

void BucketSet::lay_out(const std::vector<ParameterForm>& forms,
                        const std::vector<std::size_t>& order, const BucketLimits& limits) {
  torch::NoGradGuard no_grad;
  std::vector<ParameterInfo> infos;
  for (std::size_t i = 0; i < forms.size(); ++i)
    infos.push_back({model_[i].tensor.numel(), forms[i].dtype, forms[i].device});
  const auto plans = plan_buckets(infos, order, limits);
  std::vector<std::int64_t> offsets;  // of the buckets in the block, in bytes
  std::int64_t bytes = 0;
  for (const BucketPlan& plan : plans) {
    offsets.push_back(bytes);
    const auto element = static_cast<std::int64_t>(c10::elementSize(plan.dtype));
    if (plan.device.is_cpu()) bytes += plan.numel * element + kFlagBytes;
  }
  const auto parts = shared_block(world_, bytes);
  const auto rank = static_cast<std::size_t>(world_.rank());
  const at::Tensor old =
      std::exchange(block_, parts.empty() ? at::zeros({bytes}, at::kByte) : parts[rank]);
  buckets_.clear();
  slots_.resize(forms.size());
  for (auto& slot : slots_) slot.bucket = kNoBucket;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const BucketPlan& plan = plans[i];
    BucketMemory& bucket = buckets_.emplace_back();
    const std::int64_t length = plan.numel + (i == 0 ? 1 : 0);
    if (plan.device.is_cpu()) {
      bucket.wire = cut(block_, offsets[i], length, plan.dtype);
      for (const at::Tensor& part : parts)
        bucket.parts.push_back(cut(part, offsets[i], length, plan.dtype));
    } else {
      bucket.wire = at::zeros({length}, at::dtype(plan.dtype).device(plan.device));
    }
    bucket.flat = bucket.wire.narrow(0, 0, plan.numel);
    bucket.slots = plan.slots;
    for (const Slot& place : plan.slots) {
      slots_[place.parameter].bucket = i;
      bind_slot(place, bucket.wire, forms[place.parameter]);
    }
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].bucket == kNoBucket) slots_[i].tensor = at::Tensor();
    // A gradient without a slot now, or of another dtype, must not keep all of the old memory.
    at::Tensor& grad = model_[i].tensor.mutable_grad();
    if (grad.defined() && lies_in(old, grad)) grad = grad.clone();
  }
}

void BucketSet::bind_slot(const Slot& place, const at::Tensor& wire, const ParameterForm& form) {
  const at::Tensor& tensor = model_[place.parameter].tensor;
  const auto strides = tensor.is_non_overlapping_and_dense()
                           ? tensor.strides().vec()
                           : at::empty_like(tensor, at::kMeta).contiguous().strides().vec();
  at::Tensor& slot = slots_[place.parameter].tensor;
  at::Tensor& grad = tensor.mutable_grad();
  const auto fits = [&](const at::Tensor& t) {
    return t.defined() && !t.is_sparse() && t.scalar_type() == wire.scalar_type() &&
           t.device() == wire.device();
  };
  const at::Tensor values = views_ && fits(grad) ? grad.detach() : at::Tensor();
  // The slot stays the same tensor for everyone who holds it, unless its old memory is in use.
  if (!fits(slot) || detail::InplaceGradients::in_use(slot)) slot = at::empty({0}, wire.options());
  // An alias, not a view: zero_grad(false) detaches gradients in place, which a view refuses.
  slot.set_(wire.storage(), wire.storage_offset() + place.offset, form.sizes, strides);
  if (!values.defined()) return;
  slot.copy_(values);
  grad = slot;
}

// Before a slot is written: a tensor in its memory must be the gradient that has just arrived.
void BucketSet::claim(std::size_t parameter, const at::Tensor& arrived) const {
  const at::Tensor& slot = slots_[parameter].tensor;
  if (!detail::InplaceGradients::in_use(slot)) return;
  if (arrived.defined() && arrived.const_data_ptr() == slot.const_data_ptr()) return;
  throw UsageError("reducer",
                   "parameter '{}' got a gradient while another one for it was being computed. A "
                   "hook or a function probably runs a backward of its own on the same parameters; "
                   "set LOCKSTEP_GRAD_INPLACE_MIN_BYTES=0.",
                   model_[parameter].name);
}

// slot.copy_(grad), fast where the slot lies in the block and both have one layout.
void BucketSet::fill(const at::Tensor& slot, const at::Tensor& grad) const {
  const bool same = lies_in(block_, slot) && grad.is_cpu() &&
                    grad.scalar_type() == slot.scalar_type() && grad.sizes() == slot.sizes() &&
                    grad.strides() == slot.strides() && !grad.is_conj() && !grad.is_neg() &&
                    slot.is_non_overlapping_and_dense();
  if (!same || slot.numel() == 0) {
    slot.copy_(lies_in(block_, grad) ? grad.clone() : grad);
    return;
  }
  const auto length = static_cast<std::int64_t>(slot.nbytes());
  auto* const to = static_cast<std::byte*>(slot.mutable_data_ptr());
  const auto* const from = static_cast<const std::byte*>(grad.const_data_ptr());
  slot.unsafeGetTensorImpl()->bump_version();  // as copy_ does
  if (from == to) return;
  const bool streams = block_.nbytes() >= kCacheBytes && slot.nbytes() >= kStreamedBytes;
  at::parallel_for(0, length, kGrainBytes, [&](std::int64_t begin, std::int64_t end) {
    const auto bytes = static_cast<std::size_t>(end - begin);
    if (streams)
      kernels::stream_copy(to + begin, from + begin, bytes);
    else
      std::memcpy(to + begin, from + begin, bytes);
  });
}

void BucketSet::store(std::size_t parameter, const at::Tensor& arrived, bool sync) {
  const ModelParameter& p = model_[parameter];
  at::Tensor& grad = p.tensor.mutable_grad();
  if (grad.defined() && grad.layout() != at::kStrided) {
    if (p.sparse) return;
    throw UsageError("reducer",
                     "parameter '{}' got a sparse gradient. Name it in "
                     "sparse_parameters.",
                     p.name);
  }
  if (p.sparse) {
    if (!grad.defined()) return;
    throw UsageError("reducer",
                     "parameter '{}' is named in sparse_parameters (or belongs to a "
                     "sparse embedding) but got a dense gradient.",
                     p.name);
  }
  const at::Tensor& slot = slots_[parameter].tensor;
  if (grad.is_same(slot)) return;
  claim(parameter, arrived);
  if (!grad.defined()) {
    if (sync) slot.zero_();
    return;
  }
  if (views_ || sync) fill(slot, grad);
  if (views_) grad = slot;
}

void BucketSet::store_unused(std::size_t parameter, bool save) {
  if (model_[parameter].sparse) return;
  claim(parameter, at::Tensor());
  SlotState& slot = slots_[parameter];
  const at::Tensor& grad = model_[parameter].tensor.grad();
  if (!grad.defined()) {
    slot.tensor.zero_();
    return;
  }
  if (save) slot.saved = grad.clone();
  if (!grad.is_same(slot.tensor)) slot.tensor.copy_(grad);
}

void BucketSet::publish(const std::vector<bool>& used) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const SlotState& slot = slots_[i];
    if (slot.bucket == kNoBucket) continue;
    at::Tensor& grad = model_[i].tensor.mutable_grad();
    if (!used.empty() && !used[i]) {
      // No rank used it: .grad keeps its bits, even if it lies in the bucket.
      if (slot.saved.defined() && grad.is_same(slot.tensor)) slot.tensor.copy_(slot.saved);
    } else if (views_) {
      if (!grad.is_same(slot.tensor)) grad = slot.tensor;
    } else if (grad.defined()) {
      grad.copy_(slot.tensor);
    } else {
      grad = slot.tensor.clone();
    }
  }
}

void BucketSet::drop_saved() {
  for (auto& slot : slots_) slot.saved = at::Tensor();
}

Bucket BucketSet::for_hook(std::size_t index, const at::Tensor& flat) const {
  const BucketMemory& bucket = buckets_[index];
  Bucket view{.index = index,
              .is_last = index + 1 == buckets_.size(),
              .data = flat,
              .gradients = {},
              .parameters = {}};
  for (const auto& [parameter, offset] : bucket.slots) {
    const at::Tensor& slot = slots_[parameter].tensor;
    view.gradients.push_back(
        flat.as_strided(slot.sizes(), slot.strides(), flat.storage_offset() + offset));
    view.parameters.push_back(model_[parameter].tensor);
  }
  return view;
}

namespace {

struct OpenBucket {
  BucketPlan plan;
  std::int64_t bytes = 0;
  std::size_t last_position = 0;
};

// Closes what is left over at the end; where it is too small, joins it to the last full bucket of
// its kind.
void join_small(OpenBucket rest, std::vector<OpenBucket>& closed, std::int64_t min_bytes) {
  const auto same_kind = [&](const OpenBucket& bucket) {
    return bucket.plan.dtype == rest.plan.dtype && bucket.plan.device == rest.plan.device;
  };
  const auto last = std::find_if(closed.rbegin(), closed.rend(), same_kind);
  if (rest.bytes >= min_bytes || last == closed.rend()) {
    closed.push_back(std::move(rest));
    return;
  }
  for (const Slot& slot : rest.plan.slots)
    last->plan.slots.push_back({slot.parameter, last->plan.numel + slot.offset});
  last->plan.numel += rest.plan.numel;
  last->bytes += rest.bytes;
  last->last_position = rest.last_position;
}

std::int64_t round_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

std::vector<std::size_t> reverse_order(std::size_t n) {
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = n - 1 - i;
  return order;
}

std::vector<BucketPlan> plan_buckets(const std::vector<ParameterInfo>& parameters,
                                     const std::vector<std::size_t>& order,
                                     const BucketLimits& limits) {
  using Kind = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::map<Kind, OpenBucket> open;
  std::vector<OpenBucket> closed;
  for (std::size_t position = 0; position < order.size(); ++position) {
    LOCKSTEP_ASSERT(order[position] < parameters.size());
    const ParameterInfo& info = parameters[order[position]];
    const auto element = static_cast<std::int64_t>(c10::elementSize(info.dtype));
    const Kind kind{info.dtype, info.device.type(), info.device.index()};
    OpenBucket& bucket = open[kind];
    bucket.plan.dtype = info.dtype;
    bucket.plan.device = info.device;
    bucket.plan.slots.push_back({order[position], bucket.plan.numel});
    bucket.plan.numel += round_up(info.numel * element, limits.alignment_bytes) / element;
    bucket.bytes += info.numel * element;
    bucket.last_position = position;
    const std::int64_t cap = closed.empty() ? limits.first_cap_bytes : limits.cap_bytes;
    if (bucket.bytes >= cap) {
      closed.push_back(std::move(bucket));
      open.erase(kind);
    }
  }
  for (auto& [kind, bucket] : open) join_small(std::move(bucket), closed, limits.min_bytes);
  std::stable_sort(closed.begin(), closed.end(), [](const OpenBucket& a, const OpenBucket& b) {
    return a.last_position < b.last_position;
  });
  std::vector<BucketPlan> plans;
  plans.reserve(closed.size());
  for (auto& bucket : closed) plans.push_back(std::move(bucket.plan));
  return plans;
}

}  // namespace lockstep::parallel
