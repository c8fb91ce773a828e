#include "lockstep/rendezvous/startup.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <set>
#include <sstream>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"
#include "lockstep/rendezvous/control.h"

namespace lockstep::detail {

namespace {

constexpr const char* kWorld = "world";
constexpr std::chrono::seconds kProgressInterval{10};

// The result of the check, the same on every rank.
struct Outcome {
  enum class Kind : char { kGood = '=', kProblem = '!', kTimeout = 't' };
  Kind kind = Kind::kGood;
  std::string text = {};
};

// One rank's part of the check. Runs on a thread of its own (run_with_deadline()), which the caller
// may abandon; `cancel` then ends it.
class Startup {
 public:
  Startup(StartupStore store, Handshake handshake, const StartupOptions& options)
      : store_(std::move(store)),
        handshake_(std::move(handshake)),
        size_(options.size),
        share_device_(options.share_device),
        // The other ranks wait longer than rank 0, so that its outcome reaches them.
        deadline_(Deadline::after(options.timeout + (handshake_.rank == 0 ? kNone : kGrace))) {}

  Outcome run() {
    const bool first = store_->add(fmt::format("claim/{}", handshake_.rank), 1) == 1;
    store_->set(fmt::format("came/{}", store_->add("came", 1)), handshake_.text());
    if (handshake_.rank == 0 && first) {
      const Outcome outcome = lead();
      store_->set("outcome", static_cast<char>(outcome.kind) + outcome.text);
      if (outcome.kind != Outcome::Kind::kGood) wait_for_readers(outcome.kind);
      return outcome;
    }
    const std::vector<int> leader{0};
    if (!poll([this] { return store_->check("outcome"); }, leader, deadline_))
      return {Outcome::Kind::kTimeout, missing_text(leader)};
    const std::string outcome = store_->get("outcome", deadline_);
    store_->add("heard", 1);
    const auto kind = static_cast<Outcome::Kind>(outcome.at(0));
    // Another process has this rank, and rank 0 has continued with that one.
    if (kind == Outcome::Kind::kGood && !first)
      return {Outcome::Kind::kProblem, contradictions({handshake_, handshake_}, share_device_)};
    return {kind, outcome.substr(1)};
  }

  void cancel() { cancelled_ = true; }

 private:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kNone{0};
  static constexpr Milliseconds kGrace{2000};
  static constexpr Milliseconds kReadGrace{8000};
  // After a contradiction, rank 0 waits this long for missing ranks, to name all that differ, and
  // this long for more ranks than its world size, if others expect a larger world.
  static constexpr Milliseconds kNamingGrace{10'000};
  static constexpr Milliseconds kExtraRanksGrace{1000};

  Outcome lead() {
    std::vector<int> absent;
    std::string problem;
    auto seen = Deadline::Clock::time_point::max();
    const auto ready = [&] {
      if (read_new_handshakes()) problem = contradictions(handshakes_, share_device_);
      absent = missing();
      if (problem.empty()) return absent.empty();
      seen = std::min(seen, Deadline::Clock::now());
      const auto waited = Deadline::Clock::now() - seen;
      const bool all = static_cast<int>(handshakes_.size()) >= size_;
      if (all) return !miscounted(handshakes_) || waited >= kExtraRanksGrace;
      return waited >= kNamingGrace || deadline_.remaining() < kGrace / 2;
    };
    if (!poll(ready, absent, deadline_) && problem.empty())
      return {Outcome::Kind::kTimeout, missing_text(absent)};
    if (!problem.empty()) return {Outcome::Kind::kProblem, problem};
    return {Outcome::Kind::kGood, places()};
  }

  // Reads the handshakes since the last call; true if there were any.
  bool read_new_handshakes() {
    const auto count = store_->add("came", 0);
    while (counted_ < count) unread_.push_back(++counted_);
    return std::erase_if(unread_, [this](std::int64_t index) {
             const std::string key = fmt::format("came/{}", index);
             if (!store_->check(key)) return false;  // the rank has counted itself, not yet set it
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

  // Every rank's place, one line each; "" if all ranks know their places.
  std::string places() const {
    const auto known = [](const Handshake& handshake) { return handshake.place.known(); };
    if (std::ranges::all_of(handshakes_, known)) return "";
    std::string text;
    for (const auto& [rank, place] : count_ranks(handshakes_))
      text += fmt::format("{} {} {}\n", place.local_rank, place.local_size, place.node);
    return text;
  }

  // The store ends with rank 0, so the others must have read an error before rank 0 throws it.
  // After a timeout, only the ranks that are here can read it; otherwise all of them may.
  void wait_for_readers(Outcome::Kind kind) {
    const bool late = kind == Outcome::Kind::kTimeout;
    const auto expected = std::max(handshakes_.size(), late ? 0 : std::size_t(size_));
    const auto others = static_cast<std::int64_t>(expected) - 1;
    poll([&] { return store_->add("heard", 0) >= others; }, {},
         Deadline::after(late ? kGrace : kReadGrace));
  }

  std::string missing_text(const std::vector<int>& absent) const {
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
  // Rank 0 only: handshakes in the order of arrival, and those that are counted but not yet set.
  std::vector<Handshake> handshakes_;
  std::vector<std::int64_t> unread_;
  std::int64_t counted_ = 0;
  std::atomic<bool> cancelled_{false};
};

Outcome run_check(const StartupStore& store, const Handshake& handshake,
                  const StartupOptions& options) {
  auto startup = std::make_shared<Startup>(store, handshake, options);
  // The check has a deadline of its own and names the missing ranks; this one is for a store that
  // does not respond.
  const auto outer = Deadline::after(options.timeout + std::chrono::seconds(12));
  try {
    return run_with_deadline<Outcome>("the start-up check", outer,
                                      [startup] { return startup->run(); });
  } catch (...) {
    startup->cancel();
    throw;
  }
}

}  // namespace

RankInfo check_start(const StartupStore& store, const Handshake& handshake,
                     const StartupOptions& options) {
  const Outcome outcome = run_check(store, handshake, options);
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
  run_check(store, handshake, options);
}

namespace {

constexpr char kSeparator = '\x1f';
constexpr std::size_t kRangesShown = 10;
constexpr std::size_t kGroupsShown = 4;
constexpr std::size_t kValueBytes = 80;

using Groups = std::map<std::string, std::vector<int>>;  // ranks by the value that they have

std::string show(const std::string& value) {
  if (value.empty()) return "(none)";
  return value.size() <= kValueBytes ? value : value.substr(0, kValueBytes) + "...";
}

// "a, b and c": each group as `phrase` formats it, the largest first, and the number of skipped
// ranks.
template <typename Phrase>
std::string list_groups(const Groups& groups, const Phrase& phrase) {
  std::vector<Groups::const_iterator> order;
  for (auto group = groups.begin(); group != groups.end(); ++group) order.push_back(group);
  std::ranges::stable_sort(order, [](const auto& a, const auto& b) {
    if (a->second.size() != b->second.size()) return a->second.size() > b->second.size();
    return a->second < b->second;
  });
  std::vector<std::string> phrases;
  std::size_t skipped = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i < kGroupsShown) {
      phrases.push_back(phrase(order[i]->second, order[i]->first));
    } else {
      skipped += order[i]->second.size();
    }
  }
  if (skipped > 0)
    return fmt::format("{} and {} more rank{} likewise", fmt::join(phrases, ", "), skipped,
                       skipped == 1 ? "" : "s");
  return listed(phrases, "and");
}

std::string who_and_value(const std::vector<int>& ranks, const std::string& value) {
  return fmt::format("{} {}", name_ranks(ranks), value);
}

const Handshake& leader_of(const std::vector<Handshake>& handshakes) {
  const auto leader = std::ranges::find_if(
      handshakes, [](const Handshake& handshake) { return handshake.rank == 0; });
  return leader != handshakes.end() ? *leader : handshakes.front();
}

// One sentence with advice about the ranks that differ from rank 0 in a field; "" if none does.
std::string differences(const std::vector<Handshake>& handshakes, std::string Handshake::*field,
                        const char* what, const char* advice) {
  const std::string& right = leader_of(handshakes).*field;
  Groups others;
  for (const Handshake& handshake : handshakes) {
    if (handshake.*field != right) others[handshake.*field].push_back(handshake.rank);
  }
  if (others.empty()) return "";
  const std::string who =
      list_groups(others, [&](const std::vector<int>& ranks, const std::string& value) {
        return fmt::format("{} {} {} {}", name_ranks(ranks), ranks.size() == 1 ? "has" : "have",
                           what, show(value));
      });
  return fmt::format("{}, but rank 0 has {}. {}", who, show(right), advice);
}

std::string repeated_ranks(const std::vector<Handshake>& handshakes) {
  std::map<int, std::vector<std::string>> hosts;
  for (const Handshake& handshake : handshakes) hosts[handshake.rank].push_back(handshake.host);
  std::vector<int> repeated;
  std::set<std::string> where;
  for (const auto& [rank, on] : hosts) {
    if (on.size() < 2) continue;
    repeated.push_back(rank);
    if (where.size() < kGroupsShown) where.insert(on.begin(), on.end());
  }
  if (repeated.empty()) return "";
  return fmt::format("two processes say they are {} (on {}). Give every process its own RANK.",
                     name_ranks(repeated), fmt::join(where, ", "));
}

std::string unreachable(const std::vector<Handshake>& handshakes) {
  std::set<std::string> hosts;
  Groups unreachable_ranks;
  for (const Handshake& handshake : handshakes) {
    hosts.insert(handshake.host);
    if (handshake.address.starts_with("127."))
      unreachable_ranks[fmt::format("on {} would listen on {}", handshake.host, handshake.address)]
          .push_back(handshake.rank);
  }
  if (hosts.size() < 2 || unreachable_ranks.empty()) return "";
  return fmt::format(
      "{}, which the other hosts ({} in all) cannot reach. Set GLOO_SOCKET_IFNAME to the interface "
      "that connects them.",
      list_groups(unreachable_ranks, who_and_value), hosts.size());
}

std::string shared_gpus(const std::vector<Handshake>& handshakes) {
  Groups users;
  for (const Handshake& handshake : handshakes) {
    if (!handshake.gpu.empty())
      users[fmt::format("on {} use the same GPU ({})", handshake.host, handshake.gpu)].push_back(
          handshake.rank);
  }
  std::erase_if(users, [](const auto& entry) { return entry.second.size() < 2; });
  if (users.empty()) return "";
  return fmt::format(
      "{}. Check LOCAL_RANK and CUDA_VISIBLE_DEVICES, or set LOCKSTEP_SHARE_DEVICE=1 if it is "
      "meant.",
      list_groups(users, who_and_value));
}

// Compares local ranks that were set by hand with the number of ranks on the host.
std::string local_ranks_out_of_range(const std::vector<Handshake>& handshakes) {
  // The number is known only once all ranks are here.
  if (static_cast<int>(handshakes.size()) < std::atoi(leader_of(handshakes).world_size.c_str()))
    return "";
  Groups outside;
  const auto places = count_ranks(handshakes);
  for (const Handshake& handshake : handshakes) {
    const RankInfo& place = places.at(handshake.rank);
    if (place.local_rank < place.local_size) continue;
    outside[fmt::format("local rank {} on {}, where {} rank{}", place.local_rank, handshake.host,
                        place.local_size, place.local_size == 1 ? " runs" : "s run")]
        .push_back(handshake.rank);
  }
  if (outside.empty()) return "";
  return fmt::format(
      "{}. Local ranks count from 0 on every host. Correct LOCAL_RANK and LOCAL_WORLD_SIZE, or "
      "unset both to have them counted.",
      list_groups(outside, [](const std::vector<int>& ranks, const std::string& value) {
        return fmt::format("{} {} {}", name_ranks(ranks), ranks.size() == 1 ? "has" : "have",
                           value);
      }));
}

// The ranks that refuse to take part, each reason once.
std::string refusals(const std::vector<Handshake>& handshakes) {
  Groups refusing;
  std::map<std::string, std::set<std::string>> hosts;
  for (const Handshake& handshake : handshakes) {
    if (handshake.refusal.empty()) continue;
    refusing[handshake.refusal].push_back(handshake.rank);
    auto& where = hosts[handshake.refusal];
    if (where.size() < kGroupsShown) where.insert(handshake.host);
  }
  std::vector<std::string> sentences;
  for (const auto& [reason, ranks] : refusing) {
    if (sentences.size() == kGroupsShown) {
      sentences.push_back(
          fmt::format("{} more have other reasons.", refusing.size() - kGroupsShown));
      break;
    }
    sentences.push_back(fmt::format("{} on {} cannot take part: {}", name_ranks(ranks),
                                    fmt::join(hosts[reason], ", "), reason));
  }
  return fmt::format("{}", fmt::join(sentences, " And "));
}

}  // namespace

std::string Handshake::text() const {
  return fmt::format(
      "{}", fmt::join({std::to_string(rank), std::to_string(place.local_rank),
                       std::to_string(place.local_size), std::to_string(place.node), world_size,
                       program, options, device, debug, host, machine, gpu, address, refusal},
                      std::string_view(&kSeparator, 1)));
}

Handshake Handshake::parse(const std::string& text) {
  Handshake handshake;
  std::string rank, local_rank, local_size, node;
  std::size_t begin = 0;
  for (auto* field :
       {&rank, &local_rank, &local_size, &node, &handshake.world_size, &handshake.program,
        &handshake.options, &handshake.device, &handshake.debug, &handshake.host,
        &handshake.machine, &handshake.gpu, &handshake.address, &handshake.refusal}) {
    const std::size_t end = std::min(text.find(kSeparator, begin), text.size());
    *field = text.substr(std::min(begin, text.size()), end - std::min(begin, text.size()));
    begin = end + 1;
  }
  handshake.rank = std::atoi(rank.c_str());
  handshake.place = {std::atoi(local_rank.c_str()), std::atoi(local_size.c_str()),
                     std::atoi(node.c_str())};
  return handshake;
}

std::string name_ranks(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::vector<std::string> ranges;
  std::size_t named = 0;
  while (named < ranks.size() && ranges.size() < kRangesShown) {
    std::size_t last = named;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last < named + 2) last = named;  // "1, 2" rather than "1-2"
    ranges.push_back(last == named ? std::to_string(ranks[named])
                                   : fmt::format("{}-{}", ranks[named], ranks[last]));
    named = last + 1;
  }
  std::string text =
      fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranges, ", "));
  if (named < ranks.size()) text += fmt::format(" and {} more", ranks.size() - named);
  return text;
}

bool miscounted(const std::vector<Handshake>& handshakes) {
  std::set<int> ranks;
  std::set<std::string> sizes;
  for (const Handshake& handshake : handshakes) {
    ranks.insert(handshake.rank);
    sizes.insert(handshake.world_size);
  }
  return ranks.size() < handshakes.size() || sizes.size() > 1;
}

std::string contradictions(const std::vector<Handshake>& handshakes, bool share_device) {
  if (std::string refused = refusals(handshakes); !refused.empty()) return refused;
  std::vector<std::string> problems{
      repeated_ranks(handshakes),
      differences(handshakes, &Handshake::world_size, "world size",
                  "Start all ranks with the same WORLD_SIZE."),
      differences(handshakes, &Handshake::program, "program", "Run the same build on every host."),
      differences(handshakes, &Handshake::options, "options",
                  "Give every rank the same configuration."),
      differences(
          handshakes, &Handshake::device, "device",
          "Set LOCKSTEP_DEVICE, LOCKSTEP_BACKEND and LOCKSTEP_SHARE_DEVICE identically, or make "
          "GPUs visible to all ranks or to none."),
      differences(handshakes, &Handshake::debug, "debug mode",
                  "Set LOCKSTEP_DEBUG identically on every rank."),
  };
  const auto is_empty = [](const std::string& problem) { return problem.empty(); };
  // These would only follow from the problems above.
  if (std::ranges::all_of(problems, is_empty)) {
    problems = {local_ranks_out_of_range(handshakes), unreachable(handshakes),
                share_device ? "" : shared_gpus(handshakes)};
  }
  std::erase_if(problems, is_empty);
  return fmt::format("{}", fmt::join(problems, " And "));
}

std::map<int, RankInfo> count_ranks(const std::vector<Handshake>& handshakes) {
  std::map<int, const Handshake*> ranks;
  for (const Handshake& handshake : handshakes) ranks.emplace(handshake.rank, &handshake);
  std::vector<std::string> machines;  // in the order of their lowest rank
  std::map<std::string, int> counted;
  std::map<int, RankInfo> places;
  for (const auto& [rank, handshake] : ranks) {
    if (counted[handshake->machine]++ == 0) machines.push_back(handshake->machine);
    RankInfo place = handshake->place;
    if (place.local_rank < 0) place.local_rank = counted[handshake->machine] - 1;
    if (place.node < 0) {
      const auto found = std::ranges::find(machines, handshake->machine);
      place.node = static_cast<int>(found - machines.begin());
    }
    places[rank] = place;
  }
  for (auto& [rank, place] : places) {
    if (place.local_size <= 0) place.local_size = counted[ranks[rank]->machine];
  }
  return places;
}

}  // namespace lockstep::detail
