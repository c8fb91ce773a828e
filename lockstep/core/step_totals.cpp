#include "lockstep/core/step_totals.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <numeric>

#include "lockstep/core/ledger_layout.h"

namespace lockstep::ledger {

static_assert(kPhases <= kMaxPhases && kCounters <= kMaxCounters);

std::uint64_t monotonic_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                    std::chrono::nanoseconds(1));
}

const char* name(Counter counter) {
  constexpr const char* kNames[] = {"micro_batches",   "synchronised_passes",
                                    "host_syncs",      "logs",
                                    "saves",           "evaluations",
                                    "unused_searches", "unused_found",
                                    "buckets",         "reduced_bytes",
                                    "reduce_ns",       "batches",
                                    "load_ns",         "copy_ns",
                                    "updates"};
  static_assert(std::size(kNames) == kCounters);
  return kNames[index(counter)];
}

Phase phase() noexcept {
  return static_cast<Phase>(progress().phase.load(std::memory_order_relaxed));
}

void add(Counter counter, std::uint64_t amount) noexcept {
  progress().counts[index(counter)].fetch_add(amount, std::memory_order_relaxed);
}

void add_device_time(Phase phase, std::uint64_t ns) noexcept {
  progress().device_ns[index(phase)].fetch_add(ns, std::memory_order_relaxed);
}

namespace {

// A rank that was started again counts from zero: steps or a counter go back, or all of its time
// lies after the reading before. A sum that goes back alone was read while its phase changed.
bool started_again(const Totals& before, const Totals& now) {
  if (now.time_ns < before.time_ns || now.steps < before.steps) return true;
  for (std::size_t i = 0; i < kCounters; ++i)
    if (now.counts[i] < before.counts[i]) return true;
  const auto age = [](const Totals& sums) {
    return std::accumulate(sums.host_ns.begin(), sums.host_ns.end(), std::uint64_t{0});
  };
  return age(now) < age(before) && age(now) <= now.time_ns - before.time_ns;
}

}  // namespace

Totals totals() noexcept {
  return totals_of(progress());
}

Totals totals_of(const ProgressMemory& memory) noexcept {
  const auto get = [](const Word& word) { return word.load(std::memory_order_relaxed); };
  Totals sums;
  // A phase that changes at this moment is read again. A rank that died in the change is read as it
  // is.
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::uint64_t changes = memory.changes.load(std::memory_order_acquire);
    sums.time_ns = monotonic_ns();
    for (std::size_t i = 0; i < kPhases; ++i) sums.host_ns[i] = get(memory.host_ns[i]);
    const std::uint64_t began = get(memory.phase_since_ns);
    const std::uint64_t phase = get(memory.phase);
    // The clock may be read before the first look at `changes` is.
    sums.time_ns = std::max(sums.time_ns, began);
    if (began != 0 && phase < kPhases) sums.host_ns[phase] += sums.time_ns - began;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (changes % 2 == 0 && get(memory.changes) == changes) break;
  }
  sums.steps = get(memory.steps);
  for (std::size_t i = 0; i < kPhases; ++i) sums.device_ns[i] = get(memory.device_ns[i]);
  for (std::size_t i = 0; i < kCounters; ++i) sums.counts[i] = get(memory.counts[i]);
  return sums;
}

Totals since(const Totals& before, const Totals& now) noexcept {
  const bool again = started_again(before, now);
  const auto grown = [again](std::uint64_t from, std::uint64_t to) {
    return again ? to : to >= from ? to - from : 0;
  };
  Totals spent;
  spent.time_ns = now.time_ns >= before.time_ns ? now.time_ns - before.time_ns : now.time_ns;
  spent.steps = grown(before.steps, now.steps);
  for (std::size_t i = 0; i < kPhases; ++i) {
    spent.host_ns[i] = grown(before.host_ns[i], now.host_ns[i]);
    spent.device_ns[i] = grown(before.device_ns[i], now.device_ns[i]);
  }
  for (std::size_t i = 0; i < kCounters; ++i)
    spent.counts[i] = grown(before.counts[i], now.counts[i]);
  return spent;
}

}  // namespace lockstep::ledger
