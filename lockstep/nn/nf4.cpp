#include "lockstep/nn/nf4.h"

#include <ATen/ATen.h>
#include <ATen/TensorIterator.h>

#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/kernels/nf4.h"
#include "lockstep/nn/on_cuda.h"

namespace lockstep::nn {
namespace {

using kernels::Nf4Layout;

// Calls body(groups) with some groups at a time, on the threads of LibTorch. at::parallel_for is
// compiled into its caller, and forks only where that is built with OpenMP; an iterator over as
// many bytes, which nobody touches, forks inside LibTorch.
template <typename Body>
void over_groups(const Nf4Layout& layout, const Body& body) {
  constexpr std::int64_t kFewest = 4;
  const at::Tensor units = at::empty({layout.groups}, at::kByte);
  const auto* const start = static_cast<const char*>(units.const_data_ptr());
  at::TensorIterator::borrowing_nullary_op(units).for_each(
      [&](char** data, const std::int64_t*, std::int64_t size, std::int64_t) {
        const std::int64_t begin = data[0] - start;
        body({begin, begin + size});
      },
      kFewest);
}

}  // namespace

std::vector<std::int64_t> nf4_sizes(std::int64_t out, std::int64_t in) {
  return {out, (Nf4Layout(out * in).bytes + out - 1) / out};
}

at::Tensor to_nf4(const at::Tensor& weight) {
  const at::Tensor from = weight.detach().to(at::kCPU, at::kFloat).contiguous();
  const Nf4Layout layout(from.numel());
  const at::Tensor bytes = at::zeros(nf4_sizes(from.size(0), from.size(1)), at::kByte);
  const at::Tensor magnitudes = at::empty({layout.blocks}, at::kFloat);
  auto* const to = bytes.mutable_data_ptr<std::uint8_t>();
  auto* const largest = magnitudes.mutable_data_ptr<float>();
  over_groups(layout, [&](kernels::Nf4Groups groups) {
    kernels::nf4_encode(from.const_data_ptr<float>(), layout, groups, to, largest);
  });
  if (!magnitudes.isfinite().all().item<bool>())
    throw UsageError("nf4",
                     "a weight of {} outputs and {} inputs has values that are not finite, which "
                     "4 bits do not hold. Check the file that it was read from.",
                     from.size(0), from.size(1));
  kernels::nf4_encode_magnitudes(largest, layout, to);
  return bytes;
}

at::Tensor from_nf4(const at::Tensor& bytes, std::int64_t in, at::ScalarType type) {
  detail::require(is_nf4(bytes) && bytes.dim() == 2 && bytes.is_contiguous() &&
                      bytes.sizes() == nf4_sizes(bytes.size(0), in),
                  "nf4", "the weight is not what to_nf4 makes of one with these inputs", bytes);
  const Nf4Layout layout(bytes.size(0) * in);
  const auto* const from = bytes.const_data_ptr<std::uint8_t>();
  const bool wide = type != at::kBFloat16 && type != at::kHalf;
  const at::Tensor to = at::empty(
      {bytes.size(0), in}, bytes.options().dtype(bytes.is_cuda() && !wide ? type : at::kFloat));
  if (!bytes.is_cuda()) {
    over_groups(layout, [&](kernels::Nf4Groups groups) {
      kernels::nf4_decode(from, layout, groups, to.mutable_data_ptr<float>());
    });
    return to.to(type);
  }
  const auto cuda = detail::OnCuda::with({to});
  if (!cuda)
    throw UsageError("nf4",
                     "weights in 4 bits are decoded by Lockstep's CUDA kernels, which are not in "
                     "this process. Build with nvcc, or delete load_in_4bit.");
  cuda->check(cuda->table().nf4_decode({.from = from,
                                        .to = detail::mutable_data(to),
                                        .count = layout.count,
                                        .type = detail::type_of(to)},
                                       cuda->stream()),
              "nf4_decode");
  return to.to(type);
}

}  // namespace lockstep::nn
