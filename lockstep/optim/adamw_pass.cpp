#include "lockstep/optim/adamw_pass.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/kernels/cuda/table.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/cpu_step.h"
#include "lockstep/optim/rule_state.h"

namespace lockstep::optim {
namespace {

namespace cuda = kernels::cuda;

constexpr const char* kAdamWPass = "AdamWPass";
constexpr std::size_t kGroupValues = sizeof(cuda::AdamGroup) / sizeof(float);

// In the order of AdamGroup.
std::array<double, kGroupValues> values_of(const AdamWOptions& o) {
  return {o.lr, o.betas.first, o.betas.second, o.eps, o.weight_decay};
}

void check_item(const AdamWItem& item, c10::Device device, std::size_t groups) {
  const auto fits = [&](const at::Tensor& t, at::ScalarType type) {
    return t.defined() && t.scalar_type() == type && t.device() == device && t.is_contiguous() &&
           t.sizes() == item.param.sizes();
  };
  const auto is_known = [](const at::Tensor& t) {
    return t.defined() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16);
  };
  const bool ok = is_known(item.param) && fits(item.param, item.param.scalar_type()) &&
                  is_known(item.exp_avg) && fits(item.exp_avg, item.exp_avg.scalar_type()) &&
                  fits(item.exp_avg_sq, item.exp_avg.scalar_type()) &&
                  (!item.grad.defined() || fits(item.grad, item.param.scalar_type())) &&
                  item.step.defined() && item.step.numel() == 1 &&
                  item.step.scalar_type() == at::kFloat && item.step.device() == device &&
                  item.group < groups;
  if (!ok)
    throw UsageError(kAdamWPass,
                     "an item does not fit: parameter, gradient and averages must be float or "
                     "bfloat16, of one shape, contiguous and on {}, step one float, and the group "
                     "one of {}. Convert the parameter, or use AdamW.",
                     device.str(), groups);
}

const at::Tensor& grad_of(const AdamWItem& item) {
  const at::Tensor& grad = item.grad.defined() ? item.grad : item.param.grad();
  if (!grad.defined() || grad.scalar_type() != item.param.scalar_type() || !grad.is_contiguous() ||
      grad.sizes() != item.param.sizes() || grad.device() != item.param.device())
    throw UsageError(kAdamWPass,
                     "a parameter of {} elements has no gradient of its own type and layout. Run "
                     "backward before step(), and leave frozen parameters out.",
                     item.param.numel());
  return grad;
}

// A parameter frozen after the pass was made has no gradient and is left unchanged.
bool is_frozen(const AdamWItem& item) {
  return !item.grad.defined() && !item.param.requires_grad() && !item.param.grad().defined();
}

// The bytes of an array on the host; pinned where a copy from there must not wait.
template <typename T>
at::Tensor bytes_of(const std::vector<T>& values, bool pinned) {
  const at::Tensor host = at::empty({static_cast<std::int64_t>(values.size() * sizeof(T))},
                                    at::TensorOptions(at::kByte).pinned_memory(pinned));
  if (!values.empty())
    std::memcpy(host.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  return host;
}

bool aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

template <typename T>
T* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

cuda::AdamTensor tensor_of(const AdamWItem& item) {
  cuda::AdamTensor t{.param = pointer<void>(item.param),
                     .grad = grad_of(item).const_data_ptr(),
                     .exp_avg = pointer<void>(item.exp_avg),
                     .exp_avg_sq = pointer<void>(item.exp_avg_sq),
                     .step = pointer<float>(item.step),
                     .size = item.param.numel(),
                     .begin = item.origin.begin,
                     .parameter = item.origin.parameter,
                     .group = static_cast<std::int32_t>(item.group),
                     .aligned = 0,
                     .bf16_param = item.param.scalar_type() == at::kBFloat16,
                     .bf16_state = item.exp_avg.scalar_type() == at::kBFloat16};
  t.aligned = aligned(t.param) && aligned(t.grad) && aligned(t.exp_avg) && aligned(t.exp_avg_sq);
  return t;
}

}  // namespace

AdamWPass::AdamWPass(std::vector<AdamWItem> items, std::vector<AdamWOptions> groups)
    : items_(std::move(items)), groups_(std::move(groups)) {
  const c10::Device device = items_.empty() || !items_[0].param.defined()
                                 ? c10::Device(c10::kCPU)
                                 : items_[0].param.device();
  for (const auto& item : items_) check_item(item, device, groups_.size());
  const auto floats = at::TensorOptions(device).dtype(at::kFloat);
  std::vector<float> values;
  for (const auto& group : groups_) {
    Rule(group)->check();
    for (const double value : values_of(group)) values.push_back(static_cast<float>(value));
  }
  group_values_ = at::tensor(values).view({-1, kGroupValues}).to(device);
  max_norm_ = at::zeros({1}, floats);
  norm_ = at::zeros({1}, floats);
  found_inf_ = at::zeros({1}, floats);
  clip_ = at::ones({1}, floats);
}

void AdamWPass::set_options(std::size_t group, const AdamWOptions& options) {
  detail::check_group(kAdamWPass, group, groups_.size());
  Rule(options)->check();
  const std::array<double, kGroupValues> before = values_of(groups_[group]);
  const std::array<double, kGroupValues> now = values_of(options);
  groups_[group] = options;
  // A number passed as a kernel argument: a copy from the host's memory would wait for the device.
  const at::Tensor there = group_values_[static_cast<std::int64_t>(group)];
  for (std::size_t i = 0; i < now.size(); ++i)
    if (now[i] != before[i]) there[static_cast<std::int64_t>(i)].fill_(now[i]);
}

void AdamWPass::set_max_norm(double max_norm) {
  if (!(max_norm >= 0))
    throw UsageError(kAdamWPass, "max_norm = {} must be positive, or 0 for no clipping.", max_norm);
  if (max_norm != bound_) max_norm_.fill_(max_norm);
  bound_ = max_norm;
}

void AdamWPass::step() {
  measure();
  update(found_inf_);
}

void AdamWPass::measure() {
  const at::NoGradGuard no_grad;
  if (items_.empty()) return;
  const cuda::Table* const table = norm_.is_cuda() ? cuda::table() : nullptr;
  if (table == nullptr) {
    measure_with_aten();
    return;
  }
  const c10::DeviceGuard guard(norm_.device());
  measured_ = &current_tables();
  check_status(
      table->adamw_norm(arguments(*measured_), table->current_stream(norm_.device().index())));
}

void AdamWPass::update(const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  if (items_.empty()) return;
  const cuda::Table* const table = norm_.is_cuda() ? cuda::table() : nullptr;
  if (table == nullptr && !norm_.is_cpu())
    throw UsageError(kAdamWPass,
                     "AdamW with state in bfloat16 needs our CUDA kernels on {}, and they are not "
                     "there: {}. Build with nvcc, or leave bf16_state out.",
                     norm_.device().str(), cuda::unavailable_reason());
  if (table == nullptr) {
    update_on_cpu(skip);
  } else {
    const c10::DeviceGuard guard(norm_.device());
    if (measured_ == nullptr) measured_ = &current_tables();
    cuda::AdamStep args = arguments(*measured_);
    args.skip = pointer<const float>(skip);
    check_status(table->adamw_update(args, table->current_stream(norm_.device().index())));
  }
  for (const auto& item : items_)
    if (!is_frozen(item)) item.param.unsafeGetTensorImpl()->bump_version();
}

// ---------------------------------------------------------------- on a CPU

void AdamWPass::measure_with_aten() {
  at::Tensor squares = at::zeros({1}, norm_.options().dtype(at::kDouble));
  for (const auto& item : items_)
    if (!is_frozen(item)) squares += grad_of(item).to(at::kDouble).square().sum();
  norm_.copy_(squares.sqrt());
  found_inf_.copy_(at::isfinite(norm_).logical_not());
  clip_.copy_(at::where(max_norm_ > 0, at::clamp_max(max_norm_ / (norm_ + 1e-6), 1.0),
                        at::ones_like(max_norm_)));
}

void AdamWPass::update_on_cpu(const at::Tensor& skip) {
  if (skip.defined() && skip.item<float>() != 0) return;
  for (const auto& item : items_) {
    if (is_frozen(item)) continue;
    check_item(item, norm_.device(), groups_.size());
    const cuda::AdamTensor tensor = tensor_of(item);
    *tensor.step += 1;
    const auto* const group = pointer<const cuda::AdamGroup>(group_values_) + item.group;
    const float clip = *clip_.const_data_ptr<float>();
    constexpr std::int64_t kUnit = 1024;
    detail::share_out(
        (tensor.size + kUnit - 1) / kUnit, kUnit, [&](std::int64_t begin, std::int64_t end) {
          kernels::adamw(tensor, *group, clip, begin * kUnit, std::min(end * kUnit, tensor.size));
        });
  }
}

// ---------------------------------------------------------------- with kernels

// Makes the tables, with their arrays on the host.
AdamWPass::Tables AdamWPass::make_tables(std::vector<const void*> made_for) const {
  std::vector<cuda::AdamTensor> tensors;
  std::vector<cuda::AdamChunk> chunks;
  for (const auto& item : items_) {
    if (is_frozen(item)) continue;
    const cuda::AdamTensor t = tensor_of(item);
    for (std::int32_t i = 0; i * cuda::kAdamChunk < t.size; ++i)
      chunks.push_back({static_cast<std::int32_t>(tensors.size()), i});
    tensors.push_back(t);
  }
  return {
      .tensors = bytes_of(tensors, !cuda::capturing()),
      .chunks = bytes_of(chunks, !cuda::capturing()),
      .partials = at::empty({static_cast<std::int64_t>(chunks.size())}, norm_.options()),
      .factors = at::empty({static_cast<std::int64_t>(tensors.size() * sizeof(cuda::AdamFactors))},
                           norm_.options().dtype(at::kByte)),
      .made_for = std::move(made_for)};
}

// Loading a model may give a parameter new memory (set_data), and so may backward a gradient; the
// step uses the current addresses.
std::vector<const void*> AdamWPass::addresses() const {
  std::vector<const void*> all;
  for (const auto& item : items_) {
    if (is_frozen(item)) continue;
    check_item(item, norm_.device(), groups_.size());
    for (const at::Tensor* tensor : {&item.param, &grad_of(item), &item.exp_avg, &item.exp_avg_sq})
      all.push_back(tensor->const_data_ptr());
  }
  return all;
}

AdamWPass::Tables& AdamWPass::current_tables() {
  std::vector<const void*> wanted = addresses();
  if (!cuda::capturing()) {
    if (wanted == tables_.made_for) return tables_;
    tables_ = make_tables(std::move(wanted));
    tables_.tensors = tables_.tensors.to(norm_.device(), /*non_blocking=*/true);
    tables_.chunks = tables_.chunks.to(norm_.device(), /*non_blocking=*/true);
    return tables_;
  }
  LOCKSTEP_ASSERT(spare_.tensors.defined());
  Tables& tables = captured_.emplace_back(make_tables(std::move(wanted)));
  const Tables there = std::exchange(spare_, {});
  cuda::after_capture([there, tensors = tables.tensors, chunks = tables.chunks] {
    // Shorter than the prepared arrays where parameters are frozen.
    there.tensors.narrow(0, 0, tensors.numel()).copy_(tensors);
    there.chunks.narrow(0, 0, chunks.numel()).copy_(chunks);
  });
  tables.tensors = there.tensors;
  tables.chunks = there.chunks;
  return tables;
}

void AdamWPass::prepare_capture() {
  if (spare_.tensors.defined() || !norm_.is_cuda()) return;
  std::int64_t chunks = 0;
  for (const auto& item : items_)
    chunks += (item.param.numel() + cuda::kAdamChunk - 1) / cuda::kAdamChunk;
  const auto bytes = [&](std::int64_t count, std::size_t size) {
    return at::empty({count * static_cast<std::int64_t>(size)}, norm_.options().dtype(at::kByte));
  };
  spare_.tensors = bytes(static_cast<std::int64_t>(items_.size()), sizeof(cuda::AdamTensor));
  spare_.chunks = bytes(chunks, sizeof(cuda::AdamChunk));
}

cuda::AdamStep AdamWPass::arguments(const Tables& tables) const {
  return {.tensors = pointer<const cuda::AdamTensor>(tables.tensors),
          .groups = pointer<const cuda::AdamGroup>(group_values_),
          .chunks = pointer<const cuda::AdamChunk>(tables.chunks),
          .partials = pointer<float>(tables.partials),
          .factors = pointer<cuda::AdamFactors>(tables.factors),
          .max_norm = pointer<const float>(max_norm_),
          .norm = pointer<float>(norm_),
          .found_inf = pointer<float>(found_inf_),
          .skip = nullptr,
          .clip = pointer<float>(clip_),
          .tensor_count =
              static_cast<int>(tables.factors.numel() / std::int64_t{sizeof(cuda::AdamFactors)}),
          .chunk_count = static_cast<int>(tables.partials.numel())};
}

void AdamWPass::check_status(int status) const {
  if (status == 0) return;
  throw Error(kAdamWPass, fmt::format("the CUDA kernel failed on {} ({}). An earlier operation "
                                      "on this device has probably failed. Run with "
                                      "CUDA_LAUNCH_BLOCKING=1.",
                                      norm_.device().str(), cuda::table()->error_text(status)));
}

}  // namespace lockstep::optim
