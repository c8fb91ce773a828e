// Numbers, flags and byte strings over the ranks of a world: for what is no tensor.
//
//   const double loss = all_reduce(world, local_loss, ReduceOp::kAvg);
//   if (any_rank(world, disk_is_full)) return;            // every rank returns, or none
//   const std::string path = broadcast_bytes(world, chosen_path);   // rank 0's
//
// Blocking collectives: every rank calls them in the same order. On a GPU world they go through
// the host's memory and never wait for the device.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep {

double all_reduce(World& world, double value, ReduceOp op = ReduceOp::kSum);
bool any_rank(World& world, bool value);   // true on at least one rank
bool all_ranks(World& world, bool value);  // true on every rank

std::string broadcast_bytes(World& world, const std::string& bytes, int root = 0);
std::vector<std::string> all_gather_bytes(World& world, const std::string& bytes);  // in rank order

}  // namespace lockstep
