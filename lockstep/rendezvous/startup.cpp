#include "lockstep/rendezvous/startup.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <set>
#include <sstream>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/rendezvous/bounded.h"

namespace lockstep::detail {
namespace {

constexpr const char* kWorld = "world";
constexpr std::chrono::seconds kProgressInterval{10};

// How start-up ended, the same on every rank that came.
struct Outcome {
  enum class Kind : char { kGood = '=', kProblem = '!', kTimeout = 't' };
  Kind kind = Kind::kGood;
  std::string text = {};
};

// One rank's part of the start-up conversation. Runs on a thread of its own (see bounded), which
// the caller may leave behind; `cancel` then ends it.
class Startup {
 public:
  Startup(StartupStore store, Handshake handshake, const StartupOptions& options)
      : store_(std::move(store)),
        handshake_(std::move(handshake)),
        size_(options.size),
        share_device_(options.share_device),
        // The leader's outcome about missing ranks must still reach the ranks that came.
        deadline_(Deadline::after(options.timeout + (handshake_.rank == 0 ? kNone : kGrace))) {}

  Outcome run() {
    const bool first = store_->add(fmt::format("claim/{}", handshake_.rank), 1) == 1;
    store_->set(fmt::format("came/{}", store_->add("came", 1)), handshake_.text());
    if (handshake_.rank == 0 && first) {
      const Outcome outcome = lead();
      store_->set("outcome", static_cast<char>(outcome.kind) + outcome.text);
      if (outcome.kind != Outcome::Kind::kGood) wait_until_heard(outcome.kind);
      return outcome;
    }
    const std::vector<int> leader{0};
    if (!poll([this] { return store_->check("outcome"); }, leader, deadline_))
      return {Outcome::Kind::kTimeout, absence(leader)};
    const std::string outcome = store_->get("outcome", deadline_);
    store_->add("heard", 1);
    const auto kind = static_cast<Outcome::Kind>(outcome.at(0));
    // Too late to be seen by the leader, which has continued with the other one.
    if (kind == Outcome::Kind::kGood && !first)
      return {Outcome::Kind::kProblem, contradictions({handshake_, handshake_}, share_device_)};
    return {kind, outcome.substr(1)};
  }

  void cancel() { cancelled_ = true; }

 private:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kNone{0};
  static constexpr Milliseconds kGrace{2000};
  static constexpr Milliseconds kLateComers{8000};
  // Once something is wrong: how long the others may take to come, so that all that differ are
  // named, and how long ranks may take that rank 0 knows nothing about.
  static constexpr Milliseconds kToBeNamed{10'000};
  static constexpr Milliseconds kUnexpected{1000};

  Outcome lead() {
    std::vector<int> absent;
    std::string problem;
    auto seen = Deadline::Clock::time_point::max();
    const auto ready = [&] {
      if (hear()) problem = contradictions(handshakes_, share_device_);
      absent = missing();
      if (problem.empty()) return absent.empty();
      seen = std::min(seen, Deadline::Clock::now());
      const auto waited = Deadline::Clock::now() - seen;
      const bool all = static_cast<int>(handshakes_.size()) >= size_;
      if (all) return !miscounted(handshakes_) || waited >= kUnexpected;
      return waited >= kToBeNamed || deadline_.remaining() < kGrace / 2;
    };
    if (!poll(ready, absent, deadline_) && problem.empty())
      return {Outcome::Kind::kTimeout, absence(absent)};
    if (!problem.empty()) return {Outcome::Kind::kProblem, problem};
    return {Outcome::Kind::kGood, places()};
  }

  // Reads what has come since the last time; true when there was something.
  bool hear() {
    const auto count = store_->add("came", 0);
    while (counted_ < count) unread_.push_back(++counted_);
    return std::erase_if(unread_, [this](std::int64_t index) {
             const std::string key = fmt::format("came/{}", index);
             if (!store_->check(key)) return false;  // between its two calls
             handshakes_.push_back(Handshake::parse(store_->get(key, deadline_)));
             return true;
           }) > 0;
  }

  std::vector<int> missing() const {
    std::set<int> there;
    for (const Handshake& handshake : handshakes_) there.insert(handshake.rank);
    std::vector<int> absent;
    for (int rank = 0; rank < size_; ++rank) {
      if (!there.contains(rank)) absent.push_back(rank);
    }
    return absent;
  }

  // Where every rank is, one line each, if any rank does not know its place.
  std::string places() const {
    const auto known = [](const Handshake& handshake) { return handshake.place.known(); };
    if (std::ranges::all_of(handshakes_, known)) return "";
    std::string text;
    for (const auto& [rank, place] : count_ranks(handshakes_))
      text += fmt::format("{} {} {}\n", place.local_rank, place.local_size, place.node);
    return text;
  }

  // Rank 0 takes the store with it when it ends, so bad news must have been read by then. After a
  // timeout nobody else is expected; otherwise those on their way get a moment.
  void wait_until_heard(Outcome::Kind kind) {
    const bool late = kind == Outcome::Kind::kTimeout;
    const auto expected = std::max(handshakes_.size(), late ? 0 : std::size_t(size_));
    const auto others = static_cast<std::int64_t>(expected) - 1;
    poll([&] { return store_->add("heard", 0) >= others; }, {},
         Deadline::after(late ? kGrace : kLateComers));
  }

  std::string absence(const std::vector<int>& absent) const {
    return fmt::format(
        "{} of {} did not come within {} s. They failed to start, or cannot "
        "reach this host. Look at their output; LOCKSTEP_STARTUP_TIMEOUT_S gives them "
        "longer.",
        name_ranks(absent), size_, deadline_.total().count() / 1000.0);
  }

  // Like poll_until(); `absent` is named in progress lines.
  bool poll(const std::function<bool()>& ready, const std::vector<int>& absent,
            const Deadline& deadline) {
    auto next_line = Deadline::Clock::now() + kProgressInterval;
    const auto ready_or_cancelled = [&] {
      if (ready() || cancelled_) return true;
      if (handshake_.rank == 0 && Deadline::Clock::now() >= next_line) {
        log::info(kWorld, "waiting for {} (of {}), {} s of {} s", name_ranks(absent), size_,
                  deadline.elapsed().count() / 1000, deadline.total().count() / 1000);
        next_line += kProgressInterval;
      }
      return false;
    };
    return poll_until(ready_or_cancelled, deadline, std::chrono::microseconds(20'000)) &&
           !cancelled_;
  }

  const StartupStore store_;
  const Handshake handshake_;
  const int size_;
  const bool share_device_;
  const Deadline deadline_;
  // Leader only: the ranks that came, in order, and those whose place is taken but not yet filled.
  std::vector<Handshake> handshakes_;
  std::vector<std::int64_t> unread_;
  std::int64_t counted_ = 0;
  std::atomic<bool> cancelled_{false};
};

Outcome converse(const StartupStore& store, const Handshake& handshake,
                 const StartupOptions& options) {
  auto startup = std::make_shared<Startup>(store, handshake, options);
  // The conversation has its own deadline and names the missing ranks; this one is for a store that
  // does not answer at all.
  const auto outer = Deadline::after(options.timeout + std::chrono::seconds(12));
  try {
    return bounded<Outcome>("the start-up check", outer, [startup] { return startup->run(); });
  } catch (...) {
    startup->cancel();
    throw;
  }
}

}  // namespace

RankInfo check_start(const StartupStore& store, const Handshake& handshake,
                     const StartupOptions& options) {
  const Outcome outcome = converse(store, handshake, options);
  if (outcome.kind == Outcome::Kind::kProblem)
    throw UsageError(kWorld, "start-up check: {}", outcome.text);
  if (outcome.kind == Outcome::Kind::kTimeout) {
    throw TimeoutError(kWorld, fmt::format("rank {}: {}", handshake.rank, outcome.text),
                       {handshake.rank, -1, "start-up", 0, options.timeout});
  }
  RankInfo place = handshake.place;
  if (outcome.text.empty()) return place;
  std::istringstream places(outcome.text);
  for (int rank = 0; rank <= handshake.rank; ++rank)
    places >> place.local_rank >> place.local_size >> place.node;
  return place;
}

void report_refusal(const StartupStore& store, const Handshake& handshake,
                    const StartupOptions& options) {
  converse(store, handshake, options);
}

}  // namespace lockstep::detail
