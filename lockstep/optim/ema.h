// Ema: a moving average of the weights, which often evaluates better than the last weights.
//
//   lockstep::optim::Ema ema{*net, {.decay = 0.999}};
//   optimizer.step();
//   ema.update();
//   { const auto averaged = ema.swap(); evaluate(net); }   // the model has the averages in here
//
// swap() exchanges the memory of the model's tensors and does not write their contents. So it
// copies nothing, is exact, is undone even by an exception, and does not count as a write to
// parameters that ranks share (Shard::kState).
//
// Buffers (BatchNorm's statistics) are copied as they are.
//
// All ranks have the same weights and thus the same averages, without communication. Holds the
// module's tensors, not the module. One thread at a time; no step while a swap lives.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::optim {

struct EmaOptions {
  double decay = 0.999;
  // Early averages forget faster: decay is at most (1 + updates) / (10 + updates).
  bool warmup = true;
};

class Ema {
 public:
  explicit Ema(const torch::nn::Module& module, const EmaOptions& options = {});

  void update();  // after each optimizer step
  std::int64_t updates() const { return updates_; }

  class [[nodiscard]] Swapped {
   public:
    explicit Swapped(Ema& ema);
    ~Swapped();
    Swapped(const Swapped&) = delete;
    Swapped& operator=(const Swapped&) = delete;

   private:
    Ema& ema_;
  };
  // Until the guard ends, the module has the averages. Throws UsageError inside another swap.
  Swapped swap() { return Swapped(*this); }

  // The averages by name, and "updates". Copies; load_state_dict throws UsageError for missing,
  // unknown and misshapen tensors before anything is changed.
  std::map<std::string, at::Tensor> state_dict() const;
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

 private:
  struct Entry {
    std::string name;
    at::Tensor live;
    at::Tensor average;  // float32 for weights of 16 bits: small changes would be lost in theirs
    bool copied;         // a buffer
    at::Tensor aside{};  // the live values during a swap
  };
  void show_averages();
  void show_weights() noexcept;

  EmaOptions options_;
  std::vector<Entry> entries_;
  std::int64_t updates_ = 0;
  bool swapped_ = false;
};

}  // namespace lockstep::optim
