#include "launcher/rank_record.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "lockstep/core/deadline.h"

namespace lockstep::launch {
namespace {

constexpr const char* kStoppedCause = "reported an error and was stopped";
constexpr double kNoticeDelay_s = 0.25;  // by which a busy launcher may notice an end too late

bool counts_as_failed(const RankRecord& rank) {
  if (rank.life.was(RankLife::kFailed)) return true;
  if (rank.ended_ok())
    return rank.life.now() == RankLife::kExitedEarly && !rank.life.was_told_to_end();
  // A rank that was told to end has failed only if it had written an error file before.
  if (rank.ending && !rank.life.was_told_to_end()) return true;
  return rank.pid > 0 && read_error_file(rank.error_file).present;
}

}  // namespace

const RankRecord* first_to_fail(std::span<const RankRecord> ranks) {
  const RankRecord* first = nullptr;
  std::pair<bool, double> first_order;  // whether it is a consequence, and the time
  for (const RankRecord& rank : ranks) {
    if (!counts_as_failed(rank)) continue;
    const ErrorFile file = read_error_file(rank.error_file);
    const bool forced = rank.life.was(RankLife::kFailed);
    double time = file.present && !forced ? file.time : rank.ended_at;
    // A rank that was killed or exited early records no time, and a busy launcher may notice its
    // end after a victim has written an error file.
    const bool killed = rank.ending && rank.ending->by_signal && rank.ending->number == SIGKILL;
    if (!file.present && !forced && (killed || rank.life.now() == RankLife::kExitedEarly))
      time -= kNoticeDelay_s;
    const std::pair order(file.consequence && !forced, time);
    if (first != nullptr && order >= first_order) continue;
    first = &rank;
    first_order = order;
  }
  return first;
}

// Ranks that stop as requested exit with 0, 143 or 128 + the signal's number, or die of the signal.
// Any other end is a failure, for example to save. After Ctrl-C any exit code is accepted.
const RankRecord* failed_stopping(std::span<const RankRecord> ranks, const std::set<int>& requests,
                                  bool killed) {
  if (requests.empty() || requests.count(SIGINT) != 0) return nullptr;
  double obeyed = std::numeric_limits<double>::infinity();  // when the first rank died of a request
  for (const RankRecord& rank : ranks) {
    if (rank.ending && rank.ending->by_signal && requests.count(rank.ending->number) != 0)
      obeyed = std::min(obeyed, rank.ended_at);
  }
  const RankRecord* first = nullptr;
  for (const RankRecord& rank : ranks) {
    if (!rank.ending || rank.ended_ok() || rank.life.was(RankLife::kNotified)) continue;
    const int code = rank.ending->exit_code();
    if (killed && code == 128 + SIGKILL) continue;  // killed by the launcher
    if (code == kStoppedCode || requests.count(code - 128) != 0) continue;
    const bool crashed = rank.ending->by_signal;
    if (!crashed && rank.ended_at > obeyed) continue;  // it lost a peer that stopped as requested
    // A crashed rank makes others fail. If all fail identically, the lowest rank is reported.
    if (first != nullptr && first->ending->by_signal && !crashed) continue;
    const bool sooner = first != nullptr && rank.ended_at + kNoticeDelay_s < first->ended_at;
    if (first == nullptr || (crashed && !first->ending->by_signal) || sooner) first = &rank;
  }
  return first;
}

RankFailure describe(const RankRecord& rank, const AttemptInfo& attempt) {
  RankFailure failure;
  failure.rank = rank.rank;
  failure.local_rank = rank.local_rank;
  failure.node = attempt.node;
  failure.pid = rank.pid;
  failure.attempt = attempt.number;
  failure.host = attempt.host;
  failure.program = attempt.program;
  failure.time = rank.ended_at > 0 ? rank.ended_at : unix_time_s();
  if (rank.life.was(RankLife::kFailed)) {
    failure.cause = rank.cause;
    failure.code = rank.code;
  } else if (rank.life.now() == RankLife::kExitedEarly) {
    failure.cause = kEarlyExitCause;
    failure.code = 1;
  } else if (rank.ending && !rank.life.was(RankLife::kSignalled)) {
    failure.cause = rank.ending->text();
    failure.code = rank.ending->exit_code();
    // Another attempt would be misused in the same way, or undo a requested stop.
    failure.stopped = !rank.ending->by_signal && failure.code == kStoppedCode;
    const bool misused = !rank.ending->by_signal && failure.code == kUsageCode;
    failure.restartable = !failure.stopped && !misused;
  } else {
    failure.cause = kStoppedCause;
    failure.code = 1;
  }
  const double since_start = seconds_since(attempt.started);
  const double now = unix_time_s();
  const ErrorFile file = read_error_file(rank.error_file);
  add_error_file(failure, file);
  // The rank was stopped before it could exit with its own code.
  if (failure.cause == kStoppedCause && file.message.starts_with("lockstep::UsageError")) {
    failure.code = kUsageCode;
    failure.restartable = false;
  }
  if (file.present) failure.error_file = rank.error_file;
  failure.after_s = std::max(0.0, since_start - (now - failure.time));
  return failure;
}

void add_others(RankFailure& failure, std::span<const RankRecord> ranks) {
  std::map<std::string, std::vector<int>> victims;
  std::vector<LaterFailure> later;
  for (const RankRecord& rank : ranks) {
    if (rank.ended_ok() && rank.life.now() != RankLife::kExitedEarly &&
        !rank.life.was_told_to_end() && rank.ended_at < failure.time)
      failure.ended_before.push_back(rank.rank);
    if (rank.local_rank == failure.local_rank || !rank.ending || rank.ended_ok() ||
        (failure.stopped && rank.ending->exit_code() == kStoppedCode))
      continue;
    // A victim was signalled by the launcher, or its error file says that another rank failed.
    const ErrorFile file = read_error_file(rank.error_file);
    const double after_s = std::max(0.0, rank.ended_at - failure.time);
    const std::string how = rank.ending->by_signal
                                ? rank.ending->text()
                                : fmt::format("with exit code {}", rank.ending->number);
    if (rank.life.was(RankLife::kSignalled) || file.consequence)
      victims[how].push_back(rank.rank);
    else
      later.push_back({rank.rank, how, after_s, file.message});
  }
  for (const auto& [how, numbers] : victims)
    failure.victims.push_back(
        fmt::format("rank{} {} {}", numbers.size() == 1 ? "" : "s", fmt::join(numbers, ", "), how));
  failure.others = later_lines(failure, std::move(later));
}

}  // namespace lockstep::launch
