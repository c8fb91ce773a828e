// Collectives on values other than tensors: numbers, flags, byte strings and errors.
//
//   const double loss = all_reduce(world, local_loss, ReduceOp::kAvg);
//   if (any_rank(world, disk_is_full)) return;            // every rank returns, or none
//   const std::string path = broadcast_bytes(world, chosen_path);   // rank 0's
//   agree(world, [&] { read_settings(path); });           // all ranks continue, or all throw
//   leader_first(world, [&] { download(url, cache); });   // once, then from the cache
//
// Blocking collectives: every rank calls them in the same order. On a GPU world they go through
// the host's memory and never wait for the device.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep {

double all_reduce(World& world, double value, ReduceOp op = ReduceOp::kSum);
bool any_rank(World& world, bool value);   // true on at least one rank
bool all_ranks(World& world, bool value);  // true on every rank

// How many cores the ranks of one host may use together: the union of their affinity masks, within
// the CPU quota of their control groups. One rank's mask is not enough: ranks may be bound to a
// core each, or share all of them.
int cores_of_ranks(World& world);

std::string broadcast_bytes(World& world, const std::string& bytes, int root = 0);
std::vector<std::string> all_gather_bytes(World& world, const std::string& bytes);  // in rank order

namespace detail {
std::vector<std::string> agree_on_texts(World& world, const std::function<std::string()>& body);
}

// For what can fail on one rank alone (a file, memory, a setting), so that all ranks learn of it.
// Runs `body` on every rank. When it throws on any rank, all ranks throw: that rank its own
// exception, the others an error of the same kind (UsageError, SystemError, CommError,
// TimeoutError, InternalError; Error for any other exception) with its rank and message. A report
// names that rank as the cause. Returns what the ranks' bodies returned (a string or nothing), in
// rank order. Collective.
template <typename Body>
auto agree(World& world, const Body& body) {
  if constexpr (std::is_void_v<std::invoke_result_t<Body>>)
    detail::agree_on_texts(world, [&] { return body(), std::string(); });
  else
    return detail::agree_on_texts(world, body);
}

// The leader runs `body` first, the others after it has finished (download once, read cached). A
// leader that throws releases the others, which throw as in agree(). Collective.
void leader_first(World& world, const std::function<void()>& body);

}  // namespace lockstep
