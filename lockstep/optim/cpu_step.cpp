#include "lockstep/optim/cpu_step.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::optim::detail {
namespace {

// Elements that are never split over threads: 4 KiB of floats.
constexpr std::int64_t kUnit = 1024;

template <typename T>
struct ItemRun {
  SplitGradient gradient;
  Sources<T> sources;
  Memory<T> memory;
  std::int64_t size;
  double steps;
  std::int64_t end;  // in units, over all runs so far
};

template <typename T>
std::vector<ItemRun<T>> runs_of(const std::vector<CpuItem>& items) {
  std::vector<ItemRun<T>> runs;
  std::int64_t units = 0;
  for (const auto& item : items) {
    const std::int64_t size = item.param.numel();
    units += (size + kUnit - 1) / kUnit;
    SplitGradient gradient =
        item.split != nullptr ? *item.split : SplitGradient{.sources = {item.grad}};
    Sources<T> sources(gradient.sources);
    runs.push_back({std::move(gradient), std::move(sources), Memory<T>(item.param, item.state),
                    size, item.steps, units});
  }
  return runs;
}

template <typename T>
void step_typed(const std::vector<CpuItem>& items, const SpanKernels& kernels) {
  const std::vector<ItemRun<T>> runs = runs_of<T>(items);
  const kernels::SpanKernel<T> kernel = kernel_of<T>(kernels);
  share_out(runs.back().end, kUnit, [&](std::int64_t begin, std::int64_t end) {
    auto run =
        std::upper_bound(runs.begin(), runs.end(), begin,
                         [](std::int64_t unit, const ItemRun<T>& r) { return unit < r.end; });
    while (begin < end) {
      const std::int64_t first_unit = run->end - (run->size + kUnit - 1) / kUnit;
      const std::int64_t from = (begin - first_unit) * kUnit;
      const std::int64_t to = std::min((end - first_unit) * kUnit, run->size);
      const Sources<T> sources = run->sources.after(from);
      const Memory<T> memory = run->memory.after(from);
      kernel({.gradient = sources.gradient(run->gradient),
              .param = memory.param,
              .state = memory.state.data(),
              .slice = {run->size, from, to - from},
              .step = run->steps},
             kernels.options);
      begin = run->end;
      do {
        ++run;
      } while (run != runs.end() && run->size == 0);
    }
  });
}

}  // namespace

// at::parallel_for is compiled into its caller, and forks threads only if that is built with
// OpenMP, from the library that LibTorch uses. An iterator over that many bytes, which nobody
// touches, forks inside LibTorch instead.
void share_out(std::int64_t count, std::int64_t unit, Part body) {
  const std::int64_t fewest = std::max<std::int64_t>(at::internal::GRAIN_SIZE / unit, 1);
  if (count <= fewest || at::get_num_threads() == 1) return body(0, count);
  const at::Tensor units = at::empty({count}, at::kByte);
  const auto* const start = static_cast<const char*>(units.const_data_ptr());
  at::TensorIterator::borrowing_nullary_op(units).for_each(
      [&](char** data, const std::int64_t*, std::int64_t size, std::int64_t rows) {
        LOCKSTEP_ASSERT(rows == 1);
        const std::int64_t begin = data[0] - start;
        body(begin, begin + size);
      },
      fewest);
}

bool covered(const SpanKernels& kernels, const at::Tensor& param, const at::Tensor& grad,
             const StateTensors& state) {
  const c10::ScalarType dtype = param.scalar_type();
  const auto fits = [dtype](const at::Tensor& tensor) {
    return tensor.scalar_type() == dtype && has_kernel(dtype, tensor.device());
  };
  const bool has_one =
      dtype == at::kFloat ? kernels.float32 != nullptr : kernels.float64 != nullptr;
  return has_one && state.size() <= kMaxStates && fits(param) && fits(grad) &&
         std::all_of(state.begin(), state.end(), fits);
}

void step_on_cpu(const std::vector<CpuItem>& items, const SpanKernels& kernels) {
  const bool nothing = std::all_of(items.begin(), items.end(),
                                   [](const CpuItem& item) { return item.param.numel() == 0; });
  if (nothing) return;
  if (items[0].param.scalar_type() == at::kFloat) {
    step_typed<float>(items, kernels);
  } else {
    LOCKSTEP_ASSERT(items[0].param.scalar_type() == at::kDouble);
    step_typed<double>(items, kernels);
  }
}

}  // namespace lockstep::optim::detail
