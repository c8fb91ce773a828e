#include "lockstep/nn/on_cuda.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <atomic>
#include <cstdint>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::nn::detail {
namespace {

std::atomic<std::int64_t> started{0};

bool has_type(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kBFloat16 || type == at::kHalf || type == at::kFloat;
}

bool is_covered(const at::Tensor& tensor) {
  return has_type(tensor) && tensor.numel() > 0 && tensor.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

const kernels::cuda::Table* kernels_or_message() {
  const auto* const table = kernels::cuda::table();
  if (table == nullptr) {
    static const bool once = [] {
      log::warning("nn",
                   "CUDA tensors are computed by ATen's operations, because our kernels are not "
                   "there: {}. Build with nvcc, or set LOCKSTEP_CUDA_PLUGIN to the path of "
                   "liblockstep_cuda.so.",
                   kernels::cuda::unavailable_reason());
      return true;
    }();
    static_cast<void>(once);
  }
  return table;
}

}  // namespace

OnCuda::OnCuda(const kernels::cuda::Table* table, c10::Device device)
    : table_(table),
      device_(device),
      guard_(device),
      stream_(table->current_stream(device.index())) {}

std::unique_ptr<const OnCuda> OnCuda::with(std::initializer_list<at::Tensor> tensors) {
  const at::Tensor* first = nullptr;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (first == nullptr) first = &tensor;
    if (!tensor.is_cuda() || tensor.device() != first->device() || !is_covered(tensor))
      return nullptr;
  }
  if (first == nullptr) return nullptr;
  const auto* const table = kernels_or_message();
  if (table == nullptr) return nullptr;
  return std::unique_ptr<const OnCuda>(new OnCuda(table, first->device()));
}

at::Tensor OnCuda::floats(std::int64_t count) const {
  return at::empty({count}, at::TensorOptions(device_).dtype(at::kFloat));
}

at::Tensor OnCuda::bytes(std::int64_t count) const {
  return at::empty({count}, at::TensorOptions(device_).dtype(at::kByte));
}

void OnCuda::check(int status, const char* what) const {
  if (status == 0) {
    started.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  throw Error("nn", fmt::format("the CUDA kernel of {} failed on {} ({}). An earlier operation on "
                                "this device has probably failed. Run with CUDA_LAUNCH_BLOCKING=1.",
                                what, device_.str(), table_->error_text(status)));
}

std::int64_t OnCuda::kernels_started() {
  return started;
}

Type type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return Type::kBfloat16;
    case at::kHalf:
      return Type::kHalf;
    default:
      LOCKSTEP_ASSERT(tensor.scalar_type() == at::kFloat);
      return Type::kFloat;
  }
}

at::Tensor amax_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return at::zeros({1}, tensor.options().dtype(at::kFloat));
  return tensor.abs().amax().to(at::kFloat).view({1});
}

std::uint32_t* zeroed_amax(at::Tensor* amax, const at::Tensor& like) {
  if (amax == nullptr) return nullptr;
  *amax = at::zeros({1}, like.options().dtype(at::kFloat));  // the bits of 0.0 are zero
  return static_cast<std::uint32_t*>(amax->mutable_data_ptr());
}

const void* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

void* mutable_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

at::ScalarType sum_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor or_none(const at::Tensor& tensor) {
  static const at::Tensor none = at::empty({0});
  return tensor.defined() ? tensor : none;
}

at::Tensor from_none(const at::Tensor& tensor) {
  return tensor.dim() == 1 && tensor.size(0) == 0 ? at::Tensor() : tensor;
}

at::Tensor flat(const at::Tensor& tensor) {
  const std::int64_t columns = tensor.size(-1);
  return tensor.reshape({columns == 0 ? 0 : tensor.numel() / columns, columns});
}

void require(bool ok, const char* who, const char* what, const at::Tensor& a, const at::Tensor& b) {
  if (ok) return;
  const auto described = [](const at::Tensor& t) {
    if (!t.defined()) return std::string("undefined");
    return fmt::format("{} [{}]", c10::toString(t.scalar_type()), fmt::join(t.sizes(), ", "));
  };
  throw UsageError(who, "{} (got {} and {}). Check the shapes and dtypes of what is passed.", what,
                   described(a), described(b));
}

at::Tensor column_sum(const at::Tensor& x) {
  if (const auto cuda = OnCuda::with({x}); cuda && x.size(1) % 8 == 0) {
    const auto columns = static_cast<int>(x.size(1));
    const at::Tensor sum = cuda->floats(columns);
    const at::Tensor partials = cuda->floats(cuda->table().column_sum_partials(x.size(0), columns));
    cuda->check(cuda->table().column_sum({.from = data(x),
                                          .to = sum.mutable_data_ptr<float>(),
                                          .partials = partials.mutable_data_ptr<float>(),
                                          .rows = x.size(0),
                                          .columns = columns,
                                          .type = type_of(x)},
                                         cuda->stream()),
                "column_sum");
    return sum;
  }
  return at::sum(x, {0}, /*keepdim=*/false, sum_type(x));
}

void scale_(const at::Tensor& tensor, const at::Tensor& factor) {
  if (const auto cuda = OnCuda::with({tensor})) {
    const at::Tensor by = factor.to(at::kFloat);
    cuda->check(cuda->table().scale(mutable_data(tensor), tensor.numel(), type_of(tensor),
                                    by.const_data_ptr<float>(), cuda->stream()),
                "scale");
    return;
  }
  if (tensor.is_cpu() && factor.item<double>() == 1) return;
  tensor.mul_(factor);
}

}  // namespace lockstep::nn::detail
