#include "lockstep/comm/shm/parking.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace lockstep::shm {
namespace {

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

}  // namespace

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
