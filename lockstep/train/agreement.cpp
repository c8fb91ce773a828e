#include "lockstep/train/agreement.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>

#include "lockstep/comm/device.h"

namespace lockstep::train {
namespace {

constexpr std::size_t kStepFlags = 9;
using Numbers = std::array<std::int32_t, kStepFlags>;

Numbers numbers_of(const StepFlags& flags) {
  return {flags.stop_signal, flags.stop,   flags.save,      flags.evaluate,     flags.out_of_memory,
          flags.alert,       flags.saving, flags.data_wait, flags.communication};
}

StepFlags flags_of(const at::Tensor& numbers) {
  const auto* n = numbers.const_data_ptr<std::int32_t>();
  return {.stop_signal = n[0],
          .stop = n[1] != 0,
          .save = n[2] != 0,
          .evaluate = n[3] != 0,
          .out_of_memory = n[4] != 0,
          .alert = n[5] != 0,
          .saving = n[6] != 0,
          .data_wait = n[7],
          .communication = n[8]};
}

at::Tensor tensor_of(const StepFlags& flags) {
  Numbers numbers = numbers_of(flags);
  return at::from_blob(numbers.data(), {static_cast<std::int64_t>(kStepFlags)}, at::kInt).clone();
}

}  // namespace

// An answer on its way to the host.
struct Agreement::Pending {
  at::Tensor host;
  std::unique_ptr<c10::Event> arrived;
};

Agreement::Agreement(World world) : world_(std::move(world)) {}
Agreement::~Agreement() = default;

StepFlags Agreement::exchange_now(const StepFlags& mine) {
  if (world_.size() == 1) return mine;
  at::Tensor numbers = tensor_of(mine).to(world_.device());
  world_.all_reduce(numbers, ReduceOp::kMax).wait();
  const DeviceWait wait(world_.device());
  return flags_of(numbers.cpu());
}

StepFlags Agreement::exchange(const StepFlags& mine) {
  if (world_.size() == 1 || world_.device().is_cpu()) return exchange_now(mine);
  const c10::Device device = world_.device();
  at::Tensor numbers = tensor_of(mine).pin_memory().to(device, /*non_blocking=*/true);
  world_.all_reduce(numbers, ReduceOp::kMax).wait();
  auto next = std::make_unique<Pending>();
  next->host = at::empty({static_cast<std::int64_t>(kStepFlags)},
                         at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  next->host.copy_(numbers, /*non_blocking=*/true);
  next->arrived = std::make_unique<c10::Event>(device.type());
  next->arrived->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  StepFlags agreed;
  if (pending_) {
    const DeviceWait wait(device);
    pending_->arrived->synchronize();  // enqueued a step ago, so it has long arrived
    agreed = flags_of(pending_->host);
  }
  pending_ = std::move(next);
  return agreed;
}

}  // namespace lockstep::train
