// auto_find_batch_size: one forward and backward on every rank, before the first step.

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/torch.h>

#include <vector>

#include "lockstep/core/log.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/effective_batch.h"
#include "lockstep/train/loop.h"
#include "lockstep/train/train_optimizer.h"

namespace lockstep::train {
namespace {

// As much as a step holds besides the batch, its activations and its gradients: the optimizer's
// state, and with several ranks the buckets. Nothing is written there.
std::vector<at::Tensor> memory_of_a_step(const RunContext& run) {
  std::vector<at::Tensor> held;
  for (const at::Tensor& state : state_of_a_run(run))
    held.push_back(at::empty_like(state, at::device(run.world.device())));
  for (const at::Tensor& parameter : run.task.module->parameters())
    if (run.batch_ranks() > 1 && parameter.requires_grad())
      held.push_back(at::empty_like(parameter));
  return held;
}

// One forward and backward on this rank alone; its side effects are undone.
bool batch_fits(const RunContext& run, std::int64_t batch_size) {
  torch::nn::Module& module = *run.task.module;
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : module.buffers()) buffers.push_back(buffer.clone());
  const optim::RngState random = optim::rng_state();
  bool fits = true;
  try {
    const auto held = memory_of_a_step(run);
    auto loader = data::loader(run.task.train_data, World{},
                               {.batch_size = batch_size,
                                .seed = data_seed(run.arguments),
                                .device = run.world.device(),
                                .check_ranks = false});
    auto batches = loader.epoch(0);
    if (const auto batch = batches.next()) run.forward(*batch).loss.backward();
  } catch (const std::bad_alloc&) {
    fits = false;
  } catch (const c10::Error& e) {
    if (!says_out_of_memory(e.what_without_backtrace())) throw;
    fits = false;
  }
  for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
  const torch::NoGradGuard no_grad;
  const auto now = module.buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) at::Tensor(now[i]).copy_(buffers[i]);
  optim::set_rng_state(random);
  return fits;
}

}  // namespace

void find_batch_size(RunContext& run, RunControl& control) {
  TrainingArguments& a = run.arguments;
  const int ranks = run.batch_ranks();
  run.task.module->train();
  for (;;) {
    const std::int64_t batch = a.per_device_train_batch_size;
    const std::int64_t window = batch * accumulation_steps(a, ranks);
    const bool fits = batch_fits(run, batch);
    if (!control.any_out_of_memory(!fits)) return;
    // Another rank on the GPU may need for the next trial what the allocator still holds from this
    // one.
    const at::Device device = run.world.device();
    if (!device.is_cpu()) c10::getDeviceAllocator(device.type())->emptyCache();
    if (batch == 1) run.out_of_memory("not even a batch of 1 fits");
    const std::int64_t smaller = smaller_batch(a, ranks);
    a.per_device_train_batch_size = smaller;
    if (!update_size(a)) a.gradient_accumulation_steps = window / smaller;
    if (run.world.is_leader())
      log::warning("trainer", "a batch of {} does not fit every rank's memory: {}", batch,
                   effective_batch_text(a, ranks));
  }
}

}  // namespace lockstep::train
