// What the launcher reads: error_file, flags, launcher_message, ledger. Each program is compiled
// for one of them (driver.h).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "launcher/flags.h"
#include "launcher/node_connection.h"
#include "launcher/node_link.h"
#include "launcher/report.h"
#include "launcher/stall_table.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger_layout.h"
#include "tests/fuzz/driver.h"

// The error file that a rank leaves, which any program may have written and which may be cut
// anywhere: read without an exception, reported, passed on, and announced to the other ranks in one
// line.
namespace fuzz_error_file {

// The functions take paths; this one needs no disk.
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {}
  const std::string& holding(const std::uint8_t* data, std::size_t size) {
    const bool written =
        ::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, data, size, 0) == static_cast<ssize_t>(size);
    lockstep::fuzz::require(written, "the memory file cannot be written");
    return path_;
  }

 private:
  int fd_;
  std::string path_ = "/proc/self/fd/" + std::to_string(fd_);
};

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::launch;
  using lockstep::fuzz::require;
  static MemoryFile memory;
  const ErrorFile file = read_error_file(memory.holding(data, size));
  require(file.present == (size != 0), "present is not what it should be");
  require(std::isfinite(file.time), "a time that is not a time");
  RankFailure failure;
  failure.rank = 0;
  failure.cause = "exited with code 1";
  add_error_file(failure, file);
  failure_report(failure);
  const std::string line = control_line(failure);
  require(line.find('\n') + 1 == line.size(), "an announcement of more than one line");
  const RankFailure again = failure_from_json(failure_to_json(failure));
  require(again.stack.size() == failure.stack.size(), "a stack that changes on its way");
  return 0;
}

}  // namespace fuzz_error_file

// The command line of `lockstep run` (one argument per line) and the PET_ variables
// ("=NAME=value"): parsed into a plan or refused with an error.
namespace fuzz_flags {

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  std::vector<std::string> arguments;
  std::map<std::string, std::string> variables;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    line = line.substr(0, line.find('\0'));  // neither an argument nor a variable can hold one
    if (const auto equals = line.find('=', 1); line.starts_with('=') && equals != line.npos)
      variables[line.substr(1, equals - 1)] = line.substr(equals + 1);
    else
      arguments.push_back(std::move(line));
  }
  launch::LaunchContext context;
  context.variable = [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
  context.cores = [] { return 4; };
  context.gpus = [] { return launch::Gpus{}; };
  try {
    const launch::ParsedFlags parsed = launch::parse_flags(arguments, context);
    if (parsed.help) return 0;
    require(parsed.plan.nnodes >= 1 && parsed.plan.nproc_per_node >= 1, "a plan for nobody");
  } catch (const UsageError& error) {
    require(error.what()[0] == '[', "an error without its component");
  }
  return 0;
}

}  // namespace fuzz_flags

// What one launcher reads from another's socket: any line is a message that survives being sent on,
// or is refused with an error.
namespace fuzz_launcher_message {

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  const std::string line(reinterpret_cast<const char*>(data), size);
  try {
    const launch::Message message = launch::decode(line);
    if (message.kind == launch::Message::Kind::kOtherVersion) return 0;
    const std::string again = launch::encode(message);
    require(again.find('\n') + 1 == again.size(), "a message of more than one line");
    require(launch::encode(launch::decode(again)) == again, "a message that changes on its way");
    if (message.failure) launch::failure_report(*message.failure);
  } catch (const UsageError& error) {
    require(std::string_view(error.what()).starts_with("[launch] "),
            "an error without its component");
  }
  return 0;
}

}  // namespace fuzz_launcher_message

// A rank's ledger: whatever a rank has written there is refused or becomes text.
namespace fuzz_ledger {

namespace ledger = lockstep::ledger;

// A whole ledger with these bytes as its numbers, its list of files and its ring.
std::string ledger_with(std::string_view bytes) {
  std::string text(sizeof(ledger::LedgerMemory), '\0');
  std::memcpy(text.data(), ledger::kMagic, sizeof ledger::kMagic);
  const std::uint32_t numbers[] = {ledger::kVersion, static_cast<std::uint32_t>(ledger::kRecords)};
  std::memcpy(text.data() + sizeof ledger::kMagic, numbers, sizeof numbers);
  const std::size_t words = offsetof(ledger::LedgerMemory, saved_ns);
  const std::size_t files = offsetof(ledger::LedgerMemory, modules);
  const std::size_t ring = offsetof(ledger::LedgerMemory, ring);
  for (const std::size_t at : {words, files, ring}) {
    const std::size_t part = std::min(bytes.size(), at == words ? 96 : bytes.size() / 2);
    std::copy_n(bytes.data(), part, text.data() + at);
    bytes.remove_prefix(part);
  }
  return text;
}

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using lockstep::fuzz::require;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    ledger::read(bytes, "input");
  } catch (const lockstep::UsageError& error) {
    require(error.what()[0] == '[', "an error without its component");
  }
  std::vector<lockstep::launch::RankView> ranks;
  for (const std::string_view part : {bytes.substr(0, size / 2), bytes.substr(size / 2)}) {
    ranks.push_back({.ledger = ledger::read(ledger_with(part), "input")});
    ranks.back().ledger.rank = static_cast<int>(ranks.size()) - 1;
    for (const std::uint64_t frame : ranks.back().ledger.stack)
      ranks.back().stack.push_back(ranks.back().ledger.place(frame));
  }
  const std::string text = lockstep::launch::describe_stall(ranks, {.now_ns = 1}).text;
  require(std::all_of(text.begin(), text.end(),
                      [](char c) { return c == '\n' || (c >= 0x20 && c < 0x7f); }),
          "a table that is not text");
  return 0;
}

}  // namespace fuzz_ledger

LOCKSTEP_FUZZ_ONE()
