// The ledger: a rank's progress, in memory that its launcher can read whatever the rank does.
//
// `lockstep run` gives each rank a piece of shared memory (LOCKSTEP_LEDGER). The rank records its
// step, its phase and each collective there, so that a launcher can tell the last operation of a
// rank that is stopped, loops forever or has crashed (ledger_file.h). Without a Lockstep launcher
// only the sums (Totals) are kept, and each other call costs one load.
//
//   ledger::open();
//   const ledger::PhaseScope saving(ledger::Phase::kSaving);
//   const ledger::Ticket ticket = ledger::post({.name = "all_reduce", .sequence = 7});
//   ledger::ended(ticket, ledger::End::kFinished);
//
// Any thread may call any function; none of them waits, allocates (but open) or throws.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace lockstep::ledger {

// "<descriptor>:<inode>": a process that inherits the variable alone does not write elsewhere.
inline constexpr const char* kVariable = "LOCKSTEP_LEDGER";

enum class Phase : std::uint8_t {
  kNone,
  kStartup,
  kData,
  kForward,
  kBackward,
  kCommunication,  // waits for other ranks: reductions, gathers, a pipeline's messages
  kOptimizer,
  kEvaluation,
  kLogging,
  kSaving,
  kEnded,       // all ranks have returned from their bodies
  kDeviceWait,  // the host waits for its device to catch up; within any other phase
};
const char* name(Phase phase);

// Called once, as soon as a process knows its rank: maps the memory, lists the loaded files and
// installs a handler that saves the stack for the launcher. False: there is no ledger, it is
// another rank's, or another process of this rank writes it. Later calls do nothing.
bool open() noexcept;
// The signal of that handler; 0: none.
int stack_signal() noexcept;

using Ticket = std::uint64_t;  // 0: not on the ledger

struct Operation {
  const char* name = "";
  const char* dtype = "";
  std::string_view group = {};  // empty: the world; the same text on all ranks
  std::uint64_t sequence = 0;   // in the group
  std::uint64_t bytes = 0;
  int peer = -1;              // root, or the other end of a message
  bool message = false;       // has a number of its own, which peers do not share
  std::uint64_t time_ns = 0;  // steady clock, where the caller has read it; 0: now
};

enum class End : std::uint8_t {
  kFinished = 1,
  kFailed = 2,
  kReleased = 3,  // no longer observed: enqueued on a device's stream
};

Ticket post(const Operation& operation) noexcept;
void started(Ticket ticket) noexcept;  // the backend has started it
void ended(Ticket ticket, End end) noexcept;

// Called by the Trainer after each step. In a user's own loop the end of each synchronised
// backward, of a backward(loss, last = true), or of a sharded step counts as a step instead.
void set_step(std::int64_t step) noexcept;
void count_step() noexcept;
std::int64_t step() noexcept;  // the last step that ended; -1: not known
// For a resumed run: the next step that is counted is the one after this. Counts no step as ended;
// a negative number does nothing.
void continue_at(std::int64_t step) noexcept;
// `step` steps have been taken in all. If nothing else counts them (a rank alone that
// calls loss.backward()), all steps since the last reported one have ended; otherwise only the
// number is corrected.
void reach_step(std::int64_t step) noexcept;

// The run's output folder, for the launcher. An absolute path; one that does not fit (4 KiB) is not
// recorded, since a truncated path would name another folder.
void set_output_dir(std::string_view path) noexcept;

// Returns the previous phase.
Phase set_phase(Phase phase) noexcept;

class PhaseScope {
 public:
  explicit PhaseScope(Phase phase) noexcept : before_(set_phase(phase)) {}
  ~PhaseScope() { set_phase(before_); }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  const Phase before_;
};

namespace detail {
// The place in the program to which the calling thread's next records are attributed.
inline thread_local const void* call_site = nullptr;
}  // namespace detail

// Declared at the top of a public function: attributes the operations inside to its return address.
// The outermost one counts, since that is the call in the user's program.
class CallSite {
 public:
  [[gnu::always_inline]] CallSite() noexcept : outermost_(detail::call_site == nullptr) {
    if (outermost_) detail::call_site = __builtin_return_address(0);
  }
  ~CallSite() {
    if (outermost_) detail::call_site = nullptr;
  }
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

 private:
  const bool outermost_;
};

// ---------------------------------------------------------------- sums of the steps

// Sums over a rank's lifetime: wall time by phase of its training thread, and counts of events that
// tend to slow a step down. The difference of two readings describes the steps between.
//
//   ledger::add(ledger::Counter::kHostSyncs);
//   const ledger::Totals before = ledger::totals();
//   ... some steps later ...
//   const ledger::Totals spent = ledger::since(before, ledger::totals());
//   spent.host_ns[index(Phase::kData)]       // this rank waited for batches
//
// Counted in every process; where `lockstep run` gives the rank a ledger, its launcher reads the
// same sums (ledger::File::totals).

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
  kSeparatePasses,  // backward passes of a rank whose gradients were exchanged with nobody
};
inline constexpr std::size_t kCounters = static_cast<std::size_t>(Counter::kSeparatePasses) + 1;
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

Phase phase() noexcept;  // this process's current phase
void add(Counter counter, std::uint64_t amount = 1) noexcept;
void add_device_time(Phase phase, std::uint64_t ns) noexcept;
// Between these two what passes and steps count, on any thread, is set aside for the second one to
// return: they are recorded into a graph, and count when it runs, which may be never.
void begin_recording() noexcept;
Totals end_recording() noexcept;
Totals totals() noexcept;
std::uint64_t monotonic_ns();  // the steady clock, in the ledger's unit
// What was added between two readings of one rank; time_ns and steps are differences too.
Totals since(const Totals& before, const Totals& now) noexcept;

struct ProgressMemory;  // ledger_layout.h
Totals totals_of(const ProgressMemory& memory) noexcept;

}  // namespace lockstep::ledger
