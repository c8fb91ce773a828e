// The memory layout of the ledger that ranks write and launchers read, on both architectures.
//
// Every word is an atomic, so that reading while the rank writes is defined. A record is guarded by
// its version, as in a seqlock: odd while it is written, 2 * ticket once it is whole. A fence
// between the odd version and the fields, and one between the fields and the second look at the
// version, make sure that a reader that sees a field of a newer record also sees a newer version,
// and drops what it has read. A reader never writes.
//
// For ledger.cpp and ledger_file.cpp alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lockstep::ledger {

inline constexpr char kMagic[8] = {'L', 'S', 'L', 'E', 'D', 'G', 'R', '\n'};
inline constexpr std::uint32_t kVersion = 3;
inline constexpr std::size_t kRecords = 1024;  // in the ring; a power of two
inline constexpr std::size_t kModuleBytes = 32u << 10;
inline constexpr std::size_t kStackFrames = 48;
inline constexpr std::size_t kMaxPhases = 16;
inline constexpr std::size_t kMaxCounters = 32;
inline constexpr std::size_t kPathWords = 512;  // PATH_MAX
inline constexpr std::size_t kNameWords = 3;    // 24 characters: "reduce_scatter", "split/0/1"

using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free);

struct RecordMemory {
  Word version;
  Word operation[kNameWords];
  Word group[kNameWords];
  Word dtype;
  Word sequence;
  Word bytes;
  Word kind;  // peer + 1 << 16 | message << 8 | phase
  Word call_site;
  Word posted_ns;
  Word started;  // the ticket, once the backend has it
  // ticket << 2 while it is under way, then time << 2 | End: a late end cannot touch the record
  // that has taken this one's place.
  Word end;
  Word step;
};
static_assert(sizeof(RecordMemory) == 128);

// The training thread's phase and its time by phase. A rank without a launcher has one too.
struct ProgressMemory {
  Word step;     // + 1; 0: not known
  Word step_ns;  // how long the last one took
  Word steps;    // steps that ended
  Word phase;
  Word phase_since_ns;
  Word changes;  // phase changes; odd during one
  Word host_ns[kMaxPhases];
  Word device_ns[kMaxPhases];
  Word counts[kMaxCounters];
};

ProgressMemory& progress() noexcept;  // this process's

struct LedgerMemory {
  // Written by the launcher before the rank starts.
  char magic[8];
  std::uint32_t version;
  std::uint32_t records;
  std::int32_t rank;
  std::int32_t world_size;
  std::int32_t attempt;
  std::int32_t unused;
  Word saved_ns;  // when the launcher wrote it to a file; 0: it is live

  // Written by the rank.
  Word pid;           // 0: nobody has opened it
  Word thread;        // the training thread
  Word stack_signal;  // leaves the stack of `thread` below; 0: there is no handler
  Word heartbeat;     // counts every movement except posts
  Word next;          // tickets given out
  ProgressMemory progress;
  Word stacks_taken;
  Word stack_depth;
  Word stack[kStackFrames];
  Word output_dir_version;  // odd while it is written, like a record's
  Word output_dir[kPathWords];
  // "<bias> <first> <end> <path>\n" in hexadecimal for each loaded file, terminated by zero.
  char modules[kModuleBytes];
  RecordMemory ring[kRecords];
};
static_assert(offsetof(LedgerMemory, ring) % alignof(Word) == 0);

}  // namespace lockstep::ledger
