// Small tools that keep and prove replicas equal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::parallel {

// A 64-bit fingerprint of a tensor's bytes, and of text.
std::uint64_t fingerprint(const at::Tensor& tensor);
std::uint64_t fingerprint(const void* data, std::size_t bytes);

// Broadcasts many tensors in few messages.
void broadcast_coalesced(World& world, const std::vector<at::Tensor>& tensors, int root);

}  // namespace lockstep::parallel
