#include "lockstep/comm/shm/rounds.h"

#include <fmt/format.h>
#include <sched.h>

#include <string>
#include <utility>

namespace lockstep::shm {
namespace {

// The caller's own number, if it has one.
std::uint64_t number(const Descriptor& what) {
  return what.number != 0 ? what.number : what.sequence;
}

}  // namespace

Rounds::Step Rounds::step(Collective& collective) {
  bool moved = false;
  if (!posted_) {
    collective.fill(group_, static_cast<int>((round_ + 1) & 1));
    post(collective);
    moved = true;
  }
  if (!all_posted()) return moved ? Step::kMoved : Step::kBlocked;
  if (first_) check_agreement(collective);
  first_ = false;
  switch (collective.take(group_, static_cast<int>(round_ & 1))) {
    case Collective::Next::kAgain:
      return Step::kMoved;
    case Collective::Next::kRound:
      posted_ = false;
      return Step::kMoved;
    case Collective::Next::kDone:
      break;
  }
  drop();
  return Step::kDone;
}

void Rounds::drop() {
  posted_ = false;
  first_ = true;
}

void Rounds::post(const Collective& collective) {
  ++round_;
  Post& own = group_.own().header->posts[round_ & 1];
  if (first_) own.what = collective.what;
  own.cpu.store(::sched_getcpu(), std::memory_order_relaxed);
  own.round.store(round_);
  posted_ = true;
  arrived_ = 0;
  for (int rank = 0; rank < group_.size(); ++rank)
    if (rank != group_.rank()) group_.wake_peer(rank);
}

bool Rounds::all_posted() {
  for (; arrived_ < group_.size(); ++arrived_) {
    if (arrived_ == group_.rank()) continue;
    if (group_.view(arrived_).header->posts[round_ & 1].round.load() < round_) return false;
  }
  return true;
}

std::vector<int> Rounds::behind() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == group_.rank()) continue;
    if (group_.view(rank).header->posts[round_ & 1].round.load() < round_) ranks.push_back(rank);
  }
  return ranks;
}

void Rounds::check_agreement(Collective& collective) const {
  const int parity = static_cast<int>(round_ & 1);
  const Descriptor& what = collective.what;
  int other = 0;
  while (other < group_.size() && (other == group_.rank() || what.agrees(called_by(other, what))))
    ++other;
  const bool differ = other < group_.size();
  std::string text = differ ? difference(what) : collective.disagreement(group_, parity);
  if (text.empty()) return;
  text += ". Every rank must call the same operations with the same sizes in the same order.";
  if (differ)
    text += fmt::format(" {}", what.saving != called_by(other, what).saving ? kUnevenSaves
                               : any_has_finished(what)                     ? kUnevenInputs
                                                                            : kUnevenCalls);
  throw EngineFailure{.disagreement = true,
                      .text = std::move(text),
                      .culprit = differ ? other : -1,
                      .context = {.operation = what.text(),
                                  .sequence = number(what),
                                  .elapsed = collective.deadline().elapsed()}};
}

const Descriptor& Rounds::called_by(int rank, const Descriptor& own) const {
  return rank == group_.rank() ? own : group_.view(rank).header->posts[round_ & 1].what;
}

// Names rank 0 and the first that differs from it: all ranks say the same, whichever notices first.
std::string Rounds::difference(const Descriptor& own) const {
  const Descriptor& first = called_by(0, own);
  int rank = 1;
  while (rank + 1 < group_.size() && first.agrees(called_by(rank, own))) ++rank;
  const Descriptor& second = called_by(rank, own);
  std::string text = fmt::format("ranks disagree on collective #{}: rank 0 {}, rank {} {}",
                                 number(first), first.deed(), rank, second.deed());
  if (number(second) != number(first)) text += fmt::format(" as its #{}", number(second));
  return text;
}

bool Rounds::any_has_finished(const Descriptor& own) const {
  for (int rank = 0; rank < group_.size(); ++rank)
    if (called_by(rank, own).kind == Kind::kFinish) return true;
  return false;
}

}  // namespace lockstep::shm
