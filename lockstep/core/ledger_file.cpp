#include "lockstep/core/ledger_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>
#include <sstream>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger_layout.h"
#include "lockstep/core/symbols.h"

namespace lockstep::ledger {
namespace {

std::uint64_t get(const Word& word) {
  return word.load(std::memory_order_acquire);
}

int small(std::uint64_t value) {
  return static_cast<int>(std::min<std::uint64_t>(value, INT_MAX));
}

std::int64_t step_of(std::uint64_t word) {
  return static_cast<std::int64_t>(std::min<std::uint64_t>(word, INT64_MAX)) - 1;
}

Phase phase_of(std::uint64_t word) {
  return static_cast<Phase>(word & 0xff);
}

// Removes all but printable text, because it may reach a terminal.
std::string printable(const char* data, std::size_t bytes) {
  std::string text(data, ::strnlen(data, bytes));
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
  return text;
}

template <std::size_t Words>
std::string text_of(const Word (&words)[Words]) {
  std::uint64_t packed[Words];
  for (std::size_t i = 0; i < Words; ++i) packed[i] = get(words[i]);
  return printable(reinterpret_cast<const char*>(packed), sizeof packed);
}

State state_of(const RecordMemory& slot, Ticket ticket, std::uint64_t end) {
  switch (end & 3) {
    case static_cast<std::uint64_t>(End::kFinished):
      return State::kFinished;
    case static_cast<std::uint64_t>(End::kFailed):
      return State::kFailed;
    case static_cast<std::uint64_t>(End::kReleased):
      return State::kReleased;
    default:
      return get(slot.started) == ticket ? State::kStarted : State::kPosted;
  }
}

// False: the record is empty, or was written meanwhile.
bool read_record(const RecordMemory& slot, Record& record) {
  const std::uint64_t version = get(slot.version);
  if (version == 0 || version % 2 == 1) return false;
  record.ticket = version / 2;
  record.operation = text_of(slot.operation);
  record.group = text_of(slot.group);
  const std::uint64_t dtype = get(slot.dtype);
  record.dtype = printable(reinterpret_cast<const char*>(&dtype), sizeof dtype);
  record.sequence = get(slot.sequence);
  record.bytes = get(slot.bytes);
  const std::uint64_t kind = get(slot.kind);
  record.peer = small(kind >> 16) - 1;
  record.message = (kind >> 8 & 1) != 0;
  record.phase = phase_of(kind);
  record.step = step_of(get(slot.step));
  record.call_site = get(slot.call_site);
  record.posted_ns = get(slot.posted_ns);
  const std::uint64_t end = get(slot.end);
  record.state = state_of(slot, record.ticket, end);
  record.ended_ns = record.under_way() ? 0 : end >> 2;
  std::atomic_thread_fence(std::memory_order_acquire);
  return slot.version.load(std::memory_order_relaxed) == version;
}

std::vector<Module> modules_of(const LedgerMemory& ledger) {
  std::vector<Module> modules;
  std::istringstream lines(
      std::string(ledger.modules, ::strnlen(ledger.modules, sizeof ledger.modules)));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    Module module;
    if (!(fields >> std::hex >> module.bias >> module.first >> module.end)) continue;
    std::getline(fields >> std::ws, module.path);
    modules.push_back(std::move(module));
  }
  return modules;
}

Snapshot snapshot_of(const LedgerMemory& ledger) {
  Snapshot seen;
  seen.rank = ledger.rank;
  seen.world_size = ledger.world_size;
  seen.attempt = ledger.attempt;
  seen.pid = small(get(ledger.pid));
  seen.thread = small(get(ledger.thread));
  seen.stack_signal = small(get(ledger.stack_signal));
  seen.heartbeat = get(ledger.heartbeat) + get(ledger.next);
  seen.step = step_of(get(ledger.progress.step));
  seen.step_ns = get(ledger.progress.step_ns);
  seen.phase = phase_of(get(ledger.progress.phase));
  seen.phase_since_ns = get(ledger.progress.phase_since_ns);
  seen.saved_ns = get(ledger.saved_ns);
  seen.stacks_taken = get(ledger.stacks_taken);
  const auto depth = std::min<std::uint64_t>(get(ledger.stack_depth), kStackFrames);
  for (std::uint64_t i = 0; i < depth && seen.stacks_taken > 0; ++i)
    seen.stack.push_back(get(ledger.stack[i]));
  seen.modules = modules_of(ledger);
  for (const RecordMemory& slot : ledger.ring) {
    Record record;
    if (read_record(slot, record)) seen.records.push_back(std::move(record));
  }
  std::sort(seen.records.begin(), seen.records.end(),
            [](const Record& a, const Record& b) { return a.ticket < b.ticket; });
  return seen;
}

}  // namespace

const char* name(State state) {
  constexpr const char* kNames[] = {"posted", "started", "finished", "failed", "enqueued"};
  return kNames[static_cast<std::size_t>(state)];
}

std::string Snapshot::place(std::uint64_t address) const {
  if (address == 0) return {};
  for (const Module& module : modules) {
    if (address < module.first || address >= module.end) continue;
    const std::string text = symbols::frame_text(module.path, address, module.bias);
    return printable(text.data(), text.size());
  }
  return fmt::format("{:#x}", address);
}

// ---------------------------------------------------------------- File

File File::create(const Owner& owner) {
  File file;
  file.fd_.reset(::memfd_create("lockstep-ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.fd_ || ::ftruncate(file.fd(), static_cast<off_t>(sizeof(LedgerMemory))) != 0)
    throw SystemError("launch", "cannot make the memory of a rank's ledger", errno);
  // A rank that made it shorter would kill the launcher, which reads it.
  ::fcntl(file.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  void* const place =
      ::mmap(nullptr, sizeof(LedgerMemory), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
  if (place == MAP_FAILED) throw SystemError("launch", "cannot map a rank's ledger", errno);
  file.memory_ = static_cast<LedgerMemory*>(place);  // all zero
  std::memcpy(file.memory_->magic, kMagic, sizeof kMagic);
  file.memory_->version = kVersion;
  file.memory_->records = kRecords;
  file.memory_->rank = owner.rank;
  file.memory_->world_size = owner.world_size;
  file.memory_->attempt = owner.attempt;
  return file;
}

File::File(File&& other) noexcept
    : fd_(std::move(other.fd_)), memory_(std::exchange(other.memory_, nullptr)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(memory_, other.memory_);
  return *this;
}

File::~File() {
  if (memory_ != nullptr) ::munmap(memory_, sizeof(LedgerMemory));
}

std::string File::variable() const {
  struct stat info {};
  if (!fd_ || ::fstat(fd_.get(), &info) != 0) return {};
  return fmt::format("{}:{}", fd_.get(), info.st_ino);
}

int File::pid() const {
  return memory_ == nullptr ? 0 : small(get(memory_->pid));
}

Phase File::phase() const {
  return phase_of(get(memory_->progress.phase));
}

std::uint64_t File::heartbeat() const {
  return get(memory_->heartbeat) + get(memory_->next);
}

std::int64_t File::step() const {
  return step_of(get(memory_->progress.step));
}

std::uint64_t File::step_ns() const {
  return get(memory_->progress.step_ns);
}

Totals File::totals() const {
  return memory_ == nullptr ? Totals{} : totals_of(memory_->progress);
}

std::string File::output_dir() const {
  if (memory_ == nullptr) return {};
  const std::uint64_t version = get(memory_->output_dir_version);
  std::uint64_t packed[kPathWords];
  for (std::size_t i = 0; i < kPathWords; ++i)
    packed[i] = memory_->output_dir[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (version % 2 == 1 || memory_->output_dir_version.load(std::memory_order_relaxed) != version)
    return {};
  const char* const text = reinterpret_cast<const char*>(packed);
  std::string path(text, ::strnlen(text, sizeof packed));
  const bool absolute = path.starts_with('/');
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  return absolute && std::none_of(path.begin(), path.end(), control) ? path : std::string();
}

std::uint64_t File::stacks_taken() const {
  return get(memory_->stacks_taken);
}

Snapshot File::read() const {
  return snapshot_of(*memory_);
}

void File::save(const std::string& path) const {
  memory_->saved_ns.store(monotonic_ns(), std::memory_order_release);
  write_file_atomically(path, {reinterpret_cast<const char*>(memory_), sizeof(LedgerMemory)});
}

Snapshot read(std::string_view bytes, const std::string& name) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError("ledger",
                     "{} is not a rank's ledger: {}. Name a file '{}' of a log directory.", name,
                     why, kFileName);
  };
  if (bytes.size() < sizeof kMagic || std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0)
    refuse("it does not begin as one");
  if (bytes.size() != sizeof(LedgerMemory))
    refuse(fmt::format("it has {} bytes, not {}", bytes.size(), sizeof(LedgerMemory)));
  const auto memory = std::make_unique<LedgerMemory>();
  std::memcpy(static_cast<void*>(memory.get()), bytes.data(), bytes.size());
  if (memory->version != kVersion || memory->records != kRecords)
    refuse(fmt::format("it has version {}, not {}", memory->version, kVersion));
  return snapshot_of(*memory);
}

}  // namespace lockstep::ledger
