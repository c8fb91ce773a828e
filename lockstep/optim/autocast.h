// Autocast: while this guard lives, operations that may lose precision run in fp16 or bf16.
//
//   {
//     const lockstep::optim::Autocast autocast{world.device(), at::kBFloat16};
//     loss = torch::cross_entropy_loss(model(batch.data), batch.target);
//   }
//   loss.backward();   // outside: each gradient takes the type its forward had
//
// Converted weights are cached so that a weight used twice is converted once.
// The cache must go when the outermost guard ends, otherwise the next step computes with the
// weights of this one; the guard does that, even when an exception leaves the block.
//
// Guards nest; one with kFloat inside switches autocasting off for a part that needs precision.
// Thread-local, as torch's own: make and destroy it on the thread that computes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace lockstep::optim {

class Autocast {
 public:
  // kHalf or kBFloat16 on the CPU and on CUDA; kFloat is off. Throws UsageError for another.
  Autocast(c10::Device device, c10::ScalarType dtype, bool cache_enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType type_;
  bool was_enabled_;
  c10::ScalarType was_dtype_;
  bool was_cached_;
};

}  // namespace lockstep::optim
