// lockstep bench allreduce: shared memory beside gloo and Open MPI.
#include "bench/allreduce.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/bench.h"
#include "bench/goals.h"
#include "bench/scratch.h"
#include "bench/stats.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "observe/report/chart.h"

namespace lockstep::bench {

std::vector<std::int64_t> parse_sizes(const std::string& text) {
  std::vector<std::int64_t> sizes;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    char* end = nullptr;
    const double number = std::strtod(part.c_str(), &end);
    std::string unit = end;
    if (unit.size() == 2 && (unit[1] == 'B' || unit[1] == 'b')) unit.pop_back();
    double factor = unit.empty() ? 1 : 0;
    if (unit == "K" || unit == "k") factor = 1024;
    if (unit == "M" || unit == "m") factor = 1024.0 * 1024;
    if (unit == "G" || unit == "g") factor = 1024.0 * 1024 * 1024;
    const auto bytes = static_cast<std::int64_t>(number * factor) / 4 * 4;
    if (bytes <= 0)
      throw UsageError("bench", "'{}' is not a size. Write bytes, or 4K, 25M, 1G.", part);
    sizes.push_back(bytes);
  }
  return sizes;
}

std::string show_size(double bytes) {
  const char* units[] = {"B", "KB", "MB", "GB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 3) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.4g} {}", bytes, units[unit]);
}

int repetitions(std::int64_t bytes) {
  if (bytes < kBarrierFirstBytes) return 2000;
  if (bytes <= kRunsUpToBytes) return 600;
  return static_cast<int>(std::clamp<std::int64_t>((1LL << 30) / bytes, 10, 300));
}

namespace {

struct Settings {
  int ranks = 2;
  int rounds = 3;
  double budget_s = 60;
  std::string backends = "shm,gloo";
  std::string sizes = "4K,64K,1M,25M,100M";
  std::string csv, json, svg;
  std::string corrupt;  // the contender that is to get a wrong sum
};

// "private:4K:us:3": the contender may take at most 3 microseconds at that size; with gloo or mpi
// it must be at least that many times faster, with memory reach at least that percentage of its
// limit.
struct Goal {
  std::string text, contender, measure;
  std::int64_t bytes = 0;
  double wanted = 0;
};

void read_ours(const std::string& path, Samples& samples) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find('\t'), second = line.find('\t', first + 1);
    samples[line.substr(0, first)][std::stoll(line.substr(first + 1, second - first - 1))]
        .push_back(std::stod(line.substr(second + 1)));
  }
}

void read_mpi(const std::string& path, Samples& samples) {
  std::ifstream file(path);
  std::int64_t bytes = 0;
  double us = 0;
  while (file >> bytes >> us) samples["mpi"][bytes].push_back(us);
}

// Empty when there is no MPI here; the reason is printed. With goals that need it, UsageError.
std::string mpi_command(const Settings& settings, const Scratch& scratch,
                        const std::vector<Goal>& wanted) {
  if (("," + settings.backends + ",").find(",mpi,") == std::string::npos) return "";
  const std::string program = scratch.file("allreduce_mpi");
  const std::string build = fmt::format("mpicc -O2 '{}' -o '{}'", peer("allreduce_mpi.c"), program);
  if (std::system((build + " >/dev/null 2>&1").c_str()) != 0) {
    for (const Goal& goal : wanted)
      if (goal.measure == "mpi")
        throw UsageError("bench",
                         "--require '{}': there is no Open MPI here to measure (mpicc failed). "
                         "Install it, or leave that goal out.",
                         goal.text);
    fmt::print(stderr, "no Open MPI here (mpicc failed); continuing without it\n");
    return "";
  }
  const bool root = ::geteuid() == 0;
  std::string command = fmt::format("mpirun{} --oversubscribe -np {} '{}'",
                                    root ? " --allow-run-as-root" : "", settings.ranks, program);
  const auto sizes = parse_sizes(settings.sizes);
  for (const auto bytes : sizes)
    command += fmt::format(" {}:{}:{:.0f}", bytes, repetitions(bytes),
                           1e6 * settings.budget_s / static_cast<double>(sizes.size()));
  return command + fmt::format(" >'{}'", scratch.file("mpi"));
}

std::vector<std::string> split(const std::string& text, char between = ',') {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, between);) parts.push_back(part);
  return parts;
}

struct Job {
  std::string backends, sizes;
  double budget_s;
};

std::string with_commas(const std::vector<std::int64_t>& sizes) {
  return fmt::format("{}", fmt::join(sizes, ","));
}

// Small operations of each backend run in processes of their own, as Open MPI's do: gloo's threads
// stay awake between its operations, and where ranks fill the cores they would delay the others.
// Large ones are measured in turn in the same processes, because the memory's speed changes.
std::vector<Job> jobs_of(const Settings& settings) {
  std::vector<std::int64_t> small, large;
  for (const std::int64_t bytes : parse_sizes(settings.sizes))
    (bytes <= kRunsUpToBytes ? small : large).push_back(bytes);
  std::vector<std::string> backends = split(settings.backends);
  std::erase(backends, "mpi");  // has a job of its own
  const double each_s = settings.budget_s /
                        static_cast<double>(std::max<std::size_t>(1, small.size() + large.size()));
  std::vector<Job> jobs;
  for (const auto& backend : backends)
    if (!small.empty())
      jobs.push_back(
          {backend, with_commas(small),
           each_s * static_cast<double>(small.size()) / static_cast<double>(backends.size())});
  if (!large.empty() && !backends.empty())
    jobs.push_back(
        {settings.backends, with_commas(large), each_s * static_cast<double>(large.size())});
  return jobs;
}

Samples collect(const Settings& settings, const std::vector<Goal>& wanted) {
  const Scratch scratch;
  Samples samples;
  const std::string mpi = mpi_command(settings, scratch, wanted);
  const std::vector<Job> jobs = jobs_of(settings);
  for (int round = 0; round < settings.rounds; ++round) {
    fmt::print(stderr, "round {}/{}\n", round + 1, settings.rounds);
    for (const Job& job : jobs) {
      run_command(fmt::format(
          "LOCKSTEP_DEVICE=cpu '{}' run --standalone --nproc-per-node={} '{}' _allreduce-rank '{}' "
          "'{}' '{}' {} '{}'",
          program_beside("../bin/lockstep"), settings.ranks, program_beside("lockstep-bench"),
          job.backends, job.sizes, scratch.file("ours"), job.budget_s,
          settings.corrupt.empty() ? "-" : settings.corrupt));
      read_ours(scratch.file("ours"), samples);
    }
    if (mpi.empty()) continue;
    run_command(mpi);
    read_mpi(scratch.file("mpi"), samples);
  }
  return samples;
}

// The contender's median, or nothing where it was not measured.
std::optional<double> median_of(const Samples& samples, const std::string& name,
                                std::int64_t bytes) {
  const auto found = samples.find(name);
  if (found == samples.end()) return std::nullopt;
  const auto times = found->second.find(bytes);
  if (times == found->second.end()) return std::nullopt;
  return median(times->second);
}

// What memory allows, by the faster of the loops that share no code with the engine.
std::optional<double> limit_of(const Samples& samples, std::int64_t bytes) {
  std::optional<double> fastest;
  for (const char* name : kLimits)
    if (const auto us = median_of(samples, name, bytes))
      fastest = std::min(fastest.value_or(*us), *us);
  return fastest;
}

std::string ratio(std::optional<double> over, double own) {
  return over ? fmt::format("{:.1f}x", *over / own) : "";
}

Table table_of(const Samples& samples, const Settings& settings) {
  Table table({fmt::format("all-reduce, {} ranks", settings.ranks), "size", "min us", "p50 us",
               "p99 us", "max us", "GB/s", "gloo / this", "mpi / this", "% of memory"});
  for (const std::int64_t bytes : parse_sizes(settings.sizes)) {
    for (const auto& [name, by_size] : samples) {
      const auto found = by_size.find(bytes);
      if (found == by_size.end()) continue;
      const Summary s = summarize(found->second);
      const auto limit = limit_of(samples, bytes);
      table.add({name, show_size(static_cast<double>(bytes)), fmt::format("{:.1f}", s.min),
                 fmt::format("{:.1f}", s.p50), fmt::format("{:.1f}", s.p99),
                 fmt::format("{:.1f}", s.max),
                 fmt::format("{:.2f}", static_cast<double>(bytes) / s.p50 / 1e3),
                 ratio(median_of(samples, "gloo", bytes), s.p50),
                 ratio(median_of(samples, "mpi", bytes), s.p50),
                 limit ? fmt::format("{:.0f}", 100 * *limit / s.p50) : ""});
    }
  }
  return table;
}

std::string json_of(const Samples& samples, const Settings& settings) {
  nlohmann::json document{{"benchmark", "allreduce"}, {"ranks", settings.ranks}};
  for (const auto& [name, by_size] : samples) {
    for (const auto& [bytes, times] : by_size) {
      const Summary s = summarize(times);
      nlohmann::json row{
          {"contender", name},       {"bytes", bytes},
          {"samples", times.size()}, {"min_us", s.min},
          {"p50_us", s.p50},         {"p99_us", s.p99},
          {"max_us", s.max},         {"gb_per_s", static_cast<double>(bytes) / s.p50 / 1e3}};
      for (const char* other : {"gloo", "mpi"})
        if (const auto theirs = median_of(samples, other, bytes))
          row[fmt::format("times_{}", other)] = *theirs / s.p50;
      if (const auto limit = limit_of(samples, bytes))
        row["percent_of_memory"] = 100 * *limit / s.p50;
      document["rows"].push_back(std::move(row));
    }
  }
  return document.dump(1) + "\n";
}

// ---------------------------------------------------------------- goals

Goal goal_of(const std::string& text) {
  const std::vector<std::string> parts = split(text, ':');
  const auto one_of = [](const std::string& part, std::initializer_list<const char*> known) {
    return std::find(known.begin(), known.end(), part) != known.end();
  };
  char* end = nullptr;
  Goal goal;
  goal.text = text;
  if (parts.size() == 4) goal.wanted = std::strtod(parts[3].c_str(), &end);
  if (end == nullptr || *end != '\0' || goal.wanted <= 0 ||
      !one_of(parts[0], {"private", "symmetric"}) ||
      !one_of(parts[2], {"us", "gloo", "mpi", "memory"}))
    throw UsageError("bench",
                     "--require '{}': write private or symmetric, a size, one of us, gloo, mpi and "
                     "memory, and a number, as in private:4K:us:3.",
                     text);
  goal.contender = "shm " + parts[0];
  goal.bytes = parse_sizes(parts[1]).front();
  goal.measure = parts[2];
  return goal;
}

// Before anything is measured.
std::vector<Goal> goals_of(const std::string& text, const Settings& settings) {
  const auto backends = split(settings.backends);
  const auto has = [&](const std::string& backend) {
    return std::find(backends.begin(), backends.end(), backend) != backends.end();
  };
  const auto sizes = parse_sizes(settings.sizes);
  std::vector<Goal> goals;
  for (const std::string& part : split(text)) {
    const Goal& goal = goals.emplace_back(goal_of(part));
    const bool peer = goal.measure == "gloo" || goal.measure == "mpi";
    if (!has("shm") || (peer && !has(goal.measure)) ||
        std::find(sizes.begin(), sizes.end(), goal.bytes) == sizes.end())
      throw UsageError("bench", "--require '{}' is not among --backends {} and --sizes {}.", part,
                       settings.backends, settings.sizes);
    if (goal.measure == "memory" && goal.bytes < kLimitFromBytes)
      throw UsageError("bench", "--require '{}': the memory's limit is measured from {} on.", part,
                       show_size(static_cast<double>(kLimitFromBytes)));
  }
  return goals;
}

void check_backends(const Settings& settings) {
  for (const std::string& part : split(settings.backends))
    if (part != "shm" && part != "gloo" && part != "mpi")
      throw UsageError("bench", "--backends: '{}' is none of shm, gloo and mpi.", part);
}

int judge(const std::vector<Goal>& wanted, const Samples& samples) {
  Goals goals("allreduce");
  for (const Goal& goal : wanted) {
    const auto own = median_of(samples, goal.contender, goal.bytes);
    const auto theirs = goal.measure == "us"       ? own
                        : goal.measure == "memory" ? limit_of(samples, goal.bytes)
                                                   : median_of(samples, goal.measure, goal.bytes);
    if (!own || !theirs)
      throw UsageError("bench", "--require '{}': that was not measured; see the lines above.",
                       goal.text);
    if (goal.measure == "us")
      goals.at_most(goal.text, *own, goal.wanted);
    else
      goals.at_least(goal.text, *theirs / *own * (goal.measure == "memory" ? 100 : 1), goal.wanted);
  }
  return goals.exit_code();
}

std::string svg_of(const Samples& samples, const Settings& settings) {
  report::LineChart time{.title = fmt::format("Time of an all-reduce, {} ranks", settings.ranks),
                         .x_label = "size",
                         .y_label = "microseconds",
                         .x_scale = report::Scale::kLog,
                         .y_scale = report::Scale::kLog,
                         .ticks_at_points = true,
                         .x_text = show_size};
  report::LineChart rate = time;
  rate.title = "Bandwidth (size / time)";
  rate.y_label = "GB/s";
  for (const auto& [name, by_size] : samples) {
    report::Line times{.name = name, .marked = true}, rates = times;
    for (const auto& [bytes, values] : by_size) {
      const auto x = static_cast<double>(bytes);
      times.points.emplace_back(x, median(values));
      rates.points.emplace_back(x, x / median(values) / 1e3);
    }
    time.lines.push_back(std::move(times));
    rate.lines.push_back(std::move(rates));
  }
  return report::svg_file({draw(time), draw(rate)});
}

}  // namespace

int allreduce_main(int argc, char** argv) {
  Settings settings;
  CLI::App app{"Time and bandwidth of an all-reduce over size, backends by turns"};
  app.add_option("--ranks", settings.ranks, "processes of this host")->check(CLI::Range(2, 64));
  app.add_option("--backends", settings.backends, "any of shm, gloo and mpi, with commas");
  app.add_option("--sizes", settings.sizes, "bytes of the tensor, with K, M or G and commas");
  app.add_option("--rounds", settings.rounds, "jobs; medians go over all")
      ->check(CLI::Range(1, 100));
  app.add_option("--budget-s", settings.budget_s,
                 "seconds for the measurements of one job; where they do not suffice, there are "
                 "fewer of them")
      ->check(CLI::Range(1.0, 3600.0))
      ->capture_default_str();
  std::string require;
  app.add_option(
      "--require", require,
      "private|symmetric:SIZE:us|gloo|mpi|memory:NUMBER, with commas: fail when it takes "
      "more microseconds, or is less than that many times faster than a peer, or reaches "
      "less than that percentage of the memory's limit");
  app.add_option("--csv", settings.csv, "also write the table to this file");
  app.add_option("--json", settings.json, "also write the figures to this file");
  app.add_option("--svg", settings.svg, "also draw time and bandwidth over size");
  app.add_option("--corrupt", settings.corrupt,
                 "give a contender ('gloo', 'shm private', ...) a wrong sum, to see it refused");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  parse_sizes(settings.sizes);
  check_backends(settings);
  const auto wanted = goals_of(require, settings);
  const Samples samples = collect(settings, wanted);
  publish(table_of(samples, settings), settings.csv);
  if (!settings.json.empty()) write_file_atomically(settings.json, json_of(samples, settings));
  if (!settings.svg.empty()) write_file_atomically(settings.svg, svg_of(samples, settings));
  return judge(wanted, samples);
}

}  // namespace lockstep::bench
