// Sleeping until another rank has news, and waking ranks that sleep, through words of their
// segments.
//
// Nobody may fall asleep at the moment it is posted to. A sleeper first publishes for whom it waits
// (`waiting_for`), then looks once more, then sleeps unless its bell has changed; who posts writes
// first and then looks whether someone waits for it. Both do so with sequentially consistent
// atomics, so at least one of the two sees the other.
//
//   sleep_unless(own_header, peer + 1, [&] { return !posted(peer); });
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "lockstep/comm/shm/layout.h"

namespace lockstep::shm {

// Wakes a rank that waits for `from` or for anyone.
void wake_if_waiting(Header& header, int from);
// Wakes a rank that sleeps, for whatever it waits.
void wake(Header& header);

// `still` is asked after waiting_for has been published; if it returns false, there is no sleep.
// Ends when rung, or after at most kLongestSleep.
inline constexpr std::chrono::milliseconds kLongestSleep{20};
void sleep_on(std::atomic<std::uint32_t>& bell, std::uint32_t value);

template <typename Still>
void sleep_unless(Header& own, std::uint32_t code, Still still) {
  const std::uint32_t value = own.bell.load();
  own.waiting_for.store(code);
  if (still()) sleep_on(own.bell, value);
  own.waiting_for.store(0);
}

}  // namespace lockstep::shm
