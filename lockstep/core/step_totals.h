// Where a rank's time goes: sums since it began, by what its training thread did (the ledger's
// phases), and counts of what tends to slow a step down. The difference of two readings is the
// budget of the steps between them.
//
//   ledger::add(ledger::Counter::kHostSyncs);
//   const ledger::Totals before = ledger::totals();
//   ... some steps later ...
//   const ledger::Totals spent = ledger::since(before, ledger::totals());
//   spent.host_ns[index(Phase::kData)]       // this rank waited for batches
//
// Counted in every process; where `lockstep run` gives the rank a ledger, its launcher reads the
// same sums (ledger::File::totals). Any thread may call; nothing waits, allocates or throws.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "lockstep/core/ledger.h"

namespace lockstep::ledger {

inline constexpr std::size_t kPhases = static_cast<std::size_t>(Phase::kDeviceWait) + 1;
constexpr std::size_t index(Phase phase) {
  return static_cast<std::size_t>(phase);
}

enum class Counter : std::uint8_t {
  kMicroBatches,        // forward and backward passes
  kSynchronisedPasses,  // backward passes that averaged gradients
  kHostSyncs,           // times at which the host waited for the device to read a value
  kLogs,
  kSaves,
  kEvaluations,
  kUnusedSearches,  // passes in which the graph was searched for unused parameters
  kUnusedFound,     // and some were found
  kBuckets,         // reductions of a bucket that were waited for
  kReducedBytes,    // their bytes
  kReduceNs,        // from launch to completion, summed over buckets (CPU)
  kBatches,         // made by the loader
  kLoadNs,          // time of the loader's workers for them, summed over workers
  kCopyNs,          // host-to-device copies, by the device's clock
  kUpdates,         // parameter updates seen by synchronised passes
};
inline constexpr std::size_t kCounters = static_cast<std::size_t>(Counter::kUpdates) + 1;
constexpr std::size_t index(Counter counter) {
  return static_cast<std::size_t>(counter);
}
const char* name(Counter counter);  // "micro_batches", ...

struct Totals {
  std::uint64_t time_ns = 0;  // steady clock, when it was read
  std::uint64_t steps = 0;    // steps that ended
  // Wall time of the training thread, including the current phase so far. Phase::kNone: outside all
  // phases.
  std::array<std::uint64_t, kPhases> host_ns{};
  // Time of the device's stream, by its own clock: a host that only enqueues work is fast in every
  // phase. All zero where nobody measures it, as on CPUs.
  std::array<std::uint64_t, kPhases> device_ns{};
  std::array<std::uint64_t, kCounters> counts{};
};

Phase phase() noexcept;  // the one that this process is in
void add(Counter counter, std::uint64_t amount = 1) noexcept;
void add_device_time(Phase phase, std::uint64_t ns) noexcept;
Totals totals() noexcept;
std::uint64_t monotonic_ns();  // the steady clock, as the ledger has it
// What was added between two readings of one rank; time_ns and steps are differences too.
Totals since(const Totals& before, const Totals& now) noexcept;

struct ProgressMemory;  // ledger_layout.h
Totals totals_of(const ProgressMemory& memory) noexcept;

}  // namespace lockstep::ledger
