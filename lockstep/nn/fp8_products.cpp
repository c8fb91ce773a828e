#include "lockstep/nn/fp8_products.h"

#include <ATen/ATen.h>

#include <map>
#include <mutex>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/nn/on_cuda.h"
#include "lockstep/nn/products.h"

namespace lockstep::nn {
namespace {

// By cuBLASLt, which adds to what is there and can write float; by tensor alone.
bool product_on_cuda(const Fp8Matrix& a, const Fp8Matrix& b, const at::Tensor& to,
                     const detail::Fp8Extras& extras) {
  const auto cuda = detail::OnCuda::with({to, extras.bias});
  if (!cuda || a.scale.numel() != 1 || b.scale.numel() != 1) return false;
  const at::Tensor workspace = cuda->bytes(detail::kWorkspaceBytes);
  int status = 0;
  const bool covered = cuda->table().gemm(
      {.a = {detail::data(a.values), a.values.size(1), false,
             detail::fp8_kind(a.values.scalar_type()), a.scale.const_data_ptr<float>()},
       .b = {detail::data(b.values), b.values.size(1), true,
             detail::fp8_kind(b.values.scalar_type()), b.scale.const_data_ptr<float>()},
       .d = detail::mutable_data(to),
       .bias = detail::data(extras.bias),
       .aux = nullptr,
       .workspace = detail::mutable_data(workspace),
       .workspace_bytes = static_cast<std::size_t>(detail::kWorkspaceBytes),
       .m = a.values.size(0),
       .n = b.values.size(0),
       .k = a.values.size(1),
       .beta = extras.add ? 1.0f : 0.0f,
       .epilogue =
           extras.bias.defined() ? kernels::cuda::Epilogue::kBias : kernels::cuda::Epilogue::kNone,
       .type = detail::type_of(to),
       .d_type = detail::type_of(to),
       .fast_accumulation = extras.fast},
      cuda->stream(), &status);
  if (covered) cuda->check(status, "an fp8 product");
  return covered;
}

// With the bias. By row a GPU's product is bfloat16: the library has no other.
at::Tensor product_aten(const Fp8Matrix& a, const Fp8Matrix& b, at::ScalarType type,
                        const detail::Fp8Extras& extras) {
  const at::Tensor& bias = extras.bias;
  if (a.values.is_cuda()) {
    const bool by_row = a.scale.numel() != 1 || b.scale.numel() != 1;
    const at::ScalarType made = by_row ? at::kBFloat16 : type;
    const at::Tensor product = at::_scaled_mm(
        a.values, b.values.t(), a.scale, by_row ? b.scale.t() : b.scale, {}, {}, made, extras.fast);
    return bias.defined() ? (product + bias).to(type) : product.to(type);
  }
  // The products of values are exact in float.
  at::Tensor sums = at::mm(a.values.to(at::kFloat), b.values.to(at::kFloat).t());
  sums.mul_(a.scale * b.scale.t());
  if (bias.defined()) sums.add_(bias);
  return sums.to(type);
}

bool has_fp8(c10::Device device) {
  static std::mutex mutex;
  static std::map<int, int> capabilities;
  const auto* const table = kernels::cuda::table();
  if (table == nullptr) return true;  // ATen says what it cannot do
  const std::lock_guard lock(mutex);
  const auto [at, fresh] = capabilities.try_emplace(device.index(), 0);
  if (fresh) at->second = table->compute_capability(device.index());
  return at->second >= 89;
}

}  // namespace

namespace detail {

void fp8_product(const Fp8Matrix& a, const Fp8Matrix& b, at::Tensor to, const Fp8Extras& extras) {
  if (to.numel() == 0) return;
  if (a.values.numel() != 0 && product_on_cuda(a, b, to, extras)) return;
  const at::Tensor product = product_aten(a, b, to.scalar_type(), extras);
  if (extras.add)
    to.add_(product);
  else
    to.copy_(product);
}

void check_fp8_device(const char* who, const at::Tensor& x) {
  if (x.is_cuda()) {
    if (has_fp8(x.device())) return;
    throw UsageError(who,
                     "{} has no fp8 arithmetic: it begins with compute capability 8.9 (Ada, "
                     "Hopper, Blackwell). Use mixed_precision: bf16.",
                     x.device().str());
  }
  static const bool once = [] {
    log::info("fp8",
              "fp8 on the CPU is computed in float by its definition: it saves neither time nor "
              "memory");
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace detail

}  // namespace lockstep::nn
