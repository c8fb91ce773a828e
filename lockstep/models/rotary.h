// Tables of rotary positions: cosine and sine of every position's angles. Internal.
//
//   RotaryAngles angles(*spec.rotary);
//   const auto [cos, sin] = angles.find({.past = 0, .time = 128, .like = queries.options()});
//
// A table is made once and never replaced: a CUDA graph that was recorded with it reads it in every
// replay, whatever lengths come in between. It has the positions up to a power of two, so there are
// few of them. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "lockstep/models/spec.h"

namespace lockstep::models::detail {

struct RotaryPositions {
  std::int64_t past = 0;     // the first position
  std::int64_t time = 0;     // how many
  at::TensorOptions like{};  // type and device of the tables
  bool halves = false;       // the angles once, as nn::rope takes them; otherwise for both halves
};

class RotaryAngles {
 public:
  explicit RotaryAngles(const Rotary& rotary);

  // Cosine and sine, each [time, rotated width] or, with `halves`, half as wide. Parts of a table
  // that lives as long as this object.
  std::pair<at::Tensor, at::Tensor> find(const RotaryPositions& positions);

 private:
  // Device, type, length, whether it is beyond the original positions, and halves.
  using Key = std::tuple<std::string, at::ScalarType, std::int64_t, bool, bool>;

  RopeConfig rope_;
  at::Tensor frequencies_;       // float32, on the CPU
  at::Tensor long_frequencies_;  // of longrope
  // Tensors without a name: they are neither saved nor converted.
  std::map<Key, std::pair<at::Tensor, at::Tensor>> tables_;
};

}  // namespace lockstep::models::detail
