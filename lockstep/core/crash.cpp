#include "lockstep/core/crash.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <span>
#include <typeinfo>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/symbols.h"
#include "lockstep/core/text.h"
#include "lockstep/core/thread_signals.h"

namespace lockstep::crash {
namespace {

constexpr int kFrames = 64;
constexpr std::size_t kAlternateStackBytes = 512u << 10;
constexpr unsigned kReadableReportSeconds = 5;
constexpr std::chrono::milliseconds kSourceLines{2500};  // less than the report that waits for them

// After these the program can continue: a breakpoint, a system call that a sandbox stopped.
constexpr bool can_continue(int number) {
  return number == SIGTRAP || number == SIGSYS;
}

// Everything that the signal handler reads is prepared here.
std::atomic<bool> g_installed{false};
std::atomic<bool> g_reported{false};
std::atomic<long> g_crashed_thread{0};  // the one that reports a signal
std::atomic<bool> g_crash_reported{false};
std::atomic<int> g_rank{-1};
std::atomic<bool> g_under_lockstep_run{false};
std::atomic<bool> g_launcher_prints{false};
char g_host[256] = "";
char g_error_file[4096] = "";
struct sigaction g_before[std::size(kFaultSignals)];
std::terminate_handler g_terminate_before = nullptr;

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

// Lines are looked up where they may be known and help: not in the libraries.
std::vector<std::string> frame_texts(std::span<void* const> frames) {
  std::vector<std::string> texts;
  struct Asked {
    std::vector<std::size_t> frames;
    std::vector<std::uint64_t> addresses;
  };
  std::map<std::string, Asked> files;
  for (void* frame : frames) {
    texts.push_back(symbols::frame_text(frame));
    const symbols::Place place = symbols::place_of(frame);
    if (place.file.empty() || is_library_frame(texts.back())) continue;
    files[place.file].frames.push_back(texts.size() - 1);
    files[place.file].addresses.push_back(place.address);
  }
  const Deadline deadline = Deadline::after(kSourceLines);
  for (const auto& [file, asked] : files) {
    const auto lines = symbols::source_lines(file, asked.addresses, deadline);
    for (std::size_t i = 0; i < lines.size(); ++i)
      if (!lines[i].empty()) texts[asked.frames[i]] += ' ' + lines[i];
  }
  return texts;
}

std::string indented(const std::vector<std::string>& stack) {
  std::string text;
  for (const std::string& line : brief_stack(stack))
    text += fmt::format("\n    {}{}", line.starts_with("... ") ? "" : "at ", line);
  return text;
}

// ---------------------------------------------------------------- the readable report

std::string error_file_text(const Report& report) {
  const std::time_t timestamp = std::time(nullptr) + (report.consequence ? 1 : 0);
  NodeMembers info = {{"timestamp", text_node(fmt::to_string(timestamp))},
                      {"rank", integer_node(g_rank.load())},
                      {"host", text_node(g_host)},
                      {"pid", integer_node(::getpid())},
                      {"cpp_stack", texts_node(report.frames)},
                      {"consequence", bool_node(report.consequence)}};
  if (!report.frames.empty() && !g_under_lockstep_run) {
    // torchrun shows this field where there is one, and nothing else.
    info.emplace_back("py_callstack", text_node(report.message + indented(report.frames)));
  }
  return to_json(map_node({{"message", map_node({{"message", text_node(report.message)},
                                                 {"extraInfo", map_node(std::move(info))}})}}));
}

std::string stderr_text(const Report& report) {
  const int rank = g_rank;
  std::string text = "lockstep: ";
  if (rank >= 0) text += fmt::format("rank {}{}{}: ", rank, *g_host == '\0' ? "" : " on ", g_host);
  text += report.message;
  if (!report.consequence) text += indented(report.frames);
  return text + "\n";
}

void write_readable(const Report& report) noexcept {
  bool filed = false;
  try {
    if (*g_error_file != '\0') {
      write_file_atomically(g_error_file, error_file_text(report));
      filed = true;
    }
  } catch (...) {  // the launcher then reports the exit status alone
  }
  if (report.printed || (filed && g_launcher_prints)) return;
  try {
    write_all(STDERR_FILENO, stderr_text(report));
  } catch (...) {  // nobody reads stderr
  }
}

// ---------------------------------------------------------------- the report of a signal handler

// Text in a fixed place: fmt neither allocates nor locks for numbers and strings.
class PlainText {
 public:
  template <typename... Args>
  PlainText& add(fmt::format_string<Args...> format, Args&&... args) {
    const std::size_t room = sizeof data_ - length_;
    const auto made = fmt::format_to_n(data_ + length_, room, format, std::forward<Args>(args)...);
    length_ += std::min(made.size, room);
    return *this;
  }
  PlainText& add_escaped(const char* text) {
    for (; *text != '\0'; ++text) {
      const auto c = static_cast<unsigned char>(*text);
      add("{}{}", c == '"' || c == '\\' ? "\\" : "", c < 0x20 || c > 0x7e ? '?' : *text);
    }
    return *this;
  }
  std::string_view view() const { return {data_, length_}; }
  void write_to(int fd) const { (void)!::write(fd, data_, length_); }

 private:
  char data_[16384];
  std::size_t length_ = 0;
};

struct Crash {
  PlainText message;
  void* frames[kFrames];
  int depth;
};

void write_plain_file(const Crash& crash) {
  if (*g_error_file == '\0') return;
  static PlainText text;
  text.add(R"({{"message": {{"message": "{}", "extraInfo": {{"timestamp": "{}")",
           crash.message.view(), std::time(nullptr));
  if (const int rank = g_rank; rank >= 0) text.add(R"(, "rank": {})", rank);
  text.add(R"(, "cpp_stack": [)");
  for (int i = 0; i < crash.depth; ++i) {
    Dl_info info{};
    const bool known = ::dladdr(static_cast<char*>(crash.frames[i]) - 1, &info) != 0;
    const auto value = reinterpret_cast<std::uintptr_t>(crash.frames[i]);
    const auto base = reinterpret_cast<std::uintptr_t>(known ? info.dli_fbase : nullptr);
    text.add("{}", i == 0 ? "\"" : ", \"");
    if (known && info.dli_sname != nullptr) text.add_escaped(info.dli_sname).add(" ");
    text.add("(").add_escaped(known ? base_name(info.dli_fname) : "?");
    text.add("+{:#x})\"", value - base);
  }
  text.add("]}}}}}}");
  const int fd = ::open(g_error_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return;
  text.write_to(fd);
  ::close(fd);
}

void write_plain_line(const Crash& crash) {
  static PlainText text;
  text.add("lockstep: ");
  if (const int rank = g_rank; rank >= 0) text.add("rank {}: ", rank);
  text.add("{}\n", crash.message.view()).write_to(STDERR_FILENO);
}

// In the forked copy: may allocate and lock, and may hang or crash over what the signal broke. It
// then ends without a core file of its own, and the plain report stands.
[[noreturn]] void write_readable_and_leave(const Crash& crash) {
  const rlimit no_core{0, 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  sigset_t all;
  sigfillset(&all);
  ::pthread_sigmask(SIG_UNBLOCK, &all, nullptr);
  for (const int fault : kFaultSignals) std::signal(fault, SIG_DFL);
  std::signal(SIGALRM, SIG_DFL);
  ::alarm(kReadableReportSeconds);
  write_readable({std::string(crash.message.view()),
                  frame_texts({crash.frames, static_cast<std::size_t>(crash.depth)}), false});
  ::_exit(0);
}

template <typename Done>
bool await(unsigned seconds, const Done& done) {
  constexpr timespec kPause{0, 5'000'000};
  for (unsigned waited_ms = 0; waited_ms < seconds * 1000; waited_ms += 5) {
    if (done()) return true;
    ::nanosleep(&kPause, nullptr);
  }
  return false;
}

// True when a copy of this process has written the readable report in time.
bool fork_readable(const Crash& crash) {
  // Not fork(): its handlers take locks that the crashed code may hold.
  const long child = ::syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (child == 0) write_readable_and_leave(crash);
  if (child < 0) return false;
  int status = 0;
  const auto ended = [&] {
    return ::waitpid(static_cast<pid_t>(child), &status, __WALL | WNOHANG) == child;
  };
  if (await(kReadableReportSeconds + 1, ended))
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  ::kill(static_cast<pid_t>(child), SIGKILL);
  return false;
}

// The program counter is behind the instruction that trapped: int3, but not brk.
#if defined(__x86_64__)
constexpr bool kTrapsAreCompleted = true;
#else
constexpr bool kTrapsAreCompleted = false;
#endif

struct Interrupted {
  void* program_counter = nullptr;
  void* return_address = nullptr;  // as the first instruction of a function finds it
};

Interrupted interrupted(void* context) {
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  void* pc = reinterpret_cast<void*>(machine.gregs[REG_RIP]);
  // Only a jump to nowhere has just pushed its return address; read the stack in no other case.
  return {pc, pc == nullptr ? *reinterpret_cast<void**>(machine.gregs[REG_RSP]) : nullptr};
#elif defined(__aarch64__)
  return {reinterpret_cast<void*>(machine.pc), reinterpret_cast<void*>(machine.regs[30])};
#else
  (void)machine;
  return {};
#endif
}

void take_frames(Crash& crash, void* context, bool completed) {
  const Interrupted at = interrupted(context);
  if (at.program_counter == nullptr && at.return_address != nullptr) {
    // A call through a null pointer: nothing can be unwound from there, but the caller is known.
    crash.depth = 1;
    crash.frames[0] = at.return_address;
    return;
  }
  void* frames[kFrames + 8];
  const int depth = ::backtrace(frames, static_cast<int>(std::size(frames)));
  int first = 0;  // the interrupted function comes after the handler and the kernel's trampoline
  for (int i = 0; i < depth; ++i) {
    if (frames[i] == at.program_counter) {
      first = i;
      break;
    }
  }
  crash.depth = std::min(depth - first, kFrames);
  // All others are return addresses, one after the instruction that counts. So is this one after an
  // instruction that was completed.
  if (depth > 0 && frames[first] == at.program_counter && !completed)
    frames[first] = static_cast<char*>(frames[first]) + 1;
  std::memcpy(crash.frames, frames + first, sizeof(void*) * static_cast<std::size_t>(crash.depth));
}

void on_fatal_signal(int number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  std::size_t index = 0;
  while (index + 1 < std::size(kFaultSignals) && kFaultSignals[index] != number) ++index;
  const long self = ::syscall(SYS_gettid);
  if (!g_reported.exchange(true)) {
    g_crashed_thread = self;
    static Crash crash;
    crash.message.add("killed by SIG{}", ::sigabbrev_np(number));  // a table: safe here
    if (info->si_code > 0 && (number == SIGSEGV || number == SIGBUS))
      crash.message.add(" at address {:#x}", reinterpret_cast<std::uintptr_t>(info->si_addr));
    take_frames(crash, context, kTrapsAreCompleted && number == SIGTRAP && info->si_code > 0);
    write_plain_file(crash);
    if (!fork_readable(crash)) write_plain_line(crash);
    g_crash_reported = true;
  } else if (g_crashed_thread != 0 && g_crashed_thread != self) {
    // Two threads crashed: the first one's report must be finished.
    await(kReadableReportSeconds + 2, [] { return g_crash_reported.load(); });
  }
  ::sigaction(number, &g_before[index], nullptr);
  // A fault happens again when its instruction does; a signal that was sent, or after which the
  // program could continue, must be sent again. It stays blocked until this handler returns.
  if (info->si_code <= 0 || can_continue(number)) ::syscall(SYS_tgkill, ::getpid(), self, number);
  errno = saved_errno;
}

// ---------------------------------------------------------------- std::terminate

[[noreturn]] void on_terminate() {
  Report report{.message = "std::terminate was called without an exception",
                .frames = stack(1),
                .consequence = false};
  if (const std::exception_ptr current = std::current_exception()) {
    try {
      std::rethrow_exception(current);
    } catch (const std::exception& e) {
      report.message = "uncaught " + describe(e);
      if (auto frames = thrown_at(e); !frames.empty()) report.frames = std::move(frames);
    } catch (...) {
      const std::type_info* type = abi::__cxa_current_exception_type();
      report.message = "uncaught exception of type " +
                       (type != nullptr ? symbols::demangle(type->name()) : std::string("unknown"));
      if (auto frames = throw_trace::find_latest(); !frames.empty())
        report.frames = frame_texts(frames);
    }
  }
  crash::report(report);
  if (g_terminate_before != nullptr) g_terminate_before();
  std::abort();
}

void learn_surroundings() {
  ::gethostname(g_host, sizeof g_host - 1);
  const char* file = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (file != nullptr && std::strlen(file) < sizeof g_error_file) std::strcpy(g_error_file, file);
}

// Costs time, so only if a launcher reads the error file, or the user asks for it.
bool shall_trace_throws() {
  const char* asked = std::getenv("LOCKSTEP_TRACE_THROWS");
  if (asked == nullptr || *asked == '\0') return g_error_file[0] != '\0';
  return std::strcmp(asked, "0") != 0;
}

void install_signal_handlers() {
  // An overflowed stack cannot hold its own handler.
  void* memory = ::mmap(nullptr, kAlternateStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (memory != MAP_FAILED) {
    stack_t alternate{};
    alternate.ss_sp = memory;
    alternate.ss_size = kAlternateStackBytes;
    ::sigaltstack(&alternate, nullptr);
  }
  for (std::size_t i = 0; i < std::size(kFaultSignals); ++i) {
    struct sigaction action {};
    action.sa_sigaction = on_fatal_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    ::sigaction(kFaultSignals[i], nullptr, &g_before[i]);
    // A handler that is already there lets the program continue.
    if (can_continue(kFaultSignals[i]) && g_before[i].sa_handler != SIG_DFL) continue;
    ::sigaction(kFaultSignals[i], &action, nullptr);
  }
}

}  // namespace

void install(int rank, const Reader& reader) {
  g_rank = rank;
  g_under_lockstep_run = reader.lockstep_run;
  g_launcher_prints = reader.prints_all;
  if (g_installed.exchange(true)) return;
  learn_surroundings();
  if (shall_trace_throws()) throw_trace::enable();
  g_terminate_before = std::set_terminate(on_terminate);
  install_signal_handlers();
}

[[gnu::noinline]] std::vector<std::string> stack(int skip) {
  std::array<void*, kFrames> frames{};
  const int depth = ::backtrace(frames.data(), kFrames);
  // Found by address: a sanitizer's backtrace() adds a frame of its own.
  const auto caller = std::find(frames.begin(), frames.end(), __builtin_return_address(0));
  const auto first = std::min<std::size_t>(depth, caller - frames.begin() + skip);
  return frame_texts(std::span(frames).subspan(first, depth - first));
}

std::vector<std::string> thrown_at(const std::exception& e) {
  return frame_texts(throw_trace::find(dynamic_cast<const void*>(&e)));
}

std::string describe(const std::exception& e) {
  return fmt::format("{}: {}", symbols::demangle(typeid(e).name()), printable_lines(e.what()));
}

bool report(const Report& report) noexcept {
  if (g_reported.exchange(true)) return false;
  if (!g_installed) learn_surroundings();
  write_readable(report);
  return true;
}

bool report(const std::exception& e) noexcept {
  try {
    return report({describe(e), thrown_at(e), false});
  } catch (...) {
    return false;
  }
}

}  // namespace lockstep::crash
