#include "lockstep/core/ledger.h"

#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iterator>
#include <mutex>
#include <numeric>

#include "lockstep/core/ledger_layout.h"

namespace lockstep::ledger {
namespace {

// Above those that glibc takes for itself, and free in Python, CUDA and MPI.
constexpr int kStackSignalOffset = 7;

std::atomic<LedgerMemory*> g_ledger{nullptr};
ProgressMemory g_own_progress{};  // used without a ledger
std::atomic<ProgressMemory*> g_progress{&g_own_progress};
std::atomic<bool> g_steps_are_set{false};
std::atomic<bool> g_steps_are_counted{false};
std::atomic<bool> g_taking_stack{false};
std::atomic<std::uint64_t> g_step_began_ns{0};
std::atomic<bool> g_recording{false};
ProgressMemory g_recorded{};  // meanwhile

LedgerMemory* memory() {
  return g_ledger.load(std::memory_order_acquire);
}

std::uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(now.tv_nsec);
}

std::uint64_t this_thread() {
  thread_local const auto id = static_cast<std::uint64_t>(::syscall(SYS_gettid));
  return id;
}

void moved(LedgerMemory& ledger) {
  ledger.heartbeat.fetch_add(1, std::memory_order_release);
}

void set(Word& word, std::uint64_t value) {
  word.store(value, std::memory_order_release);
}

// Inside a record, whose version orders it.
void fill(Word& word, std::uint64_t value) {
  word.store(value, std::memory_order_relaxed);
}

template <std::size_t Words>
void fill(Word (&words)[Words], std::string_view text) {
  std::uint64_t packed[Words] = {};
  if (!text.empty()) std::memcpy(packed, text.data(), std::min(text.size(), sizeof packed));
  for (std::size_t i = 0; i < Words; ++i) fill(words[i], packed[i]);
}

RecordMemory& slot_of(LedgerMemory& ledger, Ticket ticket) {
  return ledger.ring[ticket % kRecords];
}

// ---------------------------------------------------------------- opening

// The descriptor that the variable names, unless its number belongs to something else here.
int ledger_descriptor() {
  const char* text = std::getenv(kVariable);
  int fd = -1;
  std::uint64_t inode = 0;
  if (text == nullptr || std::sscanf(text, "%d:%" SCNu64, &fd, &inode) != 2) return -1;
  struct stat info {};
  if (fd < 0 || ::fstat(fd, &info) != 0 || info.st_ino != inode) return -1;
  return info.st_size >= static_cast<off_t>(sizeof(LedgerMemory)) ? fd : -1;
}

bool is_in_environment(const char* name, int value) {
  const char* text = std::getenv(name);
  return text != nullptr && std::atoi(text) == value;
}

bool belongs_to_this_rank(const LedgerMemory& ledger) {
  return std::memcmp(ledger.magic, kMagic, sizeof kMagic) == 0 && ledger.version == kVersion &&
         is_in_environment("RANK", ledger.rank) &&
         is_in_environment("WORLD_SIZE", ledger.world_size);
}

// If a rank has several processes, the first one that communicates owns the ledger.
bool claim(LedgerMemory& ledger) {
  std::uint64_t owner = 0;
  const auto self = static_cast<std::uint64_t>(::getpid());
  while (!ledger.pid.compare_exchange_strong(owner, self)) {
    const bool alive = owner != self && ::kill(static_cast<pid_t>(owner), 0) == 0;
    if (alive) return false;
  }
  return true;
}

struct ModuleList {
  char* text;
  std::size_t bytes;
  std::size_t used = 0;
};

int add_module(dl_phdr_info* info, std::size_t, void* data) {
  auto& list = *static_cast<ModuleList*>(data);
  std::uint64_t first = UINT64_MAX;
  std::uint64_t end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    first = std::min<std::uint64_t>(first, info->dlpi_addr + segment.p_vaddr);
    end = std::max<std::uint64_t>(end, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
  }
  char program[4096] = "";
  const char* path = info->dlpi_name;
  if (path == nullptr || *path == '\0') {  // the program itself
    const ssize_t n = ::readlink("/proc/self/exe", program, sizeof program - 1);
    if (list.used > 0 || n <= 0) return 0;
    path = program;
  }
  const std::size_t left = list.bytes - list.used;
  const int written =
      std::snprintf(list.text + list.used, left, "%" PRIx64 " %" PRIx64 " %" PRIx64 " %s\n",
                    static_cast<std::uint64_t>(info->dlpi_addr), first, end, path);
  if (written < 0 || static_cast<std::size_t>(written) >= left) {
    list.text[list.used] = '\0';
    return 1;
  }
  list.used += static_cast<std::size_t>(written);
  return 0;
}

// ---------------------------------------------------------------- stacks

// In a signal handler: addresses alone, which the launcher turns into names.
void on_stack_request(int, siginfo_t*, void*) {
  const int saved_errno = errno;
  LedgerMemory* const ledger = memory();
  if (ledger != nullptr && !g_taking_stack.exchange(true)) {
    void* frames[kStackFrames];
    const int depth = ::backtrace(frames, static_cast<int>(std::size(frames)));
    // This function and the kernel's trampoline come first, and with a sanitizer one more frame.
    int own = 2;
    for (int i = 0; i < std::min(depth, 4); ++i)
      if (frames[i] == __builtin_return_address(0)) own = i + 1;
    for (int i = own; i < depth; ++i) {
      auto address = reinterpret_cast<std::uintptr_t>(frames[i]);
      if (i == own) ++address;  // the others are behind the call that counts
      set(ledger->stack[i - own], address);
    }
    set(ledger->stack_depth, static_cast<std::uint64_t>(std::max(0, depth - own)));
    ledger->stacks_taken.fetch_add(1, std::memory_order_release);
    g_taking_stack = false;
  }
  errno = saved_errno;
}

void install_stack_handler(LedgerMemory& ledger) {
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // loads the unwinder, which a handler must not do
  const int number = SIGRTMIN + kStackSignalOffset;
  struct sigaction before {};
  if (::sigaction(number, nullptr, &before) != 0 || before.sa_handler != SIG_DFL) return;
  struct sigaction action {};
  action.sa_sigaction = on_stack_request;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  if (::sigaction(number, &action, nullptr) == 0)
    set(ledger.stack_signal, static_cast<std::uint64_t>(number));
}

// Counts from before the ledger was opened belong to the rank too.
void take_progress(ProgressMemory& memory) {
  const auto take = [](Word& to, const Word& from) {
    to.store(from.load(std::memory_order_relaxed), std::memory_order_relaxed);
  };
  for (std::size_t i = 0; i < kMaxPhases; ++i) {
    take(memory.host_ns[i], g_own_progress.host_ns[i]);
    take(memory.device_ns[i], g_own_progress.device_ns[i]);
  }
  for (std::size_t i = 0; i < kMaxCounters; ++i) take(memory.counts[i], g_own_progress.counts[i]);
  take(memory.steps, g_own_progress.steps);
  take(memory.phase, g_own_progress.phase);
  const std::uint64_t began = g_own_progress.phase_since_ns.load(std::memory_order_relaxed);
  set(memory.phase_since_ns, began != 0 ? began : now_ns());
  g_progress.store(&memory, std::memory_order_release);
}

}  // namespace

ProgressMemory& progress() noexcept {
  return *g_progress.load(std::memory_order_acquire);
}

const char* name(Phase phase) {
  constexpr const char* kNames[] = {"",         "startup",       "data",      "forward",
                                    "backward", "communication", "optimizer", "evaluation",
                                    "logging",  "saving",        "ended",     "device_wait"};
  const auto index = static_cast<std::size_t>(phase);
  return index < std::size(kNames) ? kNames[index] : "?";
}

bool open() noexcept {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (memory() != nullptr) return true;
  const int fd = ledger_descriptor();
  if (fd < 0) return false;
  void* const place =
      ::mmap(nullptr, sizeof(LedgerMemory), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (place == MAP_FAILED) return false;
  auto* const ledger = static_cast<LedgerMemory*>(place);
  if (!belongs_to_this_rank(*ledger) || !claim(*ledger)) {
    ::munmap(place, sizeof(LedgerMemory));
    return false;
  }
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // what this process starts is not this rank
  ModuleList modules{ledger->modules, kModuleBytes};
  ::dl_iterate_phdr(add_module, &modules);
  set(ledger->thread, this_thread());
  take_progress(ledger->progress);
  g_ledger.store(ledger, std::memory_order_release);
  install_stack_handler(*ledger);
  // A child that was forked off is not this rank either. The memory stays mapped until the end.
  [[maybe_unused]] static const int forgotten = ::pthread_atfork(nullptr, nullptr, [] {
    g_ledger.store(nullptr, std::memory_order_release);
    g_progress.store(&g_own_progress, std::memory_order_release);
  });
  moved(*ledger);
  return true;
}

int stack_signal() noexcept {
  const LedgerMemory* const ledger = memory();
  return ledger == nullptr ? 0 : static_cast<int>(ledger->stack_signal.load());
}

// ---------------------------------------------------------------- notes

Ticket post(const Operation& operation) noexcept {
  LedgerMemory* const ledger = memory();
  if (ledger == nullptr) return 0;
  const Ticket ticket = ledger->next.fetch_add(1, std::memory_order_relaxed) + 1;
  RecordMemory& slot = slot_of(*ledger, ticket);
  // One writer per slot: a thread that is still at the record of the round before loses ours.
  std::uint64_t before = slot.version.load(std::memory_order_relaxed);
  if (before % 2 == 1 ||
      !slot.version.compare_exchange_strong(before, 2 * ticket - 1, std::memory_order_relaxed))
    return 0;
  std::atomic_thread_fence(std::memory_order_release);
  fill(slot.operation, operation.name);
  fill(slot.group, operation.group);
  std::uint64_t dtype = 0;
  std::memcpy(&dtype, operation.dtype, std::min(std::strlen(operation.dtype), sizeof dtype));
  fill(slot.dtype, dtype);
  fill(slot.sequence, operation.sequence);
  fill(slot.bytes, operation.bytes);
  const auto peer = static_cast<std::uint64_t>(std::max(operation.peer, -1) + 1);
  fill(slot.kind, peer << 16 | static_cast<std::uint64_t>(operation.message) << 8 |
                      (ledger->progress.phase.load(std::memory_order_relaxed) & 0xff));
  fill(slot.call_site, reinterpret_cast<std::uintptr_t>(detail::call_site));
  fill(slot.posted_ns, operation.time_ns != 0 ? operation.time_ns : now_ns());
  fill(slot.end, ticket << 2);
  fill(slot.step, ledger->progress.step.load(std::memory_order_relaxed));
  set(slot.version, 2 * ticket);
  return ticket;
}

void started(Ticket ticket) noexcept {
  LedgerMemory* const ledger = ticket != 0 ? memory() : nullptr;
  // A record that has taken the slot has another ticket and takes this for "not yet".
  if (ledger != nullptr) set(slot_of(*ledger, ticket).started, ticket);
}

void ended(Ticket ticket, End end) noexcept {
  LedgerMemory* const ledger = ticket != 0 ? memory() : nullptr;
  if (ledger == nullptr) return;
  std::uint64_t under_way = ticket << 2;
  const std::uint64_t value = now_ns() << 2 | static_cast<std::uint64_t>(end);
  slot_of(*ledger, ticket).end.compare_exchange_strong(under_way, value, std::memory_order_relaxed);
  moved(*ledger);
}

namespace {
// `ended` counts the steps that have ended since the last one that was published.
void publish_step(std::uint64_t step, std::uint64_t ended) {
  ProgressMemory& at = progress();
  const std::uint64_t now = now_ns();
  const std::uint64_t began = g_step_began_ns.exchange(now);
  if (began != 0) set(at.step_ns, (now - began) / std::max<std::uint64_t>(ended, 1));
  at.steps.fetch_add(ended, std::memory_order_relaxed);
  set(at.step, step + 1);
  if (LedgerMemory* const ledger = memory()) moved(*ledger);
}

// A step has ended if the one before it was published. Any other number is where a run begins: the
// first of this process, or one that continues from a checkpoint.
void publish_next(std::uint64_t step) {
  const std::uint64_t before = progress().step.load(std::memory_order_relaxed);
  if (before == step + 1) return;
  publish_step(step, step == std::max<std::uint64_t>(before, 1) ? 1 : 0);
}
}  // namespace

void set_step(std::int64_t step) noexcept {
  g_steps_are_set = true;
  if (step >= 0) publish_next(static_cast<std::uint64_t>(step));
}

void count_step() noexcept {
  if (g_recording) return static_cast<void>(g_recorded.steps.fetch_add(1));
  g_steps_are_counted = true;
  if (g_steps_are_set) return;
  const std::uint64_t before = progress().step.load(std::memory_order_relaxed);
  publish_next(before == 0 ? 1 : before);
}

void reach_step(std::int64_t step) noexcept {
  if (step < 0 || g_steps_are_set) return;
  const auto now = static_cast<std::uint64_t>(step);
  const std::uint64_t before = progress().step.load(std::memory_order_relaxed);
  if (before == now + 1) return;
  if (g_steps_are_counted || before > now) return continue_at(step);
  if (before == 0) return publish_next(now);
  publish_step(now, now + 1 - before);
}

void continue_at(std::int64_t step) noexcept {
  if (step < 0) return;
  g_step_began_ns = now_ns();
  set(progress().step, static_cast<std::uint64_t>(step) + 1);
  if (LedgerMemory* const ledger = memory()) moved(*ledger);
}

std::int64_t step() noexcept {
  return static_cast<std::int64_t>(progress().step.load(std::memory_order_relaxed)) - 1;
}

void set_output_dir(std::string_view path) noexcept {
  LedgerMemory* const ledger = memory();
  if (ledger == nullptr || path.size() >= sizeof ledger->output_dir) return;
  std::uint64_t before = ledger->output_dir_version.load(std::memory_order_relaxed);
  if (before % 2 == 1 || !ledger->output_dir_version.compare_exchange_strong(
                             before, before + 1, std::memory_order_relaxed))
    return;
  std::atomic_thread_fence(std::memory_order_release);
  fill(ledger->output_dir, path);
  set(ledger->output_dir_version, before + 2);
}

Phase set_phase(Phase phase) noexcept {
  ProgressMemory& at = progress();
  if (static_cast<Phase>(at.phase.load(std::memory_order_relaxed)) == phase) return phase;
  at.changes.fetch_add(1, std::memory_order_acq_rel);
  const auto before = static_cast<Phase>(
      at.phase.exchange(static_cast<std::uint64_t>(phase), std::memory_order_acq_rel));
  const std::uint64_t now = now_ns();
  const std::uint64_t began = at.phase_since_ns.exchange(now, std::memory_order_acq_rel);
  if (began != 0 && now > began)
    at.host_ns[static_cast<std::size_t>(before) % kMaxPhases].fetch_add(now - began,
                                                                        std::memory_order_relaxed);
  at.changes.fetch_add(1, std::memory_order_release);
  LedgerMemory* const ledger = memory();
  if (ledger == nullptr) return before;
  fill(ledger->thread, this_thread());
  moved(*ledger);
  return before;
}

// ---------------------------------------------------------------- sums of the steps

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
                                    "updates",         "separate_passes"};
  static_assert(std::size(kNames) == kCounters);
  return kNames[index(counter)];
}

Phase phase() noexcept {
  return static_cast<Phase>(progress().phase.load(std::memory_order_relaxed));
}

namespace {
// Other threads may count other things while passes are recorded.
bool is_of_passes(Counter counter) {
  return counter == Counter::kMicroBatches || counter == Counter::kSynchronisedPasses ||
         counter == Counter::kUpdates || counter == Counter::kBuckets ||
         counter == Counter::kReducedBytes;
}
}  // namespace

void add(Counter counter, std::uint64_t amount) noexcept {
  ProgressMemory& at = g_recording && is_of_passes(counter) ? g_recorded : progress();
  at.counts[index(counter)].fetch_add(amount, std::memory_order_relaxed);
}

void begin_recording() noexcept {
  g_recording = true;
}

Totals end_recording() noexcept {
  g_recording = false;
  Totals recorded;
  recorded.steps = g_recorded.steps.exchange(0);
  for (std::size_t i = 0; i < kCounters; ++i) recorded.counts[i] = g_recorded.counts[i].exchange(0);
  return recorded;
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
