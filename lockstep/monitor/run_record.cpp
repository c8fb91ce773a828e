#include "lockstep/monitor/run_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/monitor/cpu_sampler.h"

namespace lockstep::monitor {

namespace {

namespace fs = std::filesystem;

// The fields of a document, named once for both directions.

constexpr std::pair<const char*, double ProcessRates::*> kRates[] = {
    {"cores", &ProcessRates::cores},
    {"system_cores", &ProcessRates::system_cores},
    {"minor_faults_per_s", &ProcessRates::minor_faults_per_s},
    {"involuntary_switches_per_s", &ProcessRates::involuntary_switches_per_s}};
constexpr std::pair<const char*, std::optional<double> ProcessRates::*> kOptionalRates[] = {
    {"run_delay_share", &ProcessRates::run_delay_share},
    {"waiting_threads", &ProcessRates::waiting_threads}};

template <typename Rates, typename Visit>
void visit_rates(Rates& rates, Visit& visit) {
  visit("seconds", rates.seconds);
  for (const auto& [name, rate] : kRates) visit(name, rates.*rate);
  for (const auto& [name, rate] : kOptionalRates) visit(name, rates.*rate);
}

template <typename IntervalType, typename Visit>
void visit_interval(IntervalType& interval, Visit& visit) {
  visit("unix_time_s", interval.unix_time_s);
  visit("seconds", interval.seconds);
  visit("start", interval.start);
  visit("step", interval.step);
  visit("steps", interval.steps);
  visit("host_s", interval.host_s);
  visit("device_s", interval.device_s);
  visit("counts", interval.counts);
  visit("process", interval.process);
  visit("resident_bytes", interval.resident_bytes);
  visit("threads", interval.threads);
  visit("cpu_limit_cores", interval.cpu_limit_cores);
  visit("throttled_share", interval.throttled_share);
  visit("collective_share", interval.collective_share);
  if (interval.collective_share) visit("collectives", interval.collectives);
}

template <typename Facts, typename Visit>
void visit_facts(Facts& facts, Visit& visit) {
  visit("world_size", facts.world_size);
  visit("hosts", facts.hosts);
  visit("device", facts.device);
  visit("backend", facts.backend);
  visit("program", facts.program);
  visit("started_unix_s", facts.started_unix_s);
  visit("cores", facts.cores);
  visit("ranks_on_host", facts.ranks_on_host);
  visit("gpus_visible", facts.gpus_visible);
  visit("parameters", facts.parameters);
  visit("per_device_batch", facts.per_device_batch);
  visit("accumulation", facts.accumulation);
  visit("optimizer", facts.optimizer);
  visit("arguments", facts.arguments);
  visit("total_steps", facts.total_steps);
  visit("threads_per_rank", facts.threads_per_rank);
  visit("writer", facts.writer);
  visit("ended_unix_s", facts.ended_unix_s);
  visit("failure", facts.failure);
  visit("failed_ranks", facts.failed_ranks);
}

template <typename Identity, typename Visit>
void visit_identity(Identity& gpu, Visit& visit) {
  visit("index", gpu.index);
  visit("name", gpu.name);
  visit("uuid", gpu.uuid);
  visit("pci_bus_id", gpu.pci_bus_id);
}

template <typename Reading, typename Visit>
void visit_reading(Reading& reading, Visit& visit) {
  visit("problem", reading.problem);
  visit("utilisation_percent", reading.utilisation_percent);
  visit("memory_utilisation_percent", reading.memory_utilisation_percent);
  visit("memory_used_bytes", reading.memory_used_bytes);
  visit("memory_total_bytes", reading.memory_total_bytes);
  visit("power_w", reading.power_w);
  visit("power_limit_w", reading.power_limit_w);
  visit("temperature_c", reading.temperature_c);
  visit("sm_clock_mhz", reading.sm_clock_mhz);
  visit("memory_clock_mhz", reading.memory_clock_mhz);
  visit("clock_reasons", reading.clock_reasons);
  visit("ecc_corrected", reading.ecc_corrected);
  visit("ecc_uncorrected", reading.ecc_uncorrected);
}

// Seconds are those of a phase, counts those of a counter.
const char* element_name(double, std::size_t i) {
  return phase_key(static_cast<ledger::Phase>(i));
}
const char* element_name(std::uint64_t, std::size_t i) {
  return ledger::name(static_cast<ledger::Counter>(i));
}

// ------------------------------------------------------------------ writing

class Writer {
 public:
  // Omits unknown values and empty texts.
  template <typename T>
  void operator()(const char* name, const std::optional<T>& value) {
    if (value) (*this)(name, *value);
  }
  template <typename T>
    requires std::is_integral_v<T>
  void operator()(const char* name, T value) {
    const auto most = static_cast<std::uint64_t>(INT64_MAX);
    put(name, integer_node(value > 0 ? static_cast<std::int64_t>(
                                           std::min(static_cast<std::uint64_t>(value), most))
                                     : static_cast<std::int64_t>(value)));
  }
  void operator()(const char* name, bool value) {
    if (value) put(name, bool_node(true));
  }
  // JSON has no infinity, and no reader of a record takes less than nothing.
  void operator()(const char* name, double value) {
    put(name, real_node(std::isfinite(value) && value > 0 ? value : 0));
  }
  void operator()(const char* name, const std::string& text) {
    if (!text.empty()) put(name, text_node(text));
  }
  void operator()(const char* name, const Node& node) {
    if (!node.is(NodeKind::kNull)) put(name, node);
  }
  template <typename T, std::size_t N>
  void operator()(const char* name, const std::array<T, N>& values) {
    Writer elements;
    for (std::size_t i = 0; i < N; ++i)
      if (values[i] > 0) elements(element_name(values[i], i), values[i]);
    if (!elements.members_.empty()) put(name, elements.take());
  }
  void operator()(const char* name, const ProcessRates& rates) {
    Writer fields;
    visit_rates(rates, fields);
    put(name, fields.take());
  }

  void put(const char* name, Node node) { members_.emplace_back(name, std::move(node)); }
  Node take() { return map_node(std::move(members_)); }

 private:
  NodeMembers members_;
};

// ------------------------------------------------------------------ reading

// Reads the keys that are there; those of a newer version are skipped.
class Reader {
 public:
  explicit Reader(const Node& map) : map_(map) {}

  template <typename T>
  void operator()(const char* name, std::optional<T>& value) {
    if (map_.find(name) != nullptr) (*this)(name, value.emplace());
  }
  template <typename T>
    requires std::is_integral_v<T>
  void operator()(const char* name, T& value) {
    const Node* node = find(name);
    if (node == nullptr) return;
    // -1 stands for an unknown value; no other value is negative.
    const std::int64_t least = std::is_signed_v<T> && value < T{0} ? -1 : 0;
    std::int64_t most = INT64_MAX;
    if constexpr (sizeof(T) < sizeof most)
      most = static_cast<std::int64_t>(std::numeric_limits<T>::max());
    const std::int64_t read = as_integer(*node, name);
    if (read < least || read > most)
      refuse_at(node->location, "{} must be from {} to {}, and {} is not.", name, least, most,
                read);
    value = static_cast<T>(read);
  }
  void operator()(const char* name, bool& value) {
    if (const Node* node = find(name)) value = as_bool(*node, name);
  }
  void operator()(const char* name, double& value) {
    const Node* node = find(name);
    if (node == nullptr) return;
    value = as_real(*node, name);
    if (!(value >= 0)) refuse_at(node->location, "{} must be 0 or more.", name);
  }
  void operator()(const char* name, std::string& text) {
    if (const Node* node = find(name)) text = as_string(*node, name);
  }
  void operator()(const char* name, Node& value) {
    if (const Node* node = find(name)) value = as_map(*node, name);
  }
  template <typename T, std::size_t N>
  void operator()(const char* name, std::array<T, N>& values) {
    const Node* node = find(name);
    if (node == nullptr) return;
    Reader elements(as_map(*node, name));
    for (std::size_t i = 0; i < N; ++i) elements(element_name(values[i], i), values[i]);
  }
  void operator()(const char* name, ProcessRates& rates) {
    const Node* node = find(name);
    if (node == nullptr) return;
    Reader fields(as_map(*node, name));
    visit_rates(rates, fields);
  }

  const Node* find(const char* name) const {
    const Entry* entry = map_.find(name);
    return entry == nullptr ? nullptr : &entry->value;
  }

 private:
  const Node& map_;
};

GpuSample parse_gpu_sample(const std::string& line, const std::string& file,
                           std::vector<GpuIdentity>& identities) {
  const Node root = parse_json(line, file);
  as_map(root, "a sample");
  GpuSample sample;
  root.at("unix_time_s");
  Reader fields_of_line(root);
  fields_of_line("unix_time_s", sample.unix_time_s);
  const Node& gpus = root.at("gpus");
  if (!gpus.is(NodeKind::kList)) refuse_value(gpus, "gpus", "a list");
  identities.clear();
  for (const Node& item : gpus.items) {
    Reader fields(as_map(item, "a GPU"));
    GpuIdentity gpu;
    visit_identity(gpu, fields);
    if (gpu.index != static_cast<int>(sample.gpus.size()))
      refuse_at(item.location, "GPU {} stands where GPU {} is expected.", gpu.index,
                sample.gpus.size());
    identities.push_back(std::move(gpu));
    visit_reading(sample.gpus.emplace_back(), fields);
    const Node* processes = fields.find("processes");
    if (processes == nullptr) continue;
    if (!processes->is(NodeKind::kList)) refuse_value(*processes, "processes", "a list");
    for (const Node& one : processes->items) {
      Reader process(as_map(one, "a process"));
      GpuProcess& read = sample.gpus.back().processes.emplace_back();
      process("pid", read.pid);
      process("memory_bytes", read.memory_bytes);
    }
  }
  return sample;
}

// ------------------------------------------------------------------ files

constexpr std::size_t kMaxBytes = std::size_t{1} << 30;

std::string text_of_file(const std::string& path) {
  try {
    return read_file(path, kMaxBytes);
  } catch (const SystemError& error) {
    throw UsageError("record", "{} cannot be read: {}. Check who owns it.", path,
                     std::strerror(error.error_number()));
  }
}

// A line is a document of its own, in which its errors are on line 1.
[[noreturn]] void refuse_line(const UsageError& error, const std::string& path, std::size_t line) {
  std::string text = error.what();
  if (const std::size_t end = text.find("] "); end != text.npos) text.erase(0, end + 2);
  const std::string place = path + ":1:";
  if (text.starts_with(place)) text.erase(0, place.size());
  throw UsageError("record",
                   "{}:{}:{} The file was changed by hand or by a fault of the disk; delete the "
                   "line to read the rest.",
                   path, line, text);
}

void for_each_line(const std::string& path, const std::function<void(const std::string&)>& use) {
  const std::string text = text_of_file(path);
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    ++number;
    const std::size_t end = text.find('\n', begin);
    const bool torn = end == text.npos;  // the run was killed while it wrote, or writes now
    const std::string line = text.substr(begin, torn ? end : end - begin);
    try {
      use(line);
    } catch (const UsageError& error) {
      if (!torn) refuse_line(error, path, number);
    }
    begin = torn ? text.size() : end + 1;
  }
}

// 7 of "rank_7.jsonl"; nothing for other names.
std::optional<int> number_in(const std::string& name, std::string_view prefix) {
  constexpr std::string_view kSuffix = ".jsonl";
  const std::string_view all = name;
  if (!all.starts_with(prefix) || !all.ends_with(kSuffix) ||
      all.size() <= prefix.size() + kSuffix.size())
    return std::nullopt;
  const std::string_view digits =
      all.substr(prefix.size(), all.size() - prefix.size() - kSuffix.size());
  int number = 0;
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool whole = error == std::errc() && stop == digits.data() + digits.size();
  return whole && number >= 0 ? std::optional(number) : std::nullopt;
}

std::map<int, std::string> numbered_files(const std::string& folder, std::string_view prefix) {
  std::map<int, std::string> files;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (const auto number = number_in(at->path().filename().string(), prefix))
      files[*number] = at->path().string();
  return files;
}

// ------------------------------------------------------------------ joining

// The mean of both; where one is not known, the other. `part`: that of the second.
void mix(double& to, double next, double part) {
  to += part * (next - to);
}
void mix(std::optional<double>& to, const std::optional<double>& next, double part) {
  if (to && next)
    mix(*to, *next, part);
  else if (next)
    to = next;
}
void mix(std::optional<ProcessRates>& to, const std::optional<ProcessRates>& next, double part) {
  if (!to || !next) {
    if (next) to = next;
    return;
  }
  for (const auto& [name, rate] : kRates) mix((*to).*rate, (*next).*rate, part);
  for (const auto& [name, rate] : kOptionalRates) mix((*to).*rate, (*next).*rate, part);
  to->seconds += next->seconds;
}

// ------------------------------------------------------------------ clocks

constexpr double kSteps_s = 30;  // an interval is up to 10 s long
// Hosts begin minutes apart where one is slow to start.
constexpr double kStarts_s = 600;

using Intervals = std::span<const Interval>;

// The steps of a run that is started again may begin with earlier ones.
Intervals last_start(const RankRecord& rank) {
  const Intervals all = rank.intervals;
  for (std::size_t i = all.size(); i-- > 1;)
    if (all[i].start || (all[i].step >= 0 && all[i].step < all[i - 1].step)) return all.subspan(i);
  return all;
}

struct Passed {
  double step = 0;
  double unix_time_s = 0;
};

// When which step was the newest.
std::vector<Passed> passed_steps(Intervals intervals) {
  std::vector<Passed> passed;
  for (const Interval& interval : intervals)
    if (interval.steps > 0 && interval.step >= 0)
      passed.push_back({static_cast<double>(interval.step), interval.unix_time_s});
  return passed;
}

// Between two of the reference's times, by how far the step is between theirs.
std::optional<double> time_of(double step, const std::vector<Passed>& reference) {
  const auto after = std::ranges::lower_bound(reference, step, {}, &Passed::step);
  if (after == reference.end()) return std::nullopt;
  if (after->step == step) return after->unix_time_s;
  if (after == reference.begin()) return std::nullopt;
  const Passed& before = *(after - 1);
  const double part = (step - before.step) / (after->step - before.step);
  return before.unix_time_s + part * (after->unix_time_s - before.unix_time_s);
}

// How far this rank's clock is ahead; 0 where it may be the same clock.
double ahead_s(const RankRecord& rank, const RankRecord& reference) {
  const Intervals own = last_start(rank);
  const Intervals theirs = last_start(reference);
  const std::vector<Passed> by_reference = passed_steps(theirs);
  std::vector<double> differences;
  for (const Passed& passed : passed_steps(own))
    if (const auto time = time_of(passed.step, by_reference))
      differences.push_back(passed.unix_time_s - *time);
  if (!differences.empty()) {
    const double ahead = detail::median(std::move(differences));
    return std::abs(ahead) > kSteps_s ? ahead : 0;
  }
  const auto began = [](const Interval& first) { return first.unix_time_s - first.seconds; };
  const double ahead = began(own.front()) - began(theirs.front());
  return std::abs(ahead) > kStarts_s ? ahead : 0;
}

}  // namespace

const char* phase_key(ledger::Phase phase) {
  return phase == ledger::Phase::kNone ? "other" : ledger::name(phase);
}

void join(Interval& to, const Interval& next) {
  const auto sum = [](auto& all, const auto& more) {
    std::transform(all.begin(), all.end(), more.begin(), all.begin(), std::plus<>());
  };
  if (to.seconds <= 0) to.start = next.start;
  to.seconds += next.seconds;
  const double part = to.seconds > 0 ? next.seconds / to.seconds : 1;
  to.unix_time_s = next.unix_time_s;
  if (next.step >= 0) to.step = next.step;
  to.steps += next.steps;
  sum(to.host_s, next.host_s);
  sum(to.device_s, next.device_s);
  sum(to.counts, next.counts);
  mix(to.process, next.process, part);
  to.resident_bytes = std::max(to.resident_bytes, next.resident_bytes);
  to.threads = std::max(to.threads, next.threads);
  if (next.cpu_limit_cores) to.cpu_limit_cores = next.cpu_limit_cores;
  mix(to.throttled_share, next.throttled_share, part);
  mix(to.collective_share, next.collective_share, part);
  to.collectives += next.collectives;
}

std::string interval_json(const Interval& interval) {
  Writer fields;
  visit_interval(interval, fields);
  return to_json(fields.take());
}

Interval parse_interval(const std::string& line, const std::string& file) {
  const Node root = parse_json(line, file);
  as_map(root, "an interval");
  root.at("unix_time_s");
  root.at("seconds");
  Interval interval;
  Reader fields(root);
  visit_interval(interval, fields);
  return interval;
}

std::string facts_json(const RunFacts& facts) {
  Writer fields;
  visit_facts(facts, fields);
  return to_json(fields.take());
}

RunFacts parse_facts(const std::string& text, const std::string& file) {
  const Node root = parse_json(text, file);
  as_map(root, "a run's facts");
  root.at("world_size");
  RunFacts facts;
  Reader fields(root);
  visit_facts(facts, fields);
  return facts;
}

std::string gpu_sample_json(const GpuSample& sample, const std::vector<GpuIdentity>& gpus) {
  std::vector<Node> items;
  for (std::size_t i = 0; i < sample.gpus.size(); ++i) {
    Writer gpu;
    GpuIdentity identity = i < gpus.size() ? gpus[i] : GpuIdentity{};
    identity.index = static_cast<int>(i);
    visit_identity(identity, gpu);
    visit_reading(sample.gpus[i], gpu);
    std::vector<Node> processes;
    for (const GpuProcess& process : sample.gpus[i].processes) {
      Writer one;
      one("pid", process.pid);
      one("memory_bytes", process.memory_bytes);
      processes.push_back(one.take());
    }
    if (!processes.empty()) gpu.put("processes", list_node(std::move(processes)));
    items.push_back(gpu.take());
  }
  Writer fields;
  fields("unix_time_s", sample.unix_time_s);
  fields.put("gpus", list_node(std::move(items)));
  return to_json(fields.take());
}

RunRecord read_run(const std::string& directory) {
  const std::string folder = directory + "/" + kRecordFolder;
  const std::string facts = folder + "/run.json";
  std::error_code error;
  if (!fs::exists(facts, error)) {
    const bool others = !numbered_files(folder, "rank_").empty();
    throw UsageError("record", "{} has no record of a run: {} is not there. {}", directory, facts,
                     others ? "The ranks' files are; rank 0's host has that file."
                            : "Name the output_dir of a Trainer, which records unless record_run "
                              "is false, or record a program with `lockstep run --record DIR`.");
  }
  RunRecord run;
  run.facts = parse_facts(text_of_file(facts), facts);
  for (const auto& [rank, path] : numbered_files(folder, "rank_")) {
    if (rank >= run.facts.world_size) break;
    RankRecord& record = run.ranks.emplace_back();
    record.rank = rank;
    for_each_line(path, [&](const std::string& line) {
      record.intervals.push_back(parse_interval(line, path));
    });
    if (record.intervals.empty()) run.ranks.pop_back();
  }
  for (const auto& [host, path] : numbered_files(folder, "gpus_")) {
    HostGpus& gpus = run.gpus.emplace_back();
    gpus.host = host;
    for_each_line(path, [&](const std::string& line) {
      std::vector<GpuIdentity> identities;
      gpus.samples.push_back(parse_gpu_sample(line, path, identities));
      gpus.gpus = std::move(identities);
    });
    if (gpus.samples.empty()) run.gpus.pop_back();
  }
  align_clocks(run);
  return run;
}

void align_clocks(RunRecord& run) {
  const int on_host = std::max(run.facts.ranks_on_host, 1);
  const bool one_host = on_host >= run.facts.world_size;
  if (one_host || run.ranks.empty() || run.ranks.front().rank != 0) return;
  std::map<int, double> ahead_of_host;
  for (RankRecord& rank : run.ranks) {
    const double ahead = ahead_s(rank, run.ranks.front());
    if (ahead == 0) continue;
    for (Interval& interval : rank.intervals) interval.unix_time_s -= ahead;
    ahead_of_host[rank.rank / on_host] = ahead;
  }
  for (HostGpus& host : run.gpus)
    if (const auto found = ahead_of_host.find(host.host); found != ahead_of_host.end())
      for (GpuSample& sample : host.samples) sample.unix_time_s -= found->second;
}

bool is_complete(const RunRecord& run) {
  return run.ranks.size() >= static_cast<std::size_t>(std::max(run.facts.world_size, 0));
}

// A step may take several intervals, which count once it has ended. Time before the first step of a
// start does not count, nor an interval in which only that first step ended, since it may have
// begun long before; with a device's times the first such interval never counts, since they are
// recorded when they are complete.
Interval budget_of(const RankRecord& rank, double skip_s, double from_unix_s) {
  Interval sum;
  Interval pending;
  Interval first;
  bool stepping = false;
  double elapsed = 0;
  for (const Interval& interval : rank.intervals) {
    if (interval.unix_time_s < from_unix_s) continue;
    const double before = elapsed;
    elapsed += interval.seconds;
    if (interval.start) stepping = false;
    if (before < skip_s || (interval.steps == 0 && !stepping)) continue;
    if (!stepping) pending = {};
    const bool began = std::exchange(stepping, true);
    join(pending, interval);
    if (interval.steps == 0) continue;
    const bool late = interval.steps == 1 || has_device_times(pending.device_s);
    join(!began && late ? first : sum, std::exchange(pending, {}));
  }
  if (sum.steps == 0) join(sum, first);
  return sum;
}

std::optional<double> mean_collective_share(const RankRecord& rank, double from_unix_s) {
  double sum = 0;
  double seconds = 0;
  bool seen = false;  // what lies before the first one is start-up
  for (const Interval& interval : rank.intervals) {
    if (interval.unix_time_s < from_unix_s || !interval.collective_share) continue;
    seen = seen || interval.collectives > 0;
    if (!seen) continue;
    sum += *interval.collective_share * interval.seconds;
    seconds += interval.seconds;
  }
  if (seconds <= 0) return std::nullopt;
  return sum / seconds;
}

const Interval& newest_sample(const RankRecord& rank) {
  const auto found = std::find_if(rank.intervals.rbegin(), rank.intervals.rend(),
                                  [](const Interval& one) { return one.resident_bytes > 0; });
  return found != rank.intervals.rend() ? *found : rank.intervals.back();
}

bool is_over(const RunFacts& facts) {
  return facts.ended_unix_s > 0 || has_ended(facts.writer);
}

bool counts_steps(const RunRecord& run) {
  return run.facts.program == "trainer" ||
         std::ranges::any_of(run.ranks, [&](const RankRecord& rank) {
           return budget_of(rank, 0, run.facts.started_unix_s).steps > 0;
         });
}

const char* without_steps(const RunRecord& run) {
  const bool collectives = std::ranges::any_of(run.ranks, [&](const RankRecord& rank) {
    return mean_collective_share(rank, run.facts.started_unix_s).has_value();
  });
  return collectives ? "its collectives are known, its steps are not"
                     : "no step was seen and no collective: only CPU, memory and GPUs are known";
}

namespace {

// The boot and PID namespace in which PIDs are these PIDs; empty: not known.
std::string place_of_pids() {
  std::error_code error;
  const std::string space = std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
  try {
    std::string boot = read_file("/proc/sys/kernel/random/boot_id", 64);
    boot.erase(boot.find_last_not_of(" \n") + 1);
    return error || boot.empty() ? "" : fmt::format("{} {}", boot, space);
  } catch (const SystemError&) {
    return "";
  }
}

}  // namespace

std::string process_identity(pid_t pid) {
  const std::string place = place_of_pids();
  const auto process = read_process(pid);
  if (place.empty() || !process) return "";
  return fmt::format("{} {} {}", place, pid, process->start_ticks);
}

bool has_ended(const std::string& identity) {
  const std::string place = place_of_pids() + " ";
  if (place.size() == 1 || !identity.starts_with(place)) return false;
  pid_t pid = 0;
  const char* const digits = identity.data() + place.size();
  if (std::from_chars(digits, identity.data() + identity.size(), pid).ec != std::errc())
    return false;
  const auto process = read_process(pid);
  return !process || process->state == 'Z' || process_identity(pid) != identity;
}

}  // namespace lockstep::monitor
