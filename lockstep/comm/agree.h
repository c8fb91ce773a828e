// What can fail on one rank alone, run so that all ranks learn of it: a file, memory, a setting.
//
//   agree(world, [&] { read_settings(path); });                     // all continue, or all throw
//   leader_first(world, [&] { download(url, cache); });             // once, then from the cache
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep {

namespace detail {
std::vector<std::string> agree_on_texts(World& world, const std::function<std::string()>& body);
}

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
