#include "lockstep/comm/shm/backoff.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <utility>

namespace lockstep::shm {
namespace {

// A wake-up through the kernel costs about as much as ten small operations, so it must stay the
// exception. Offering the core costs little when nobody wants it, and is what helps when the rank
// that is waited for has no core. But an unrelated process that computes takes it for milliseconds,
// and a sleeping rank would be woken sooner: after such a loss the next waits go to sleep at once.
constexpr std::chrono::microseconds kAlone{10};      // before the core is offered
constexpr std::chrono::microseconds kAwakeFor{100};  // before sleep
constexpr std::chrono::microseconds kLost{500};      // another process took the core
constexpr unsigned kWaryWaits = 200;
constexpr unsigned kTurnsPerLook = 8;          // at the clock
constexpr unsigned kOversubscribedTurns = 16;  // before the core is offered, if oversubscribed

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  // Not the private kind: the word lies in memory of several processes.
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout,
                   nullptr, 0);
}

void ring(Header& header) {
  header.bell.fetch_add(1);
  futex(header.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

// To stay on one core for good would be worse than anything that leaving another can gain. What may
// fail is that somebody has just taken these very cores from the process: then all it still has,
// which the kernel knows.
void allow_again(const cpu_set_t& cores, SetAffinity set) {
  constexpr int kTries = 3;
  for (int i = 0; i < kTries; ++i)
    if (set(0, sizeof cores, &cores) == 0) return;
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int core = 0; core < CPU_SETSIZE; ++core) CPU_SET(core, &all);
  set(0, sizeof all, &all);
}

}  // namespace

Backoff::State Backoff::pass() {
  ++turns_;
  const bool offer = offering_ || (oversubscribed_ && turns_ > kOversubscribedTurns);
  if (offer && wary_ > 0) return kPark;
  if (offer)
    ::sched_yield();
  else
    pause_core();
  if (!offer && turns_ % kTurnsPerLook != 0) return kSpin;
  const auto before = std::exchange(looked_, Clock::now());
  if (since_ == Clock::time_point{}) since_ = looked_;
  if (offer && before != Clock::time_point{} && looked_ - before > kLost) wary_ = kWaryWaits;
  const bool alone = std::exchange(offering_, looked_ - since_ > kAlone);
  if (looked_ - since_ > kAwakeFor) return kPark;
  return offering_ && !alone && !oversubscribed_ ? kYield : kSpin;
}

void migrate_off_cores(const std::vector<int>& taken, SetAffinity set) {
  cpu_set_t before;
  if (::sched_getaffinity(0, sizeof before, &before) != 0) return;  // more cores than it can name
  // A thread that may not set what it has could not come back.
  if (set(0, sizeof before, &before) != 0) return;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &before) || std::find(taken.begin(), taken.end(), core) != taken.end())
      continue;
    cpu_set_t free;
    CPU_ZERO(&free);
    CPU_SET(core, &free);
    if (set(0, sizeof free, &free) == 0) allow_again(before, set);
    return;
  }
}

void wake_if_waiting(Header& header, int from) {
  std::uint32_t code = header.waiting_for.load();
  if (code != kAnyone && code != static_cast<std::uint32_t>(from) + 1) return;
  // Of several who post at once, one is enough to wake it.
  if (header.waiting_for.compare_exchange_strong(code, 0)) ring(header);
}

void wake(Header& header) {
  if (header.waiting_for.exchange(0) != 0) ring(header);
}

void sleep_on(std::atomic<std::uint32_t>& bell, std::uint32_t value) {
  timespec timeout{};
  timeout.tv_nsec = std::chrono::nanoseconds(kLongestSleep).count();
  futex(bell, FUTEX_WAIT, value, &timeout);
}

}  // namespace lockstep::shm
