// Shared by the modules of a decoder: the settings of one forward, the construction of layers, and
// the tables of rotary positions. Internal.
//
//   const Linear gate = make_linear(spec.mlp.in[0], parameters);
//   const at::Tensor y = activate(spec.mlp.activation, gate->forward(x));
//
//   RotaryAngles angles(*spec.rotary);
//   const auto [cos, sin] = angles.find({.past = 0, .time = 128, .like = queries.options()});
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "lockstep/models/linear.h"
#include "lockstep/models/model_options.h"
#include "lockstep/models/spec.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/nn/tensor_group.h"

namespace lockstep::models::detail {

// The tokens that a token attends to: all before it, or those of a mask.
struct Sight {
  bool causal = true;  // false and no mask: every token sees all of the cache
  at::Tensor mask{};   // bool [time, cache and time], where `causal` does not say it
};

// The settings and tables that all blocks share in one forward.
struct Pass {
  bool fused = false;  // by lockstep::nn; never with a cache
  KvCache* cache = nullptr;
  std::map<std::int64_t, Sight> sights{};  // by window; 0: without one
  at::Tensor cos{};                        // rotary angles [time, rotated width]; of the fused path
  at::Tensor sin{};                        // half as wide
  at::ScalarType type = at::kFloat;        // in which blocks of the fused path compute
  bool router_logits = false;              // blocks with experts leave theirs in the stream
  std::optional<nn::Fp8Recipe> fp8{};      // of the linear layers in blocks; never with a cache
  bool owns_memory = true;                 // false: parameters come and go, or are slices
  nn::TensorGroupPtr tensor{};             // null: parameters are whole
  // The length of a sequence that ranks divide in the stream; 0: each has all of it.
  std::int64_t sequence = 0;
  BlockParts again{};                    // what backward computes again, where gradients are wanted
  const BlockRunner* segment = nullptr;  // runs such a part

  // `to` where fp8 needs the largest magnitude of a layer's input, otherwise null.
  at::Tensor* amax_to(at::Tensor& to) const {
    // If ranks divide the sequence, a norm sees only the largest magnitude of its part.
    return fused && fp8 == nn::Fp8Recipe::kTensorwise && sequence == 0 ? &to : nullptr;
  }
};

// A Linear whose tensors are drawn, or left for loading, as `parameters` says.
Linear make_linear(const Projection& projection, const ParameterOptions& parameters,
                   bool adaptable = true);
at::Tensor activate(Activation activation, const at::Tensor& x);
void draw(at::Tensor weight, double deviation);

// The type of autocasting on the device, where it is on.
at::ScalarType compute_type(c10::Device device, at::ScalarType otherwise);

struct RotaryPositions {
  std::int64_t past = 0;     // the first position
  std::int64_t time = 0;     // how many
  at::TensorOptions like{};  // type and device of the tables
  bool halves = false;       // the angles once, as nn::rope takes them; otherwise for both halves
};

// Cosine and sine of every position's angles. A table is made once and never replaced: a CUDA graph
// recorded with it reads it in every replay, whatever lengths are used in between. Its length is a
// power of two, so there are few tables. One thread at a time.
class RotaryAngles {
 public:
  explicit RotaryAngles(const Rotary& rotary);

  // Cosine and sine, each [time, rotated width] or, with `halves`, half as wide. Views of a table
  // that lives as long as this object.
  std::pair<at::Tensor, at::Tensor> find(const RotaryPositions& positions);

 private:
  // Device, type, length, whether it is beyond the original positions, and halves.
  using Key = std::tuple<std::string, at::ScalarType, std::int64_t, bool, bool>;

  RopeConfig rope_;
  at::Tensor frequencies_;       // float32, on the CPU
  at::Tensor long_frequencies_;  // of longrope
  // Not registered as buffers: they are neither saved nor converted.
  std::map<Key, std::pair<at::Tensor, at::Tensor>> tables_;
};

}  // namespace lockstep::models::detail
