#include "lockstep/train/stop_signals.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <thread>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/rendezvous/control.h"

namespace lockstep::train {
namespace {

using std::chrono::milliseconds;

constexpr std::array<int, 3> kSignals{SIGTERM, SIGUSR1, SIGUSR2};
constexpr milliseconds kTick{200};

// State that the handler may access: numbers without locks, and a descriptor to wake the watcher.
std::atomic<bool> g_installed{false};
std::atomic<int> g_signal{0};
std::atomic<int> g_wake{-1};

void on_signal(int number) {
  const int saved = errno;
  int none = 0;
  g_signal.compare_exchange_strong(none, number);
  const char byte = 1;
  if (const int fd = g_wake.load(); fd >= 0)
    if (::write(fd, &byte, 1) < 0) errno = saved;  // full: it is awake already
  errno = saved;
}

}  // namespace

void report_stop(const std::string& text) noexcept {
  try {
    const auto file = env::get("TORCHELASTIC_ERROR_FILE");
    if (!file) return;
    write_file_atomically(
        *file,
        fmt::format(R"({{"message": {{"message": "{}", "extraInfo": {{"timestamp": "{}"}}}}}})",
                    text, std::time(nullptr)));
  } catch (const std::exception& e) {
    log::warning("trainer", "{}", e.what());
  }
}

struct StopSignals::Watch {
  StopSignalOptions options;
  std::array<struct sigaction, kSignals.size()> before{};
  Pipe wake;
  std::atomic<bool> over{false};
  std::atomic<bool> agreed{false};
  std::atomic<std::int64_t> step_ms{-1};  // the longest; -1: none has been taken
  std::thread thread;
};

StopSignals::StopSignals(StopSignalOptions options) {
  if (!options.install) return;
  if (g_installed.exchange(true)) {
    throw UsageError(
        "stop",
        "two wait for stop signals in one process (StopRequest, or a Trainer). Use one "
        "after the other. Of two Trainers, set enable_jit_checkpoint to false for "
        "one; a loop inside a Trainer's process needs no StopRequest.");
  }
  watch_ = std::make_unique<Watch>();
  watch_->options = std::move(options);
  watch_->wake = make_pipe();
  set_nonblocking(watch_->wake.write.get());
  g_signal = 0;
  g_wake = watch_->wake.write.get();
  // The watcher takes no signals: handlers run where they did before.
  {
    const SignalsBlocked blocked;
    watch_->thread = std::thread([this] { watch(); });
  }
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i)
    ::sigaction(kSignals[i], &action, &watch_->before[i]);
}

StopSignals::~StopSignals() {
  if (!watch_) return;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    // Once a failure is known, control.h has restored the default action, which stays.
    struct sigaction now {};
    ::sigaction(kSignals[i], nullptr, &now);
    if (now.sa_handler == on_signal) ::sigaction(kSignals[i], &watch_->before[i], nullptr);
  }
  watch_->over = true;
  const char byte = 0;
  if (::write(watch_->wake.write.get(), &byte, 1) < 0) {
    // The watcher looks at `over` every tick anyway.
  }
  watch_->thread.join();
  g_wake = -1;
  g_installed = false;
}

int StopSignals::requested() const {
  if (!watch_) return 0;
  const int number = g_signal.load();
  if (number == 0) return 0;
  // The launcher's stop after a failure is not a request to save.
  return control::failure() ? 0 : number;
}

void StopSignals::agreed() {
  if (watch_) watch_->agreed = true;
}

void StopSignals::set_step_time(std::chrono::milliseconds step) {
  if (watch_) watch_->step_ms = std::max<std::int64_t>(watch_->step_ms, step.count());
}

void StopSignals::watch() {
  Watch& w = *watch_;
  while (!w.over && g_signal.load() == 0) {
    pollfd fd{w.wake.read.get(), POLLIN, 0};
    ::poll(&fd, 1, 1000);
  }
  if (w.over) return;
  const auto bound_now = [&w] {
    const std::int64_t step_ms = w.step_ms;
    const auto longer = step_ms < 0 ? w.options.first_deadline : milliseconds(2 * step_ms);
    return std::max(w.options.deadline, longer);
  };
  const auto start = std::chrono::steady_clock::now();
  milliseconds bound = bound_now();
  // The step under way may be the longest yet, or the first: the bound is computed again.
  for (; !w.over && !w.agreed; bound = bound_now()) {
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited >= bound) break;
    // A failure that is announced cancels the request: the world is being ended anyway.
    if (control::failure()) return;
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(kTick, bound - waited));
  }
  if (w.over || w.agreed) return;
  const std::string why = fmt::format(
      "stop requested by {} was not agreed by all ranks within {:.1f} s. Another rank is "
      "probably stuck. No checkpoint is written now; the newest one remains.",
      signal_name(g_signal.load()), static_cast<double>(bound.count()) / 1000);
  log::error("trainer", "{}", why);
  if (w.options.give_up) w.options.give_up("[trainer] " + why);
}

}  // namespace lockstep::train
