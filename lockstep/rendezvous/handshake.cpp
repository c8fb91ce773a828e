#include "lockstep/rendezvous/handshake.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "lockstep/core/text.h"

namespace lockstep::detail {

namespace {

constexpr char kSeparator = '\x1f';
constexpr std::size_t kRangesShown = 10;
constexpr std::size_t kGroupsShown = 4;
constexpr std::size_t kValueBytes = 80;

// Ranks that say the same, under what they say.
using Groups = std::map<std::string, std::vector<int>>;

std::string show(const std::string& value) {
  if (value.empty()) return "(none)";
  return value.size() <= kValueBytes ? value : value.substr(0, kValueBytes) + "...";
}

// "a, b and c": each group as `phrase` formats it, the largest first, and how many are skipped.
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

// "", or one sentence and advice about every rank that differs from rank 0 in one field.
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
  Groups deaf;
  for (const Handshake& handshake : handshakes) {
    hosts.insert(handshake.host);
    if (handshake.address.starts_with("127."))
      deaf[fmt::format("on {} would listen on {}", handshake.host, handshake.address)].push_back(
          handshake.rank);
  }
  if (hosts.size() < 2 || deaf.empty()) return "";
  return fmt::format(
      "{}, which the other hosts ({} in all) cannot reach. Set GLOO_SOCKET_IFNAME to the interface "
      "that connects them.",
      list_groups(deaf, who_and_value), hosts.size());
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

// Checks local ranks that were set by hand against the count.
std::string local_ranks_out_of_range(const std::vector<Handshake>& handshakes) {
  // Ranks that are still on their way count too.
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

// Ranks that came to say that they do not take part, each reason once.
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
    if (last < named + 2) last = named;  // two neighbours are still a list
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
  // A rank that counts wrongly also reads the rest wrongly.
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
