#include "lockstep/optim/adamw_pass.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/kernels/cuda/table.h"
#include "lockstep/optim/group.h"

namespace lockstep::optim {
namespace {

namespace cuda = kernels::cuda;

constexpr const char* kAdamWPass = "AdamWPass";
constexpr std::int64_t kGroupValues = sizeof(cuda::AdamGroup) / sizeof(float);

void check_item(const AdamWItem& item, c10::Device device, std::size_t groups) {
  const auto fits = [&](const at::Tensor& t, at::ScalarType type) {
    return t.defined() && t.scalar_type() == type && t.device() == device && t.is_contiguous() &&
           t.sizes() == item.param.sizes();
  };
  const bool ok =
      fits(item.param, at::kFloat) && fits(item.exp_avg, at::kFloat) &&
      fits(item.exp_avg_sq, at::kFloat) && (!item.grad.defined() || fits(item.grad, at::kFloat)) &&
      (!item.shadow.defined() || fits(item.shadow, at::kBFloat16)) && item.step.defined() &&
      item.step.numel() == 1 && item.step.scalar_type() == at::kFloat &&
      item.step.device() == device && item.group < groups;
  if (!ok)
    throw UsageError(
        kAdamWPass,
        "an item does not fit: parameter, gradient and averages must be float, of one "
        "shape, contiguous and on {}, the copy bfloat16, step one float, and the group "
        "one of {}. Convert the parameter, or use AdamW.",
        device.str(), groups);
}

const at::Tensor& grad_of(const AdamWItem& item) {
  const at::Tensor& grad = item.grad.defined() ? item.grad : item.param.grad();
  if (!grad.defined() || grad.scalar_type() != at::kFloat || !grad.is_contiguous() ||
      grad.sizes() != item.param.sizes() || grad.device() != item.param.device())
    throw UsageError(kAdamWPass,
                     "a parameter of {} elements has no float gradient laid out as itself. Run "
                     "backward before step(), and leave frozen parameters out.",
                     item.param.numel());
  return grad;
}

// The bytes of an array, on a device.
template <typename T>
at::Tensor upload(const std::vector<T>& values, c10::Device device) {
  const at::Tensor host =
      at::empty({static_cast<std::int64_t>(values.size() * sizeof(T))}, at::kByte);
  if (!values.empty())
    std::memcpy(host.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  return host.to(device);
}

bool aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

template <typename T>
T* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace

AdamWPass::AdamWPass(std::vector<AdamWItem> items, std::vector<AdamWOptions> groups)
    : items_(std::move(items)), groups_(std::move(groups)) {
  const c10::Device device = items_.empty() || !items_[0].param.defined()
                                 ? c10::Device(c10::kCPU)
                                 : items_[0].param.device();
  for (const auto& item : items_) check_item(item, device, groups_.size());
  const auto floats = at::TensorOptions(device).dtype(at::kFloat);
  group_values_ = at::zeros({static_cast<std::int64_t>(groups_.size()), kGroupValues}, floats);
  for (std::size_t g = 0; g < groups_.size(); ++g) set_options(g, groups_[g]);
  max_norm_ = at::zeros({1}, floats);
  norm_ = at::zeros({1}, floats);
  found_inf_ = at::zeros({1}, floats);
  clip_ = at::ones({1}, floats);
}

void AdamWPass::set_options(std::size_t group, const AdamWOptions& options) {
  detail::check_group(kAdamWPass, group, groups_.size());
  check(options);
  groups_[group] = options;
  // In the order of AdamGroup.
  const auto value = [](double v) { return static_cast<float>(v); };
  const std::vector<float> values{value(options.lr), value(options.betas.first),
                                  value(options.betas.second), value(options.eps),
                                  value(options.weight_decay)};
  group_values_[static_cast<std::int64_t>(group)].copy_(at::tensor(values));
}

void AdamWPass::set_max_norm(double max_norm) {
  if (!(max_norm >= 0))
    throw UsageError(kAdamWPass, "max_norm = {} must be positive, or 0 for no clipping.", max_norm);
  max_norm_.fill_(max_norm);
}

void AdamWPass::step(const at::Tensor& grad_scale) {
  const at::NoGradGuard no_grad;
  if (items_.empty()) return;
  if (!step_with_kernels(grad_scale)) step_with_aten(grad_scale);
  for (const auto& item : items_) {
    item.param.unsafeGetTensorImpl()->bump_version();
    if (item.shadow.defined()) item.shadow.unsafeGetTensorImpl()->bump_version();
  }
}

void AdamWPass::step_with_aten(const at::Tensor& grad_scale) {
  at::Tensor squares = at::zeros({1}, norm_.options().dtype(at::kDouble));
  for (const auto& item : items_) squares += grad_of(item).to(at::kDouble).square().sum();
  const at::Tensor scale =
      grad_scale.defined() ? grad_scale.to(at::kFloat).view({1}) : at::ones({1}, norm_.options());
  norm_.copy_(squares.sqrt() / scale);
  found_inf_.copy_(at::isfinite(norm_).logical_not());
  if (found_inf_.item<float>() != 0) return;
  const at::Tensor bound = at::where(max_norm_ > 0, at::clamp_max(max_norm_ / (norm_ + 1e-6), 1.0),
                                     at::ones_like(max_norm_));
  clip_.copy_(bound / scale);
  for (const auto& item : items_) {
    const AdamWOptions& o = groups_[item.group];
    const auto [beta1, beta2] = o.betas;
    at::Tensor param = item.param, m = item.exp_avg, v = item.exp_avg_sq, count = item.step;
    const at::Tensor grad = grad_of(item) * clip_[0];
    count += 1;
    const double step = count.item<double>();
    m.lerp_(grad, 1 - beta1);
    v.mul_(beta2).addcmul_(grad, grad, 1 - beta2);
    const at::Tensor denominator =
        v.sqrt().mul_(1 / std::sqrt(1 - std::pow(beta2, step))).add_(o.eps);
    param.mul_(1 - o.lr * o.weight_decay);
    param.addcdiv_(m, denominator, -o.lr / (1 - std::pow(beta1, step)));
    if (item.shadow.defined()) at::Tensor(item.shadow).copy_(param);
  }
}

void AdamWPass::build_tables() {
  std::vector<cuda::AdamTensor> tensors;
  std::vector<cuda::AdamChunk> chunks;
  built_for_.clear();
  for (const auto& item : items_) {
    const at::Tensor& grad = grad_of(item);
    built_for_.push_back(grad.const_data_ptr());
    cuda::AdamTensor t{.param = pointer<float>(item.param),
                       .grad = grad.const_data_ptr<float>(),
                       .exp_avg = pointer<float>(item.exp_avg),
                       .exp_avg_sq = pointer<float>(item.exp_avg_sq),
                       .shadow = pointer<void>(item.shadow),
                       .step = pointer<float>(item.step),
                       .size = item.param.numel(),
                       .group = static_cast<std::int32_t>(item.group),
                       .aligned = 0};
    t.aligned = aligned(t.param) && aligned(t.grad) && aligned(t.exp_avg) &&
                aligned(t.exp_avg_sq) && aligned(t.shadow);
    for (std::int32_t i = 0; i * cuda::kAdamChunk < t.size; ++i)
      chunks.push_back({static_cast<std::int32_t>(tensors.size()), i});
    tensors.push_back(t);
  }
  const c10::Device device = norm_.device();
  tensors_ = upload(tensors, device);
  chunks_ = upload(chunks, device);
  partials_ = at::empty({static_cast<std::int64_t>(chunks.size())}, norm_.options());
  factors_ = at::empty({static_cast<std::int64_t>(tensors.size() * sizeof(cuda::AdamFactors))},
                       norm_.options().dtype(at::kByte));
}

bool AdamWPass::step_with_kernels(const at::Tensor& grad_scale) {
  const cuda::Table* const table = norm_.is_cuda() ? cuda::table() : nullptr;
  if (table == nullptr) return false;
  bool same = built_for_.size() == items_.size();
  for (std::size_t i = 0; same && i < items_.size(); ++i)
    same = grad_of(items_[i]).const_data_ptr() == built_for_[i];
  if (!same) build_tables();
  if (grad_scale.defined() && (grad_scale.scalar_type() != at::kFloat || !grad_scale.is_cuda()))
    throw UsageError(kAdamWPass, "grad_scale must be one float on {}.", norm_.device().str());
  const c10::DeviceGuard guard(norm_.device());
  const int status = table->adamw({.tensors = pointer<const cuda::AdamTensor>(tensors_),
                                   .groups = pointer<const cuda::AdamGroup>(group_values_),
                                   .chunks = pointer<const cuda::AdamChunk>(chunks_),
                                   .partials = pointer<float>(partials_),
                                   .factors = pointer<cuda::AdamFactors>(factors_),
                                   .grad_scale = pointer<const float>(grad_scale),
                                   .max_norm = pointer<const float>(max_norm_),
                                   .norm = pointer<float>(norm_),
                                   .found_inf = pointer<float>(found_inf_),
                                   .clip = pointer<float>(clip_),
                                   .tensor_count = static_cast<int>(items_.size()),
                                   .chunk_count = static_cast<int>(partials_.numel())},
                                  table->current_stream(norm_.device().index()));
  if (status != 0)
    throw Error(kAdamWPass, fmt::format("the CUDA kernel failed on {} ({}). An earlier operation "
                                        "on this device has probably failed. Run with "
                                        "CUDA_LAUNCH_BLOCKING=1.",
                                        norm_.device().str(), table->error_text(status)));
  return true;
}

}  // namespace lockstep::optim
