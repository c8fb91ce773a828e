#include "lockstep/comm/shm/group.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <utility>

#include "lockstep/comm/shm/segment.h"

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

void wake(Header& header) {
  if (header.waiting_for.exchange(0) != 0) ring(header);
}

}  // namespace

Group::Group(const RankAndSize& info, const Layout& layout, std::vector<Peer> peers)
    : info_(info), layout_(layout), peers_(std::move(peers)) {
  for (const Peer& peer : peers_) views_.push_back(layout_.view(peer.segment->data()));
}

void Group::wake_peer(int rank) const {
  Header& header = *view(rank).header;
  std::uint32_t code = header.waiting_for.load();
  if (code != kAnyone && code != static_cast<std::uint32_t>(info_.rank) + 1) return;
  // Where several ranks post at once, one of them is enough to wake it.
  if (header.waiting_for.compare_exchange_strong(code, 0)) ring(header);
}

void Group::wake_self() const {
  wake(*own().header);
}

void Group::wake_all() const {
  for (const View& each : views_) wake(*each.header);
}

void Group::sleep_while(std::uint32_t code, const std::function<bool()>& still) const {
  timespec timeout{};
  timeout.tv_nsec = std::chrono::nanoseconds(kLongestSleep).count();
  Header& header = *own().header;
  const std::uint32_t value = header.bell.load();
  header.waiting_for.store(code);
  if (still()) futex(header.bell, FUTEX_WAIT, value, &timeout);
  header.waiting_for.store(0);
}

}  // namespace lockstep::shm
