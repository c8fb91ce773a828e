#include "launcher/stall_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "lockstep/core/host.h"
#include "lockstep/core/symbols.h"

namespace lockstep::launch {

namespace {

using ledger::Record;
using ledger::State;

constexpr std::string_view kConnect = "connect";  // a rank's first record of a group

std::string bytes_text(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string rank_names(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

std::string seconds_text(std::uint64_t from_ns, std::uint64_t to_ns) {
  const double s = to_ns > from_ns ? static_cast<double>(to_ns - from_ns) / 1e9 : 0;
  return fmt::format("{:.1f} s", s);
}

bool is_open(const Record& record) {
  return record.under_way() || record.state == State::kReleased;
}

// The oldest operation under way, which blocks the others, or else the last one.
const Record* current(const ledger::Snapshot& seen) {
  const Record* found = nullptr;
  for (const Record& record : seen.records) {
    if (record.under_way()) return &record;
    if (record.operation != kConnect || found == nullptr) found = &record;
  }
  return found;
}

// A rank's calls in one group, by number; empty if it is not a member.
using Calls = std::map<std::uint64_t, const Record*>;
Calls calls_of(const RankView& rank, const std::string& group) {
  Calls calls;
  for (const Record& record : rank.ledger.records)
    if (!record.message && record.group == group) calls[record.sequence] = &record;
  return calls;
}

std::set<std::string> groups_of(const std::vector<RankView>& ranks) {
  std::set<std::string> groups;
  for (const RankView& rank : ranks)
    for (const Record& record : rank.ledger.records)
      if (!record.message) groups.insert(record.group);
  return groups;
}

// Operations whose sizes may differ between ranks, so they are not compared.
bool own_sizes(const Record& record) {
  return record.operation.starts_with("all_to_all") || record.operation.ends_with("_sparse") ||
         record.operation == "scatter" || record.operation == "gather";
}

std::string identity_of(const RankView& rank, const Record& record, CollectiveMismatch::Kind kind) {
  if (kind == CollectiveMismatch::Kind::kPlace) {
    for (const ledger::Module& module : rank.ledger.modules)
      if (record.call_site >= module.first && record.call_site < module.end)
        return fmt::format("{:x}", record.call_site - module.bias);
    return "";
  }
  return fmt::format("{} {} {} {}", record.operation, record.dtype,
                     own_sizes(record) ? 0 : record.bytes, record.peer);
}

// The ranks with the rarest value; empty if all values are equal.
std::vector<int> smallest_group(const std::map<int, std::string>& values) {
  std::map<std::string, std::vector<int>> by_value;
  for (const auto& [rank, value] : values) by_value[value].push_back(rank);
  if (by_value.size() < 2) return {};
  const auto least = std::ranges::min_element(
      by_value, [](auto& a, auto& b) { return a.second.size() < b.second.size(); });
  return least->second;
}

struct Member {
  const RankView* view;
  Calls calls;
};

std::optional<CollectiveMismatch> mismatch_in(const std::string& group,
                                              const std::vector<Member>& members,
                                              CollectiveMismatch::Kind kind) {
  std::uint64_t first = 0;  // the first number that all ledgers still have
  std::set<std::uint64_t> sequences;
  bool waited_for = false;
  for (const Member& member : members) {
    first = std::max(first, member.calls.begin()->first);
    for (const auto& [sequence, record] : member.calls) {
      sequences.insert(sequence);
      waited_for |= is_open(*record);
    }
  }
  if (kind == CollectiveMismatch::Kind::kMissing && !waited_for) return std::nullopt;
  for (auto at = sequences.lower_bound(first); at != sequences.end(); ++at) {
    const std::uint64_t sequence = *at;
    std::map<int, std::string> values;
    for (const Member& member : members) {
      const auto call = member.calls.find(sequence);
      if (kind == CollectiveMismatch::Kind::kMissing)
        values[member.view->ledger.rank] =
            member.calls.rbegin()->first < sequence ? "missing" : "there";
      else if (call != member.calls.end())
        values[member.view->ledger.rank] = identity_of(*member.view, *call->second, kind);
    }
    const std::vector<int> odd = smallest_group(values);
    if (odd.empty()) continue;
    if (kind != CollectiveMismatch::Kind::kMissing)
      return CollectiveMismatch{kind, group, sequence, odd};
    CollectiveMismatch found{kind, group, sequence, {}};
    for (const auto& [rank, value] : values)
      if (value == "missing") found.odd.push_back(rank);
    return found;
  }
  return std::nullopt;
}

std::vector<Member> members_of(const std::vector<RankView>& ranks, const std::string& group) {
  std::vector<Member> members;
  for (const RankView& rank : ranks) {
    Calls calls = calls_of(rank, group);
    if (!calls.empty()) members.push_back({&rank, std::move(calls)});
  }
  return members;
}

// Phases in which a rank has to wait for its device. In the others it may take long without a step
// or an operation.
bool waits_for_device(ledger::Phase phase) {
  using ledger::Phase;
  return phase != Phase::kStartup && phase != Phase::kData && phase != Phase::kEvaluation &&
         phase != Phase::kSaving && phase != Phase::kEnded;
}

// ---------------------------------------------------------------- lines

std::string state_text(const Record& record, std::uint64_t now_ns) {
  switch (record.state) {
    case State::kPosted:
      return fmt::format("posted for {}", seconds_text(record.posted_ns, now_ns));
    case State::kStarted:
      return fmt::format("waits for {}", seconds_text(record.posted_ns, now_ns));
    case State::kReleased:
      return fmt::format("enqueued {} ago", seconds_text(record.posted_ns, now_ns));
    default:
      return fmt::format("{} {} ago", name(record.state), seconds_text(record.ended_ns, now_ns));
  }
}

std::string at_place(const RankView& rank, const Record& record) {
  const std::string place = rank.ledger.place(record.call_site);
  return place.empty() ? "" : " at " + place;
}

std::string current_text(const RankView& rank, std::uint64_t now_ns) {
  if (rank.ledger.pid == 0) return "has not created its world yet";
  const Record* record = current(rank.ledger);
  if (record == nullptr) return "none";
  return fmt::format("{}: {}{}", operation_text(*record), state_text(*record, now_ns),
                     at_place(rank, *record));
}

// Columns as wide as their widest entry; the last one is not padded.
std::string columns(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    text += "\n ";
    for (std::size_t i = 0; i < row.size(); ++i)
      text += fmt::format(" {:<{}}", row[i], i + 1 < row.size() ? widths[i] + 1 : 0);
  }
  return text;
}

std::string number(const CollectiveMismatch& mismatch) {
  return fmt::format("#{}{}", mismatch.sequence,
                     mismatch.group.empty() ? "" : " of group " + mismatch.group);
}

// What each rank called under that number; ranks with the same call share a line.
std::vector<std::string> mismatch_lines(const std::vector<RankView>& ranks,
                                        const CollectiveMismatch& mismatch) {
  std::vector<std::pair<std::string, std::vector<int>>> answers;
  for (const RankView& rank : ranks) {
    const Calls calls = calls_of(rank, mismatch.group);
    if (calls.empty()) continue;
    const auto call = calls.find(mismatch.sequence);
    std::string answer = "has not called it";
    if (call != calls.end())
      answer = operation_text(*call->second) + at_place(rank, *call->second);
    else if (calls.begin()->first > mismatch.sequence)
      continue;  // no longer in its ledger
    else if (calls.rbegin()->first > 0)
      answer += fmt::format("; its last one is {}{}", operation_text(*calls.rbegin()->second),
                            at_place(rank, *calls.rbegin()->second));
    const auto same =
        std::ranges::find_if(answers, [&](const auto& other) { return other.first == answer; });
    if (same == answers.end())
      answers.push_back({answer, {rank.ledger.rank}});
    else
      same->second.push_back(rank.ledger.rank);
  }
  constexpr const char* kTitles[] = {"first call that differs", "first call that is missing",
                                     "first call from another place of the program"};
  std::vector<std::string> lines = {
      fmt::format("{}: {}", kTitles[static_cast<int>(mismatch.kind)], number(mismatch))};
  for (const auto& [answer, who] : answers)
    lines.push_back(fmt::format("  {}: {}", rank_names(who), answer));
  return lines;
}

// The earliest mismatch that is certainly wrong, and an earlier one that may have led to it.
std::vector<std::string> all_mismatch_lines(const std::vector<RankView>& ranks) {
  std::vector<std::string> lines;
  const auto add = [&](const std::optional<CollectiveMismatch>& found) {
    if (!found) return;
    for (std::string& line : mismatch_lines(ranks, *found)) lines.push_back(std::move(line));
  };
  const auto operation = first_mismatch(ranks, CollectiveMismatch::Kind::kOperation);
  const auto missing = first_mismatch(ranks, CollectiveMismatch::Kind::kMissing);
  const auto place = first_mismatch(ranks, CollectiveMismatch::Kind::kPlace);
  add(operation ? operation : missing);
  const auto& wrong = operation ? operation : missing;
  if (wrong && place && place->group == wrong->group && place->sequence < wrong->sequence)
    add(place);
  return lines;
}

const RankView* find_rank(const std::vector<RankView>& ranks, int rank) {
  const auto found =
      std::ranges::find_if(ranks, [&](const RankView& view) { return view.ledger.rank == rank; });
  return found == ranks.end() ? nullptr : &*found;
}

// Why a rank is behind.
std::string reason(const RankView& rank, std::uint64_t now_ns) {
  if (rank.process.state == 'T')
    return fmt::format("it is stopped (kill -CONT {} continues it)", rank.ledger.pid);
  if (rank.process.state == 't') return "a debugger holds it";
  if (rank.ledger.pid == 0) return "it has not created its world yet";
  const Record* record = current(rank.ledger);
  if (rank.waits() && record != nullptr)
    return fmt::format("it waits in {}{}", operation_text(*record), at_place(rank, *record));
  const char* phase = name(rank.ledger.phase);
  const std::string in_phase = *phase == '\0' ? "" : fmt::format(", in {}", phase);
  if (rank.busy())
    return fmt::format(
        "it is busy{}: its CPU time grows ({:.0f} % of a core), in a long computation or an "
        "endless loop",
        in_phase, 100 * rank.cpu_share);
  if (record != nullptr && !rank.process.waits.empty())
    return fmt::format("it waits in {}{} for {}", rank.process.waits, in_phase,
                       seconds_text(record->ended_ns, now_ns));
  return fmt::format("it does nothing ({}){}", rank.process.text(), in_phase);
}

bool none_surely_waits(const std::vector<RankView>& ranks) {
  return std::ranges::none_of(
      ranks, [](const RankView& rank) { return rank.surely_waits() || rank.process.stopped(); });
}

// Whether this is a stall, whatever devices and ranks of other hosts do. Otherwise --stall-action
// could end a healthy run, in which the ranks of one host work in a group of their own while all
// others wait for them.
bool is_sure(const std::vector<RankView>& ranks, const std::vector<int>& behind, bool other_hosts) {
  const auto any = [&](auto&& holds) { return std::ranges::any_of(ranks, holds); };
  if (any([](const RankView& rank) { return rank.in_startup(); })) return false;
  if (none_surely_waits(ranks) && any([](const RankView& rank) { return rank.perhaps_waits; }))
    return false;
  if (!other_hosts || first_mismatch(ranks, CollectiveMismatch::Kind::kOperation)) return true;
  return std::ranges::any_of(behind, [&](int rank) {
    const RankView& view = *find_rank(ranks, rank);
    return !view.waits() || view.process.stopped();
  });
}

std::string cause_of(const std::vector<RankView>& ranks, const std::vector<int>& behind,
                     const StallInfo& info) {
  if (behind.empty() && !info.other_hosts && at_one_enqueued_call(ranks))
    return fmt::format(
        "All ranks wait in the same operation, {}: the network or a device is stuck, unless the "
        "devices compute for that long after it.",
        operation_text(ranks.front().ledger.records.back()));
  if (behind.empty() && none_surely_waits(ranks))
    return fmt::format(
        "All ranks{} have left their last operation to their devices, which wait for another rank "
        "or compute for that long after it: the ledgers do not show which.",
        info.other_hosts ? " of this host" : "");
  if (behind.empty())
    return info.other_hosts ? "All ranks of this host wait in the same call; the one that is "
                              "behind is on another host."
                            : "No rank is behind: all wait in the same call.";
  std::string text;
  for (const int rank : behind) {
    if (!text.empty()) text += ' ';
    text +=
        fmt::format("Rank {} is behind: {}.", rank, reason(*find_rank(ranks, rank), info.now_ns));
  }
  const auto saves = [](const RankView& rank) {
    return rank.ledger.phase == ledger::Phase::kSaving && rank.waits();
  };
  const auto saver = std::ranges::find_if(ranks, saves);
  if (saver != ranks.end() && !std::ranges::all_of(ranks, saves))
    return fmt::format(
        "{} Rank {} waits for the others to save a checkpoint: every rank must call "
        "save_checkpoint(), which is collective. Take it out of `if (rank == 0)`.",
        text, saver->ledger.rank);
  if (find_rank(ranks, behind.front())->waits() &&
      first_mismatch(ranks, CollectiveMismatch::Kind::kOperation))
    text +=
        " The others have called another operation: a rank has fewer batches (give every rank the "
        "same number, or train inside model.join()), or a call is inside `if (rank == 0)`.";
  return text;
}

// Ranks with equal stacks share one.
std::string stack_lines(const std::vector<RankView>& ranks, bool every_frame) {
  std::vector<std::pair<const RankView*, std::vector<int>>> stacks;
  for (const RankView& rank : ranks) {
    if (rank.stack.empty() && rank.no_stack.empty()) continue;
    const auto same = std::ranges::find_if(stacks, [&](const auto& other) {
      return other.first->stack == rank.stack && other.first->no_stack == rank.no_stack;
    });
    if (same == stacks.end())
      stacks.push_back({&rank, {rank.ledger.rank}});
    else
      same->second.push_back(rank.ledger.rank);
  }
  std::string text;
  for (const auto& [rank, who] : stacks) {
    text += fmt::format("\n  stack of {}:{}{}", rank_names(who), rank->stack.empty() ? " " : "",
                        rank->stack.empty() ? rank->no_stack : "");
    for (const std::string& line : every_frame ? rank->stack : brief_stack(rank->stack))
      text += "\n    " + line;
  }
  return text;
}

}  // namespace

bool RankView::surely_waits() const {
  return device_waits || std::ranges::any_of(ledger.records, [](const Record& record) {
           return record.under_way();
         });
}

bool RankView::in_startup() const {
  return ledger.records.empty() || ledger.phase == ledger::Phase::kStartup;
}

void find_device_waits(std::vector<RankView>& ranks, bool other_hosts) {
  // Operations that do not match never end, even if all ranks have enqueued them.
  const auto wrong = first_mismatch(ranks, CollectiveMismatch::Kind::kOperation);
  std::vector<std::map<std::string, std::uint64_t>> newest;  // number in each group, by rank
  for (const RankView& rank : ranks) {
    newest.emplace_back();
    for (const Record& record : rank.ledger.records)
      if (!record.message) newest.back()[record.group] = record.sequence;
  }
  const auto lacking = [&](const Record& record) {
    if (wrong && wrong->group == record.group && wrong->sequence <= record.sequence) return true;
    return std::ranges::any_of(newest, [&](const auto& numbers) {
      const auto found = numbers.find(record.group);
      // A rank has no record of a group that it is not in; the world is a group that all are in.
      return found == numbers.end() ? record.group.empty() : found->second < record.sequence;
    });
  };
  for (RankView& rank : ranks) {
    const auto& records = rank.ledger.records;
    // Each peer numbers messages on its own, so whether one has arrived is not known.
    rank.perhaps_waits = !records.empty() && records.back().state == State::kReleased &&
                         (other_hosts || records.back().message);
    rank.device_waits = std::ranges::any_of(records, [&](const auto& r) {
      return r.state == State::kReleased && !r.message && lacking(r);
    });
  }
}

bool at_one_enqueued_call(const std::vector<RankView>& ranks) {
  if (ranks.size() < 2) return false;
  const ledger::Snapshot& first = ranks.front().ledger;
  return std::ranges::all_of(ranks, [&](const RankView& rank) {
    const ledger::Snapshot& seen = rank.ledger;
    if (seen.pid == 0 || rank.process.stopped() || seen.records.empty()) return false;
    const Record& last = seen.records.back();
    const Record& expected = first.records.back();
    return last.state == State::kReleased && !last.message && last.group.empty() &&
           last.group == expected.group && last.sequence == expected.sequence &&
           last.operation == expected.operation && seen.step == first.step &&
           waits_for_device(seen.phase);
  });
}

bool find_stuck_devices(std::vector<RankView>& ranks) {
  const auto asked = [](const RankView& rank) { return rank.no_stack.empty(); };
  if (!at_one_enqueued_call(ranks) || std::ranges::none_of(ranks, asked) ||
      std::ranges::any_of(ranks,
                          [&](const RankView& rank) { return asked(rank) && !rank.in_driver; }))
    return false;
  for (RankView& rank : ranks) rank.perhaps_waits = true;
  return true;
}

bool RankView::busy() const {
  constexpr double kShare = 0.05;  // low, because the machine may be shared
  const bool runs = process.state == 'R' || cpu_share > kShare;
  return runs && !waits() && !process.stopped();
}

std::string operation_text(const Record& record) {
  std::vector<std::string> details;
  if (!record.dtype.empty()) details.push_back(record.dtype);
  if (!record.dtype.empty()) details.push_back(bytes_text(record.bytes));
  if (record.peer >= 0)
    details.push_back(fmt::format("{} {}", record.message ? "peer" : "root", record.peer));
  std::string text = fmt::format("#{} {}", record.sequence, record.operation);
  if (!details.empty()) text += fmt::format(" ({})", fmt::join(details, ", "));
  if (!record.group.empty()) text += " of group " + record.group;
  return text;
}

std::optional<CollectiveMismatch> first_mismatch(const std::vector<RankView>& ranks,
                                                 CollectiveMismatch::Kind kind) {
  std::optional<CollectiveMismatch> best;
  std::size_t most = 0;
  for (const std::string& group : groups_of(ranks)) {
    const auto members = members_of(ranks, group);
    auto found = members.size() > 1 ? mismatch_in(group, members, kind) : std::nullopt;
    // Of all groups, the one with the most ranks in the majority.
    if (found && members.size() - found->odd.size() > most) {
      most = members.size() - found->odd.size();
      best = std::move(found);
    }
  }
  return best;
}

std::vector<int> ranks_behind(const std::vector<RankView>& ranks) {
  std::vector<int> stopped;
  for (const RankView& rank : ranks)
    if (rank.process.stopped()) stopped.push_back(rank.ledger.rank);
  if (!stopped.empty()) return stopped;
  std::vector<int> absent;
  for (const RankView& rank : ranks)
    if (rank.ledger.pid == 0) absent.push_back(rank.ledger.rank);
  if (!absent.empty()) return absent;
  if (const auto missing = first_mismatch(ranks, CollectiveMismatch::Kind::kMissing))
    return missing->odd;
  if (const auto other = first_mismatch(ranks, CollectiveMismatch::Kind::kOperation))
    return other->odd;
  std::vector<int> others;
  for (const RankView& rank : ranks)
    if (!rank.waits()) others.push_back(rank.ledger.rank);
  return others;
}

std::string ledger_table(const std::vector<RankView>& ranks, std::uint64_t now_ns) {
  std::vector<std::vector<std::string>> rows = {{"rank", "pid", "step", "phase"}};
  const bool live =
      std::ranges::any_of(ranks, [](const RankView& rank) { return rank.process.known(); });
  if (live) rows[0].push_back("process");
  rows[0].push_back("operation");
  for (const RankView& rank : ranks) {
    const ledger::Snapshot& seen = rank.ledger;
    std::vector<std::string> row = {std::to_string(seen.rank), std::to_string(seen.pid),
                                    seen.step < 0 ? "-" : std::to_string(seen.step),
                                    *name(seen.phase) == '\0' ? "-" : name(seen.phase)};
    if (live) row.push_back(rank.process.text() + (rank.busy() ? ", busy" : ""));
    row.push_back(current_text(rank, now_ns));
    rows.push_back(std::move(row));
  }
  std::string text = columns(rows);
  for (const std::string& line : all_mismatch_lines(ranks)) text += "\n  " + line;
  return text;
}

StallReport describe_stall(const std::vector<RankView>& ranks, const StallInfo& info) {
  StallReport report;
  report.behind = ranks_behind(ranks);
  report.cause = cause_of(ranks, report.behind, info);
  report.sure = is_sure(ranks, report.behind, info.other_hosts);
  report.full_text = fmt::format(
      "[launch] stall: no rank{} has moved for {:.1f} s (stall time {:.1f} "
      "s). {}",
      info.other_hosts ? " of this host" : "", info.quiet_s, info.stall_s, report.cause);
  report.full_text += ledger_table(ranks, info.now_ns);
  report.text = report.full_text + stack_lines(ranks, /*every_frame=*/false);
  report.full_text += stack_lines(ranks, /*every_frame=*/true);
  return report;
}

std::vector<std::string> standing_of(const std::vector<RankView>& ranks, int rank,
                                     std::uint64_t now_ns) {
  std::vector<std::string> lines;
  const RankView* const view = find_rank(ranks, rank);
  if (view == nullptr || view->ledger.pid == 0) return lines;
  std::vector<std::string> position;
  if (view->ledger.step >= 0) position.push_back(fmt::format("step {}", view->ledger.step));
  if (*name(view->ledger.phase) != '\0') position.emplace_back(name(view->ledger.phase));
  if (!position.empty()) lines.push_back(fmt::format("{}", fmt::join(position, ", ")));
  if (!view->ledger.records.empty())  // a rank alone has none
    lines.push_back("operation " + current_text(*view, now_ns));
  if (const auto found = first_mismatch(ranks, CollectiveMismatch::Kind::kOperation))
    for (std::string& line : mismatch_lines(ranks, *found)) lines.push_back(std::move(line));
  return lines;
}

namespace {

struct SystemCall {
  long number;
  const char* name;
  bool has_descriptor = true;  // as its first argument
};

constexpr SystemCall kCalls[] = {
    {SYS_read, "read"},
    {SYS_write, "write"},
    {SYS_pread64, "pread"},
    {SYS_pwrite64, "pwrite"},
    {SYS_readv, "readv"},
    {SYS_writev, "writev"},
    {SYS_recvfrom, "recv"},
    {SYS_recvmsg, "recvmsg"},
    {SYS_sendto, "send"},
    {SYS_sendmsg, "sendmsg"},
    {SYS_connect, "connect"},
    {SYS_accept, "accept"},
    {SYS_accept4, "accept"},
    {SYS_fsync, "fsync"},
    {SYS_fdatasync, "fdatasync"},
    {SYS_flock, "flock"},
    {SYS_fcntl, "fcntl"},
    {SYS_ioctl, "ioctl"},
    {SYS_openat, "open", false},
#ifdef SYS_poll  // older calls, which new architectures do not have
    {SYS_open, "open", false},
    {SYS_poll, "poll", false},
    {SYS_select, "select", false},
    {SYS_epoll_wait, "epoll_wait", false},
#endif
    {SYS_futex, "futex", false},
    {SYS_ppoll, "poll", false},
    {SYS_pselect6, "select", false},
    {SYS_epoll_pwait, "epoll_wait", false},
    {SYS_nanosleep, "sleep", false},
    {SYS_clock_nanosleep, "sleep", false},
    {SYS_wait4, "wait for a child", false},
    {SYS_waitid, "wait for a child", false},
};

std::string file_behind(pid_t pid, int fd) {
  char path[4096];
  const std::string link = fmt::format("/proc/{}/fd/{}", pid, fd);
  const ssize_t n = ::readlink(link.c_str(), path, sizeof path);
  return n > 0 ? std::string(path, static_cast<std::size_t>(n)) : fmt::format("descriptor {}", fd);
}

// "read of /data/train.bin"; the kernel's own name for the wait where the call cannot be read.
std::string wait_of(pid_t pid, const std::string& task) {
  std::istringstream call(text_or_empty(task + "/syscall"));
  long number = -1;
  std::string first;
  if (call >> number >> first) {
    for (const SystemCall& known : kCalls) {
      if (known.number != number) continue;
      if (!known.has_descriptor) return known.name;
      return fmt::format(
          "{} of {}", known.name,
          file_behind(pid, static_cast<int>(std::strtol(first.c_str(), nullptr, 16))));
    }
    if (number >= 0) return fmt::format("system call {}", number);
  }
  const std::string name = text_or_empty(task + "/wchan");
  return name == "0" ? std::string() : name;
}

}  // namespace

double cpu_seconds(pid_t pid) {
  constexpr std::size_t kUser = 14, kSystem = 15;
  const std::string text = text_or_empty(fmt::format("/proc/{}/stat", pid));
  const auto fields = stat_fields(text);
  if (fields.size() <= kSystem) return 0;
  const auto ticks =
      leading_number(fields[kUser]).value_or(0) + leading_number(fields[kSystem]).value_or(0);
  return static_cast<double>(ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

RankState read_rank_state(pid_t pid, pid_t thread) {
  RankState state;
  std::string task = fmt::format("/proc/{}/task/{}", pid, thread);
  std::string text = text_or_empty(task + "/stat");
  if (text.empty()) {  // the thread has ended
    task = fmt::format("/proc/{}/task/{}", pid, pid);
    text = text_or_empty(task + "/stat");
  }
  const auto fields = stat_fields(text);
  if (fields.size() <= 3) return state;
  state.state = fields[3].front();
  state.cpu_s = cpu_seconds(pid);
  if (state.state == 'S' || state.state == 'D') state.waits = wait_of(pid, task);
  return state;
}

bool in_library(pid_t pid, const std::vector<std::uint64_t>& addresses,
                const std::vector<std::string>& name_prefixes) {
  std::ifstream maps(fmt::format("/proc/{}/maps", pid));
  for (std::string line; std::getline(maps, line);) {
    const std::size_t name = line.rfind('/') + 1;  // 0: not a file
    if (name == 0 || std::ranges::none_of(name_prefixes, [&](const std::string& prefix) {
          return line.compare(name, prefix.size(), prefix) == 0;
        }))
      continue;
    std::uint64_t first = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> first >> dash >> end;
    if (std::ranges::any_of(addresses, [&](std::uint64_t at) { return at >= first && at < end; }))
      return true;
  }
  return false;
}

std::string RankState::text() const {
  const auto inside = [this](const char* what) {
    return waits.empty() ? std::string(what) : fmt::format("{} in {}", what, waits);
  };
  switch (state) {
    case 'R':
      return "R running";
    case 'S':
      return inside("S waiting");
    case 'D':
      return inside("D blocked on I/O");
    case 'T':
      return "T stopped";
    case 't':
      return "t held by a debugger";
    case 'Z':
      return "Z ended";
    default:
      return "not readable";
  }
}

}  // namespace lockstep::launch
