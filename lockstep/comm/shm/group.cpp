#include "lockstep/comm/shm/group.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <iterator>
#include <utility>

#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/error.h"

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
  // If several ranks post at once, one wake-up is enough.
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

// ---------------------------------------------------------------- failures

EngineFailure failure_from(std::string_view doing, const std::exception& error) {
  EngineFailure failure;
  failure.text = fmt::format("{} failed: {}", doing, error.what());
  failure.timeout = dynamic_cast<const TimeoutError*>(&error) != nullptr;
  failure.disagreement = dynamic_cast<const detail::Disagreement*>(&error) != nullptr;
  if (const auto* comm = dynamic_cast<const CommError*>(&error)) {
    failure.context = comm->context();
    failure.culprit = failure.context.peer;
  }
  return failure;
}

void FailureRecord::set(EngineFailure failure) noexcept {
  if (failure.origin < 0) failure.origin = group_.rank();
  {
    const std::lock_guard lock(mutex_);
    if (broken()) return;
    failure_ = std::move(failure);
    broken_.store(true);
    Header& own = *group_.own().header;
    own.trouble.origin = failure_.origin;
    own.trouble.culprit = failure_.culprit;
    own.trouble.timeout = failure_.timeout ? 1 : 0;
    own.trouble.disagreement = failure_.disagreement ? 1 : 0;
    own.trouble.why_at = static_cast<std::uint32_t>(failure_.why_at);
    failure_.text.copy(own.trouble.text, sizeof own.trouble.text - 1);
    own.state.store(State::kBroken);
  }
  group_.wake_all();
}

// A failure that another rank has found is reported with that rank's message. A disagreement is
// found by all ranks, so it is not attributed to one.
std::string FailureRecord::composed(const EngineFailure& failure) const {
  if (failure.origin < 0 || failure.origin == group_.rank() || failure.disagreement)
    return failure.text;
  return fmt::format("rank {} failed: {}", failure.origin, failure.text);
}

std::string FailureRecord::text() const {
  const std::lock_guard lock(mutex_);
  return broken() ? composed(failure_) : "";
}

std::exception_ptr FailureRecord::as_exception() const {
  const std::lock_guard lock(mutex_);
  return as_exception(failure_);
}

std::exception_ptr FailureRecord::as_exception(const EngineFailure& failure) const {
  CommContext context = failure.context;
  context.rank = group_.rank();
  context.peer = failure.culprit;
  if (failure.timeout)
    return std::make_exception_ptr(
        detail::LateOperation({"shm", composed(failure), std::move(context)},
                              failure.why_at == 0 ? "" : failure.text.substr(failure.why_at)));
  if (failure.disagreement)
    return std::make_exception_ptr(
        detail::Disagreement("shm", composed(failure), std::move(context)));
  return std::make_exception_ptr(CommError("shm", composed(failure), std::move(context)));
}

EngineFailure FailureRecord::published_by(int rank) const {
  const Trouble& reported = group_.view(rank).header->trouble;
  const std::size_t length = ::strnlen(reported.text, sizeof reported.text);
  return {.timeout = reported.timeout != 0,
          .disagreement = reported.disagreement != 0,
          .text = {reported.text, length},
          .why_at = std::min<std::size_t>(reported.why_at, length),
          .culprit = reported.culprit,
          .origin = reported.origin};
}

// One death causes others, because ranks that give up end soon too. So ranks that died without a
// report come first, then those that reported why they gave up, and last those that had nothing
// more to do.
std::vector<EngineFailure> FailureRecord::of_peers() const {
  pollfd fds[kMaxRanks];
  nfds_t count = 0;
  for (const Peer& peer : group_.peers())
    if (peer.pidfd) fds[count++] = {peer.pidfd.get(), POLLIN, 0};
  const bool any_dead = count > 0 && ::poll(fds, count, 0) > 0;
  std::vector<EngineFailure> dead, broken, closed;
  nfds_t at = 0;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const Peer& peer = group_.peers()[static_cast<std::size_t>(rank)];
    if (!peer.pidfd) continue;
    const bool ended = any_dead && fds[at].revents != 0;
    ++at;
    const State state = group_.view(rank).header->state.load();
    if (state == State::kBroken) broken.push_back(published_by(rank));
    if (state == State::kBroken || (state == State::kAlive && !ended)) continue;
    EngineFailure& trouble = (state == State::kAlive ? dead : closed).emplace_back();
    trouble.culprit = rank;
    trouble.text = state == State::kAlive
                       ? fmt::format("rank {} (process {}) has ended", rank, peer.pid)
                       : fmt::format("rank {} has closed its engine", rank);
  }
  for (auto* others : {&broken, &closed})
    std::move(others->begin(), others->end(), std::back_inserter(dead));
  return dead;
}

}  // namespace lockstep::shm
