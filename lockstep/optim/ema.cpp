#include "lockstep/optim/ema.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/nn/divided.h"

namespace lockstep::optim {
namespace {

constexpr const char* kEma = "Ema";
constexpr const char* kUpdates = "updates";

at::Tensor start_of(const at::Tensor& live, bool copied) {
  const bool short_float = live.scalar_type() == at::kHalf || live.scalar_type() == at::kBFloat16;
  const at::Tensor values = live.detach();
  return !copied && short_float ? values.to(at::kFloat) : values.clone();
}

}  // namespace

Ema::Ema(const torch::nn::Module& module, const EmaOptions& options) : options_(options) {
  if (!(options_.decay >= 0) || !(options_.decay < 1))
    throw UsageError(kEma, "decay = {} is not an average. It must be from 0 to below 1.",
                     options_.decay);
  const torch::NoGradGuard no_grad;
  std::unordered_set<at::TensorImpl*> seen;
  const auto add = [&](const std::string& name, const at::Tensor& live, bool copied) {
    if (!live.defined() || !seen.insert(live.unsafeGetTensorImpl()).second) return;
    nn::check_whole(name, live);
    entries_.push_back({name, live, start_of(live, copied), copied});
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value(), false);
  for (const auto& item : module.named_buffers()) add(item.key(), item.value(), true);
}

void Ema::update() {
  if (swapped_)
    throw UsageError(
        kEma,
        "update() was called while the averages are swapped in. They would be averaged "
        "with themselves. End the swap first.");
  const torch::NoGradGuard no_grad;
  const double n = static_cast<double>(updates_);
  const double decay =
      options_.warmup ? std::min(options_.decay, (1 + n) / (10 + n)) : options_.decay;
  std::vector<at::Tensor> averages, lives;
  for (auto& entry : entries_) {
    if (entry.copied) {
      entry.average.copy_(entry.live);
      continue;
    }
    averages.push_back(entry.average);
    lives.push_back(entry.live.detach().to(entry.average.scalar_type()));
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, lives, 1 - decay);
  ++updates_;
}

void Ema::show_averages() {
  for (auto& entry : entries_) {
    entry.aside = entry.live.detach();
    entry.live.set_data(entry.average.to(entry.live.scalar_type()));
  }
}

void Ema::show_weights() noexcept {
  for (auto& entry : entries_) {
    if (!entry.aside.defined()) continue;
    try {
      entry.live.set_data(entry.aside);
    } catch (const std::exception& e) {
      log::warning(kEma, "'{}' keeps its average: {}", entry.name, e.what());
    }
    entry.aside = at::Tensor();
  }
}

Ema::Swapped::Swapped(Ema& ema) : ema_(ema) {
  if (ema_.swapped_)
    throw UsageError(kEma, "the averages are already swapped in. End that swap first.");
  ema_.swapped_ = true;
  try {
    ema_.show_averages();
  } catch (...) {
    ema_.show_weights();
    ema_.swapped_ = false;
    throw;
  }
}

Ema::Swapped::~Swapped() {
  ema_.show_weights();
  ema_.swapped_ = false;
}

std::map<std::string, at::Tensor> Ema::state_dict() const {
  std::map<std::string, at::Tensor> state;
  for (const auto& entry : entries_)
    state[entry.name] = entry.average.to(at::kCPU, entry.average.scalar_type(), false, true);
  state[kUpdates] = at::scalar_tensor(updates_, at::kLong);
  return state;
}

void Ema::load_state_dict(const std::map<std::string, at::Tensor>& state) {
  if (swapped_) throw UsageError(kEma, "the averages are swapped in. End the swap, then load.");
  const auto find = [&](const std::string& name, at::IntArrayRef sizes) -> const at::Tensor& {
    const auto found = state.find(name);
    if (found == state.end())
      throw UsageError(kEma, "the state has no '{}'. It belongs to another model.", name);
    if (found->second.sizes() != sizes)
      throw UsageError(kEma,
                       "'{}' has shape [{}] in the state, but the model has [{}]. The state "
                       "belongs to another model.",
                       name, fmt::join(found->second.sizes(), ", "), fmt::join(sizes, ", "));
    return found->second;
  };
  std::unordered_set<std::string> known{kUpdates};
  for (const auto& entry : entries_) {
    find(entry.name, entry.average.sizes());
    known.insert(entry.name);
  }
  const std::int64_t updates = find(kUpdates, {}).item<std::int64_t>();
  for (const auto& [name, tensor] : state)
    if (!known.contains(name))
      throw UsageError(kEma, "the state holds '{}', which the model does not have.", name);
  const torch::NoGradGuard no_grad;
  for (auto& entry : entries_) entry.average.copy_(state.at(entry.name));
  updates_ = updates;
}

}  // namespace lockstep::optim
