#include "bench/processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "bench/harness.h"
#include "launcher/worker.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::bench {
namespace fs = std::filesystem;

namespace {
fs::path here() {
  return fs::read_symlink("/proc/self/exe").parent_path();
}
}  // namespace

std::string program_beside(const std::string& relative) {
  const fs::path path = fs::weakly_canonical(here() / relative);
  if (!fs::exists(path))
    throw UsageError("bench", "{} is missing. Run ./dev build.", path.string());
  return path.string();
}

std::string peer(const std::string& file) {
  for (const char* place : {"../../bench/peers", "../share/lockstep/peers"}) {
    const fs::path path = fs::weakly_canonical(here() / place / file);
    if (fs::exists(path)) return path.string();
  }
  throw UsageError("bench", "the peer script {} is neither in the source tree nor installed.",
                   file);
}

std::string python() {
  return env::get("LOCKSTEP_PYTHON").value_or(LOCKSTEP_DEFAULT_PYTHON);
}

launch::Process start_lockstep(const std::vector<std::string>& arguments,
                               const Environment& changed, int output) {
  launch::ProcessRequest request;
  request.argv = {program_beside("../bin/lockstep")};
  request.argv.insert(request.argv.end(), arguments.begin(), arguments.end());
  request.environment = launch::process_environment(changed);
  request.stdout_fd = request.stderr_fd = output;
  ::sigprocmask(SIG_SETMASK, nullptr, &request.signal_mask);
  ::getrlimit(RLIMIT_NOFILE, &request.files);
  return launch::start_process(request);
}

void stop(launch::Process& process) {
  for (const int signal : {0, SIGTERM, SIGKILL}) {
    if (!process.alive()) return;
    if (signal != 0) process.signal_group(signal);
    if (process.wait_for(std::chrono::seconds(10))) process.reap();
  }
}

// ---------------------------------------------------------------- ranks that take orders

namespace {

using nlohmann::json;

constexpr std::chrono::minutes kStart{5}, kAnswer{60};
constexpr double kMaxIdleCpu = 0.05;  // share of one core, while others are timed

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw UsageError("bench",
                     "the path of a socket, '{}', is longer than {} characters. Set TMPDIR to a "
                     "shorter one.",
                     path, sizeof address.sun_path - 1);
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Fd stream_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw SystemError("bench", "cannot make a socket", errno);
  return fd;
}

// Takes the first line out of `unread`; false when there is none yet.
bool take_line(std::string& unread, std::string& line) {
  const std::size_t end = unread.find('\n');
  if (end == std::string::npos) return false;
  line = unread.substr(0, end);
  unread.erase(0, end + 1);
  return true;
}

// False at the end of the stream.
bool read_some(int fd, std::string& unread) {
  char buffer[65536];
  ssize_t count;
  do {
    count = ::recv(fd, buffer, sizeof buffer, 0);
  } while (count < 0 && errno == EINTR);
  if (count <= 0) return false;
  unread.append(buffer, static_cast<std::size_t>(count));
  return true;
}

void send_line(int fd, const std::string& line) {
  const std::string text = line + "\n";
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t count = ::send(fd, text.data() + at, text.size() - at, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw SystemError("bench", "cannot send a line", errno);
    at += static_cast<std::size_t>(count);
  }
}

double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

RankProcesses::RankProcesses(const RankProcessesOptions& options)
    : name(options.name), ranks_(options.ranks), listener_(stream_socket()) {
  const std::string socket = scratch_.file("orders");
  const sockaddr_un address = address_of(socket);
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener_.get(), options.ranks) != 0)
    throw SystemError("bench", fmt::format("cannot listen at '{}'", socket), errno);
  // Ranks that wait for orders are not stalled.
  std::vector<std::string> command{"run", "--standalone", "--stall-timeout=0",
                                   fmt::format("--nproc-per-node={}", options.ranks)};
  if (options.rank.ends_with(".py"))
    command.insert(command.end(), {python(), peer(options.rank)});
  else
    command.insert(command.end(), {program_beside("lockstep-bench"), "_rank", options.rank});
  command.insert(command.end(), {options.settings.dump(), socket});
  // Only warnings: the benchmark's report need not show how ranks and launcher start.
  launcher_ =
      start_lockstep(command, {{"LOCKSTEP_LOG", env::get("LOCKSTEP_LOG").value_or("warning")}});
}

RankProcesses::~RankProcesses() {
  members_.clear();
  stop(launcher_);
}

void RankProcesses::fail(const std::string& what) {
  launcher_.wait_for(std::chrono::seconds(10));
  const auto ending = launcher_.reap();
  throw Error("bench", fmt::format("the ranks of '{}' {} ({}). Their own messages are above.", name,
                                   what, ending ? ending->text() : "still running"));
}

bool RankProcesses::readable(int fd, const Deadline& deadline) {
  pollfd fds[] = {{fd, POLLIN, 0}, {launcher_.pidfd(), POLLIN, 0}};
  while (true) {
    const int count = ::poll(fds, 2, deadline.remaining_ms());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    if (fds[0].revents != 0) return true;
    fail("ended");
  }
}

// A rank says "rank R" first.
void RankProcesses::wait_ready() {
  if (!members_.empty()) return;
  const Deadline deadline = Deadline::after(kStart);
  std::vector<Member> members(static_cast<std::size_t>(ranks_));
  for (int connected = 0; connected < ranks_; ++connected) {
    if (!readable(listener_.get(), deadline)) fail("did not connect in time");
    Member member{Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)), {}};
    if (!member.socket) throw SystemError("bench", "cannot accept a rank", errno);
    const std::string line = read_line(member, deadline);
    int rank = -1;
    if (std::sscanf(line.c_str(), "rank %d", &rank) != 1 || rank < 0 || rank >= ranks_)
      fail(fmt::format("said '{}' first", line));
    members[static_cast<std::size_t>(rank)] = std::move(member);
  }
  members_ = std::move(members);
}

std::string RankProcesses::read_line(Member& member, const Deadline& deadline) {
  std::string line;
  while (!take_line(member.unread, line)) {
    if (!readable(member.socket.get(), deadline)) fail("gave no answer");
    if (!read_some(member.socket.get(), member.unread)) fail("ended");
  }
  return line;
}

std::vector<json> RankProcesses::ask_all(const json& order) {
  wait_ready();
  const Deadline deadline = Deadline::after(kAnswer);
  for (const Member& member : members_) send_line(member.socket.get(), order.dump());
  std::vector<json> answers;
  double idle_s = 0, idle_cpu_s = 0;  // of the rank that was busiest while it should have waited
  for (Member& member : members_) {
    json& answer = answers.emplace_back(json::parse(read_line(member, deadline)));
    if (answer.contains("error"))
      throw Error("bench", fmt::format("{}: {}", name, answer["error"].get<std::string>()));
    if (const double cpu_s = answer.at("idle_cpu_s"); cpu_s >= idle_cpu_s) {
      idle_cpu_s = cpu_s;
      idle_s = answer.at("idle_s");
    }
  }
  idle_s_ += idle_s;
  idle_cpu_s_ += idle_cpu_s;
  return answers;
}

void RankProcesses::check_idle() {
  const double idle_s = std::exchange(idle_s_, 0), cpu_s = std::exchange(idle_cpu_s_, 0);
  if (idle_s < 10 || cpu_s <= kMaxIdleCpu * idle_s) return;
  throw Error("bench", fmt::format("'{}' used {:.2f} s of a core in {:.2f} s of waiting, while "
                                   "others were timed",
                                   name, cpu_s, idle_s));
}

void RankProcesses::finish() {
  members_.clear();
  launcher_.wait_for(std::chrono::minutes(1));
  const auto ending = launcher_.reap();
  if (!ending || !ending->ok())
    throw Error("bench", fmt::format("the ranks of '{}' did not end well ({})", name,
                                     ending ? ending->text() : "still running"));
}

void serve(const std::string& path, int rank, const std::function<json(const json&)>& obey) {
  const Fd socket = stream_socket();
  const sockaddr_un address = address_of(path);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw SystemError("bench", fmt::format("cannot connect to '{}'", path), errno);
  send_line(socket.get(), fmt::format("rank {}", rank));
  std::string unread, line;
  while (true) {
    const auto idle_since = Deadline::Clock::now();
    const double idle_cpu = cpu_seconds();
    // Without a deadline on purpose: the benchmark's death ends the stream.
    while (!take_line(unread, line))
      if (!read_some(socket.get(), unread)) return;
    const json idle{{"idle_s", seconds_since(idle_since)},
                    {"idle_cpu_s", cpu_seconds() - idle_cpu}};
    json answer = obey(json::parse(line));
    answer.update(idle);
    send_line(socket.get(), answer.dump());
  }
}

// ---------------------------------------------------------------- runs of lockstep train

namespace {

constexpr std::chrono::hours kTimeout{2};
constexpr std::size_t kShownLines = 12;

std::string last_lines(const std::string& path) {
  const std::vector<std::string> lines = lines_of(read_file(path));
  std::string shown;
  for (std::size_t i = lines.size() - std::min(kShownLines, lines.size()); i < lines.size(); ++i)
    shown += "\n  " + lines[i];
  return shown;
}

TrainFigures read_figures(const std::string& path) {
  TrainFigures figures;
  for (const std::string& line : lines_of(read_file(path))) {
    const train::LogEntry entry = train::parse_log_entry(line, path);
    const auto value = [&](const char* name) { return train::find_metric(entry.values, name); };
    if (const double* loss = value("loss")) figures.losses.push_back(*loss);
    if (const double* rate = value("samples_per_second"))
      figures.samples_per_second.push_back(*rate);
    if (const double* rate = value("tokens_per_second")) figures.tokens_per_second.push_back(*rate);
    if (const double* seconds = value("train_runtime")) figures.runtime_s = *seconds;
    if (const double* loss = value("train_loss")) figures.train_loss = *loss;
  }
  return figures;
}

}  // namespace

double TrainFigures::settled(const std::vector<double>& logged) {
  if (logged.size() < 2)
    throw Error("bench", "a run has logged less than twice. Give it more --steps");
  return median({logged.begin() + 1, logged.end()});
}

std::vector<std::string> short_run(std::int64_t steps, std::int64_t logging_steps) {
  return {fmt::format("--max_steps={}", steps),
          fmt::format("--logging_steps={}", std::max<std::int64_t>(1, logging_steps)),
          "--logging_strategy=steps",
          "--logging_first_step=false",
          "--lr_scheduler_type=constant",
          "--lr_scheduler_kwargs=none",
          "--warmup_steps=0",
          "--eval_strategy=no",
          "--eval_on_start=false",
          "--early_stopping_patience=none",
          "--load_best_model_at_end=false",
          "--save_strategy=no",
          "--enable_jit_checkpoint=false",
          "--report_to=none",
          "--disable_tqdm=true",
          "--auto_find_batch_size=false",
          "--elastic_gpu=false",
          "--resume_from_checkpoint=never"};
}

bool on_cpu(const TrainingArguments& arguments) {
  return arguments.use_cpu || env::get("LOCKSTEP_DEVICE") == "cpu" || cuda_device_count() == 0;
}

TrainFigures run_train(const TrainJob& job, const std::string& folder) {
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string output = folder + ".log";
  const Fd log(::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!log) throw SystemError("bench", fmt::format("cannot write '{}'", output), errno);
  std::vector<std::string> arguments{"train"};
  if (job.ranks > 1) arguments.push_back(fmt::format("--nproc-per-node={}", job.ranks));
  if (!job.file.empty()) arguments.push_back(job.file);
  arguments.insert(arguments.end(), job.flags.begin(), job.flags.end());
  arguments.push_back("--output_dir=" + folder);
  launch::Process process = start_lockstep(arguments, job.environment, log.get());
  const bool in_time = process.wait_for(kTimeout);
  if (!in_time) stop(process);
  const auto ending = in_time ? process.reap() : std::nullopt;
  if (!ending || !ending->ok())
    throw Error("bench",
                fmt::format("lockstep train of '{}' failed ({}). Its last lines:{}", job.name,
                            ending ? ending->text() : "it took too long", last_lines(output)));
  const TrainFigures figures = read_figures(folder + "/metrics.jsonl");
  if (!(figures.runtime_s > 0))
    throw Error("bench", fmt::format("lockstep train of '{}' left no train_runtime in {}", job.name,
                                     folder));
  return figures;
}

}  // namespace lockstep::bench
