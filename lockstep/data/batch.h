// What a dataset gives (Example) and what a training step takes (Batch).
//
// A batch knows how much is in it. samples() and `tokens` weight losses and metrics over ranks, and
// both are counted on the CPU before the batch moves to a device, so that nobody has to ask the
// device.
//
//   for (auto& batch : loader.epoch(0)) {
//     auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
//     total += loss.detach() * batch.samples();
//   }
//
// Plain values: copies share the tensors' memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace lockstep::data {

// The target that losses leave out (torch's ignore_index).
constexpr std::int64_t kIgnoredTarget = -100;

// One sample. The target may be undefined.
struct Example {
  at::Tensor data{};
  at::Tensor target{};
  std::int64_t index = -1;  // in the dataset; the loader sets it before it collates
};

struct Batch {
  at::Tensor data{};
  at::Tensor target{};
  std::vector<std::int64_t> indices{};  // the samples' indices in the dataset
  // What a mean over tokens divides by: targets that are not kIgnoredTarget where each sample has a
  // sequence of integer targets, otherwise the number of samples.
  std::int64_t tokens = 0;

  std::int64_t samples() const { return static_cast<std::int64_t>(indices.size()); }
  // The same batch with its tensors on the device; itself where they already are.
  Batch to(c10::Device device, bool non_blocking = false) const;
};

// Stacks samples of one shape along a new first dimension, and counts tokens; `indices` stays
// empty. Throws UsageError naming the first two samples whose shapes differ.
Batch stack(const std::vector<Example>& examples);

// How many tokens a batch of `samples` with this target holds, as `Batch::tokens` says. The target
// must be on the CPU.
std::int64_t count_tokens(const at::Tensor& target, std::int64_t samples);

}  // namespace lockstep::data
