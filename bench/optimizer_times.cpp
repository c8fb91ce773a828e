#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "bench/ablation.h"
#include "bench/bench.h"
#include "bench/stats.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/sgd.h"

namespace lockstep::bench {
namespace {

constexpr double kLr = 1e-3, kDecay = 0.1;
constexpr int kWarmup = 3, kSamples = 9;
// Relative to how far three steps move a parameter: the two round at different places.
constexpr double kTolerance = 1e-3;

std::vector<at::Tensor> make_parameters(const OptimizerQuestion& question) {
  torch::manual_seed(0);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : question.shapes) {
    at::Tensor parameter = torch::randn(shape).to(c10::Device(question.device)).requires_grad_();
    parameter.mutable_grad() = torch::randn(shape).to(parameter.device());
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

std::unique_ptr<torch::optim::Optimizer> make_fused(const std::string& name,
                                                    const std::vector<at::Tensor>& parameters) {
  if (name == "sgd")
    return std::make_unique<optim::SGD>(
        parameters, optim::SGDOptions{.lr = kLr, .momentum = 0.9, .weight_decay = kDecay});
  if (name == "adam")
    return std::make_unique<optim::Adam>(parameters,
                                         optim::AdamOptions{.lr = kLr, .weight_decay = kDecay});
  return std::make_unique<optim::AdamW>(parameters,
                                        optim::AdamWOptions{.lr = kLr, .weight_decay = kDecay});
}

std::unique_ptr<torch::optim::Optimizer> make_unfused(const std::string& name,
                                                      const std::vector<at::Tensor>& parameters) {
  if (name == "sgd")
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(kLr).momentum(0.9).weight_decay(kDecay));
  if (name == "adam")
    return std::make_unique<torch::optim::Adam>(
        parameters, torch::optim::AdamOptions(kLr).weight_decay(kDecay));
  return std::make_unique<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(kLr).weight_decay(kDecay));
}

double step_ms(torch::optim::Optimizer& optimizer, const at::Tensor& last) {
  const auto start = std::chrono::steady_clock::now();
  optimizer.step();
  if (last.is_cuda()) torch::cuda::synchronize();
  const auto end = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::milli>(end - start).count();
}

void compare(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
             const std::vector<at::Tensor>& start) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double apart = (a[i] - b[i]).norm().item<double>();
    const double moved = (a[i] - start[i]).norm().item<double>();
    if (!(apart <= kTolerance * moved))
      throw Error("bench", fmt::format("the fused and the unfused optimizer move parameter {} "
                                       "differently: by {:.3g}, {:.3g} apart",
                                       i, moved, apart));
  }
}

}  // namespace

OptimizerTimes optimizer_times(const OptimizerQuestion& question) {
  prepare_device(question.device);
  torch::set_num_threads(question.threads);
  const std::vector<at::Tensor> ours = make_parameters(question), other = make_parameters(question),
                                start = make_parameters(question);
  const auto fused = make_fused(question.optim, ours);
  const auto unfused = make_unfused(question.optim, other);
  for (int i = 0; i < kWarmup; ++i) {
    fused->step();
    unfused->step();
  }
  compare(ours, other, start);
  std::vector<double> fused_ms, unfused_ms;
  for (int i = 0; i < kSamples; ++i) {
    fused_ms.push_back(step_ms(*fused, ours.back()));
    unfused_ms.push_back(step_ms(*unfused, other.back()));
  }
  return {.fused_ms = median(fused_ms), .unfused_ms = median(unfused_ms)};
}

}  // namespace lockstep::bench
