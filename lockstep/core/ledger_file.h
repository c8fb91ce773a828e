// The launcher's side of the ledger (ledger.h): creates the memory, reads it, saves it to a file.
//
//   ledger::File file = ledger::File::create({.rank = 1, .world_size = 3});
//   ... the rank is started with file.fd() and file.variable() ...
//   const ledger::Snapshot seen = file.read();      // whatever the rank does meanwhile
//   file.save("attempt_0/1/ledger");
//   const ledger::Snapshot later = ledger::read(read_file("attempt_0/1/ledger"));
//
// A File belongs to one thread. read() validates everything: a rank may write anything there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/core/ledger.h"

namespace lockstep::ledger {

struct LedgerMemory;

// The name of the file in a rank's directory.
inline constexpr const char* kFileName = "ledger";

enum class State : std::uint8_t { kPosted, kStarted, kFinished, kFailed, kReleased };
const char* name(State state);

struct Record {
  Ticket ticket = 0;  // counts all records of the rank
  std::string operation;
  std::string group;  // empty: the world
  std::string dtype;
  std::uint64_t sequence = 0;
  std::uint64_t bytes = 0;
  int peer = -1;
  bool message = false;
  Phase phase = Phase::kNone;
  std::int64_t step = -1;
  std::uint64_t call_site = 0;
  State state = State::kPosted;
  std::uint64_t posted_ns = 0;
  std::uint64_t ended_ns = 0;  // 0: it has not

  bool under_way() const { return state == State::kPosted || state == State::kStarted; }
};

// A file that the rank's process had loaded.
struct Module {
  std::uint64_t bias = 0;
  std::uint64_t first = 0;
  std::uint64_t end = 0;
  std::string path;
};

struct Snapshot {
  int rank = 0;
  int world_size = 1;
  int attempt = 0;
  int pid = 0;     // 0: the rank has not opened it
  int thread = 0;  // the training thread
  int stack_signal = 0;
  std::uint64_t heartbeat = 0;
  std::int64_t step = -1;  // -1: not known
  std::uint64_t step_ns = 0;
  Phase phase = Phase::kNone;
  std::uint64_t phase_since_ns = 0;
  std::uint64_t saved_ns = 0;
  std::uint64_t stacks_taken = 0;
  std::vector<std::uint64_t> stack;
  std::vector<Module> modules;
  std::vector<Record> records;  // oldest first; those that were being written are skipped

  // "train(World&)+0x1c (mnist+0x2f10)"; empty for address 0
  std::string place(std::uint64_t address) const;
};

struct Owner {
  int rank = 0;
  int world_size = 1;
  int attempt = 0;
};

class File {
 public:
  File() = default;
  // Memory of this process's own (memfd), which the rank inherits. Throws SystemError.
  static File create(const Owner& owner);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  explicit operator bool() const { return memory_ != nullptr; }
  int fd() const { return fd_.get(); }
  std::string variable() const;  // for kVariable
  void close_fd() { fd_.reset(); }

  // Reads one field, without the cost of a Snapshot.
  bool opened() const { return pid() != 0; }
  int pid() const;
  Phase phase() const;
  std::uint64_t heartbeat() const;
  std::int64_t step() const;
  std::uint64_t step_ns() const;
  std::uint64_t stacks_taken() const;
  Totals totals() const;  // where the rank's time went
  // Where the rank's run writes; empty: not known. Untrusted bytes: escape them for a terminal.
  std::string output_dir() const;

  Snapshot read() const;
  void save(const std::string& path) const;  // throws SystemError

 private:
  Fd fd_;
  LedgerMemory* memory_ = nullptr;
};

// Reads what save() has written. Throws UsageError for any other file; `name` names it.
Snapshot read(std::string_view bytes, const std::string& name);

}  // namespace lockstep::ledger
