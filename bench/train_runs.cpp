#include "bench/train_runs.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <sstream>

#include "bench/bench.h"
#include "launcher/process.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/train/trainer_state.h"

extern char** environ;

namespace lockstep::bench {
namespace {

constexpr std::chrono::hours kTimeout{2};
constexpr std::size_t kShownLines = 12;

std::vector<std::string> environment_of(const TrainJob& job) {
  std::vector<std::string> all;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!job.environment.contains(text.substr(0, text.find('=')))) all.push_back(text);
  }
  for (const auto& [name, value] : job.environment)
    if (!value.empty()) all.push_back(name + "=" + value);
  return all;
}

std::string last_lines(const std::string& path) {
  std::istringstream text(read_file(path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  const std::size_t first = lines.size() - std::min(kShownLines, lines.size());
  std::string shown;
  for (std::size_t i = first; i < lines.size(); ++i) shown += "\n  " + lines[i];
  return shown;
}

// False: it was killed because it took too long.
bool wait_for(launch::Process& process) {
  const auto ended = [&](std::chrono::milliseconds limit) {
    const Deadline deadline = Deadline::after(limit);
    pollfd fd{process.pidfd(), POLLIN, 0};
    int count;
    do {
      count = ::poll(&fd, 1, deadline.remaining_ms());
    } while (count < 0 && errno == EINTR);
    return count > 0;
  };
  if (ended(kTimeout)) return true;
  process.signal_group(SIGTERM);
  if (!ended(std::chrono::seconds(30))) process.signal_group(SIGKILL);
  ended(std::chrono::seconds(30));
  return false;
}

TrainFigures read_figures(const std::string& path) {
  TrainFigures figures;
  std::istringstream text(read_file(path));
  for (std::string line; std::getline(text, line);) {
    const train::LogEntry entry = train::parse_log_entry(line, path);
    const auto value = [&](const char* name) { return train::find_metric(entry.values, name); };
    if (const double* loss = value("loss")) figures.losses.push_back(*loss);
    if (const double* rate = value("samples_per_second"))
      figures.samples_per_second.push_back(*rate);
    if (const double* seconds = value("train_runtime")) figures.runtime_s = *seconds;
    if (const double* loss = value("train_loss")) figures.train_loss = *loss;
  }
  return figures;
}

}  // namespace

TrainFigures run_train(const TrainJob& job, const std::string& folder) {
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string output = folder + ".log";
  const Fd log(::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!log) throw SystemError("bench", fmt::format("cannot write '{}'", output), errno);
  launch::ProcessRequest request;
  request.argv = {program_beside("../bin/lockstep"), "train"};
  if (job.ranks > 1) request.argv.push_back(fmt::format("--nproc-per-node={}", job.ranks));
  if (!job.file.empty()) request.argv.push_back(job.file);
  request.argv.insert(request.argv.end(), job.flags.begin(), job.flags.end());
  request.argv.push_back("--output_dir=" + folder);
  request.environment = environment_of(job);
  request.stdout_fd = request.stderr_fd = log.get();
  ::sigprocmask(SIG_SETMASK, nullptr, &request.signal_mask);
  ::getrlimit(RLIMIT_NOFILE, &request.files);
  launch::Process process = launch::start_process(request);
  const bool in_time = wait_for(process);
  const auto ending = process.reap();
  if (!in_time || !ending || !ending->ok())
    throw Error(
        "bench",
        fmt::format("lockstep train of '{}' failed ({}). Its last lines:{}", job.name,
                    in_time && ending ? ending->text() : "it took too long", last_lines(output)));
  const TrainFigures figures = read_figures(folder + "/metrics.jsonl");
  if (!(figures.runtime_s > 0))
    throw Error("bench", fmt::format("lockstep train of '{}' left no train_runtime in {}", job.name,
                                     folder));
  return figures;
}

}  // namespace lockstep::bench
