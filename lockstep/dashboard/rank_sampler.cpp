#include "lockstep/dashboard/rank_sampler.h"

#include <unistd.h>

#include <numeric>
#include <utility>

#include "lockstep/launch/process.h"
#include "lockstep/monitor/rank_recorder.h"

namespace lockstep::dashboard {
namespace {

// Of the interval in which the ledger was opened: what the rank did before, it did to start up.
// Where more was counted than there was time, it ran before anybody looked, and only later
// intervals can be known.
ledger::Totals first_totals(const monitor::Interval& interval, const ledger::Totals& read) {
  const std::uint64_t whole = static_cast<std::uint64_t>(interval.seconds * 1e9);
  const std::uint64_t counted =
      std::accumulate(read.host_ns.begin(), read.host_ns.end(), std::uint64_t{0});
  ledger::Totals spent = counted <= whole ? read : ledger::Totals{};
  spent.time_ns = whole;
  if (counted <= whole) spent.host_ns[ledger::index(ledger::Phase::kStartup)] += whole - counted;
  return spent;
}

}  // namespace

RankSampler::RankSampler(launch::RankStarted rank, Clock::time_point began)
    : rank_(std::move(rank)), pid_(rank_.pid), began_(began) {
  process_ = monitor::read_process(pid_);
  cgroup_ = monitor::read_cgroup(pid_);
}

// What a rank writes into its ledger is believed of processes below this one alone.
void RankSampler::find_process() {
  const int named = rank_.ledger ? rank_.ledger->pid() : 0;
  if (named == std::exchange(ledger_pid_, named)) return;
  pid_ = named > 0 && launch::is_below(::getpid(), named) ? named : rank_.pid;
}

bool RankSampler::stopped() const {
  return process_ && (process_->state == 'T' || process_->state == 't');
}

monitor::Interval RankSampler::close(const std::optional<ledger::Totals>& end) {
  monitor::Interval interval;
  const auto now = Clock::now();
  interval.unix_time_s =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  interval.seconds = std::chrono::duration<double>(now - std::exchange(began_, now)).count();
  if (rank_.ledger && rank_.ledger->opened()) {
    const ledger::Totals read = end ? *end : rank_.ledger->totals();
    interval = monitor::interval_of(totals_ ? ledger::since(*totals_, read)
                                            : first_totals(interval, read));
    totals_ = read;
    interval.step = rank_.ledger->step();
  }
  if (end) return interval;
  find_process();
  const auto process = monitor::read_process(pid_);
  if (process_ && process) interval.process = monitor::rates(*process_, *process);
  if (process) {
    interval.resident_bytes = process->resident_bytes;
    interval.threads = process->threads;
    process_ = process;
  }
  const monitor::CgroupSample cgroup = monitor::read_cgroup(pid_);
  interval.cpu_limit_cores = cgroup.cpu_limit_cores;
  interval.throttled_share = monitor::throttled_share(cgroup_, cgroup);
  cgroup_ = cgroup;
  return interval;
}

}  // namespace lockstep::dashboard
