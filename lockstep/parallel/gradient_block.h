// The one piece of memory in which the buckets of CPU gradients lie, one behind the other.
//
//   GradientBlock block;
//   block.make(world, bytes);                                   // zeros
//   at::Tensor bucket = block.mine(offset, numel, at::kFloat);
//   block.rearrange(moves);                                     // another order, the same memory
//
// Buckets in another order need no second block. Every gradient begins at a
// multiple of kLine bytes and is padded to one, so a new order is a permutation of lines, and those
// change places within the block.
//
// Where ranks share memory, every rank maps everybody's block. For the reducer alone, which calls
// make() on all ranks at the same point (it communicates); everything else is local. The memory
// lives as long as a tensor in it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::parallel {

inline constexpr std::int64_t kLine = 64;  // bytes

// All three are multiples of kLine.
struct Move {
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::int64_t bytes = 0;
};

// Carries the moves out as if at once. Their sources must not overlap, and their targets must cover
// the same lines.
void move_lines(std::byte* data, std::int64_t bytes, const std::vector<Move>& moves);

class GradientBlock {
 public:
  // Lets the old memory go first. Ranks that cannot share so much have memory of their own instead.
  void make(World& world, std::int64_t bytes);
  std::int64_t bytes() const { return bytes_; }
  bool holds(const at::Tensor& tensor) const;

  // Elements at an offset in bytes: this rank's, and every rank's where they share memory.
  at::Tensor mine(std::int64_t offset, std::int64_t numel, at::ScalarType dtype) const;
  std::vector<at::Tensor> shared(std::int64_t offset, std::int64_t numel,
                                 at::ScalarType dtype) const;

  void rearrange(const std::vector<Move>& moves);

  // slot.copy_(grad), fast where the slot lies in this block and both have one layout.
  void fill(const at::Tensor& slot, const at::Tensor& grad) const;

 private:
  std::int64_t bytes_ = 0;
  at::Tensor mine_;
  std::vector<at::Tensor> parts_;
};

}  // namespace lockstep::parallel
