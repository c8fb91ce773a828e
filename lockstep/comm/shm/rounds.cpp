// The part of the engine that talks to the peers: rounds, and what keeps one from ending.
#include <fmt/ranges.h>
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "lockstep/comm/shm/engine_core.h"

namespace lockstep::shm {

// ---------------------------------------------------------------- rounds

bool EngineCore::step(bool quick_only) {
  bool moved = messages_.pending() > 0 && messages_.pump(*this);
  if (!queue_.empty() && (!quick_only || queue_.front()->quick))
    moved |= step_collective(*queue_.front());
  return moved;
}

bool EngineCore::step_collective(Collective& collective) {
  bool moved = false;
  if (!posted_) {
    collective.fill(*this, static_cast<int>((round_ + 1) & 1));
    post(collective);
    moved = true;
  }
  if (!all_posted()) return moved;
  if (first_round_ && !agreed(collective)) return true;
  first_round_ = false;
  switch (collective.take(*this, static_cast<int>(round_ & 1))) {
    case Collective::Next::kAgain:
      return true;
    case Collective::Next::kRound:
      posted_ = false;
      return true;
    case Collective::Next::kDone:
      break;
  }
  const auto finished = queue_.front();
  queue_.pop_front();
  posted_ = false;
  first_round_ = true;
  finish(*finished);
  return true;
}

void EngineCore::post(const Collective& collective) {
  ++round_;
  Post& own = view(place_.rank).header->posts[round_ & 1];
  if (first_round_) own.what = collective.what;
  own.cpu.store(::sched_getcpu(), std::memory_order_relaxed);
  own.round.store(round_);
  posted_ = true;
  arrived_ = 0;
  for (int rank = 0; rank < place_.size; ++rank)
    if (rank != place_.rank) wake_peer(rank);
}

bool EngineCore::all_posted() {
  for (; arrived_ < place_.size; ++arrived_) {
    if (arrived_ == place_.rank) continue;
    if (view(arrived_).header->posts[round_ & 1].round.load() < round_) return false;
  }
  return true;
}

bool EngineCore::agreed(Collective& collective) {
  const int parity = static_cast<int>(round_ & 1);
  std::string text;
  int other = -1;
  for (int rank = 0; rank < place_.size && text.empty(); ++rank) {
    if (rank == place_.rank) continue;
    const Descriptor& theirs = view(rank).header->posts[parity].what;
    if (collective.what.agrees(theirs)) continue;
    other = rank;
    text = fmt::format("ranks disagree on collective #{}: rank {} called {}, rank {} called {}",
                       collective.what.sequence, place_.rank, collective.what.text(), rank,
                       theirs.text());
  }
  if (text.empty()) text = collective.disagreement(*this, parity);
  if (text.empty()) return true;
  EngineFailure failure = failure_in(
      &collective,
      text + ". Every rank must call the same operations with the same sizes in the same order.");
  failure.culprit = other;
  failure.disagreement = true;
  break_with(std::move(failure));
  return false;
}

// ---------------------------------------------------------------- peers

// Why a peer is broken, as it reported.
EngineFailure EngineCore::failure_of(int rank) const {
  const Trouble& reported = view(rank).header->trouble;
  EngineFailure failure;
  failure.timeout = reported.timeout != 0;
  failure.disagreement = reported.disagreement != 0;
  failure.origin = reported.origin;
  failure.culprit = reported.culprit;
  failure.text.assign(reported.text, ::strnlen(reported.text, sizeof reported.text));
  return failure;
}

// One death causes others, because ranks that give up end soon too. So ranks that died without a
// report come first, then those that reported why they gave up, and last those that had nothing
// more to do.
std::vector<EngineFailure> EngineCore::troubles() const {
  pollfd fds[kMaxRanks];
  nfds_t count = 0;
  for (const Peer& peer : peers_)
    if (peer.pidfd) fds[count++] = {peer.pidfd.get(), POLLIN, 0};
  const bool any_dead = count > 0 && ::poll(fds, count, 0) > 0;
  std::vector<EngineFailure> dead, broken, closed;
  nfds_t at = 0;
  for (int rank = 0; rank < place_.size; ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (!peer.pidfd) continue;
    const bool ended = any_dead && fds[at].revents != 0;
    ++at;
    const State state = view(rank).header->state.load();
    if (state == State::kBroken) broken.push_back(failure_of(rank));
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

// For who does not sleep between two steps: something may move on and on, and a collective behind
// it still waits for a rank that is gone.
void EngineCore::look_when_due(const Task& task) {
  if (Deadline::Clock::now() - looked_ > kLongestSleep) look_after_peers(task);
}

// What a rank has done before its end counts, and is all there to see once the end is known. It
// does no more, so this comes to an end, whatever the others continue sending.
void EngineCore::take_what_is_left() {
  if (messages_.pending() > 0) messages_.pump(*this);
  while (!broken() && !queue_.empty() && step_collective(*queue_.front())) {
  }
}

// A rank's end is no trouble for who wants nothing of it; but it must not hide that of another, nor
// the deadline.
void EngineCore::look_after_peers(const Task& task) {
  looked_ = Deadline::Clock::now();
  const std::vector<EngineFailure> found = troubles();
  if (!found.empty()) take_what_is_left();
  if (broken()) return;
  const auto trouble = std::find_if(found.begin(), found.end(),
                                    [this](const EngineFailure& each) { return blocked_by(each); });
  if (trouble == found.end()) return check_deadlines(task);
  const Ticket* blocked = queue_.empty() ? nullptr : queue_.front().get();
  if (blocked == nullptr && trouble->culprit >= 0) blocked = messages_.with(trouble->culprit);
  std::string text = trouble->text;
  if (trouble->origin < 0 && blocked != nullptr) {
    text += fmt::format(" before it took part in {}", blocked->text());
    text += ". Look for the reason in that rank's output.";
  }
  EngineFailure failure = failure_in(blocked, std::move(text));
  failure.culprit = trouble->culprit;
  failure.origin = trouble->origin;
  failure.timeout = trouble->timeout;
  failure.disagreement = trouble->disagreement;
  break_with(std::move(failure));
}

// Another pair's messages continue without that rank, a collective never does.
bool EngineCore::blocked_by(const EngineFailure& trouble) const {
  if (!queue_.empty() || trouble.origin >= 0) return has_work();
  return messages_.with(trouble.culprit) != nullptr;
}

void EngineCore::check_deadlines(const Task& task) {
  if (task.until != nullptr && !task.until->done() && task.deadline != nullptr &&
      task.deadline->expired())
    return time_out(*task.until, *task.deadline);
  if (!queue_.empty() && queue_.front()->deadline().expired())
    return time_out(*queue_.front(), queue_.front()->deadline());
  const Message* message = messages_.pending() > 0 ? messages_.most_urgent() : nullptr;
  if (message != nullptr && message->deadline().expired()) time_out(*message, message->deadline());
}

std::vector<int> EngineCore::behind() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < place_.size; ++rank) {
    if (rank == place_.rank) continue;
    if (view(rank).header->posts[round_ & 1].round.load() < round_) ranks.push_back(rank);
  }
  return ranks;
}

void EngineCore::time_out(const Ticket& ticket, const Deadline& deadline) {
  const auto* message = dynamic_cast<const Message*>(&ticket);
  std::vector<int> missing;
  if (message != nullptr)
    missing.push_back(message->ends.peer);
  else if (!queue_.empty() && posted_)
    missing = behind();
  std::string text = fmt::format("rank {}: {} timed out after {} ms", place_.rank, ticket.text(),
                                 deadline.total().count());
  if (!missing.empty()) {
    text += fmt::format(": {} {} did not arrive", missing.size() == 1 ? "rank" : "ranks",
                        fmt::join(missing, ", "));
    const bool behind_another = message == nullptr && queue_.front().get() != &ticket;
    if (behind_another) text += fmt::format(" in {} before it", queue_.front()->text());
  }
  text += ". It is stopped, slower than the limit, or took another way through the program.";
  EngineFailure failure = failure_in(&ticket, std::move(text));
  failure.timeout = true;
  failure.culprit = missing.empty() ? -1 : missing.front();
  break_with(std::move(failure));
}

EngineFailure EngineCore::failure_in(const Ticket* ticket, std::string text) const {
  EngineFailure failure;
  failure.text = std::move(text);
  failure.origin = place_.rank;
  if (ticket == nullptr) return failure;
  failure.context.operation = ticket->text();
  failure.context.elapsed = ticket->deadline().elapsed();
  if (const auto* collective = dynamic_cast<const Collective*>(ticket))
    failure.context.sequence = collective->what.sequence;
  return failure;
}

}  // namespace lockstep::shm
