#include "bench/crew.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::bench {
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

Crew::Crew(const CrewOptions& options)
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
  // Nobody reads a table to see how ranks and launcher start.
  launcher_ =
      start_lockstep(command, {{"LOCKSTEP_LOG", env::get("LOCKSTEP_LOG").value_or("warning")}});
}

Crew::~Crew() {
  members_.clear();
  stop(launcher_);
}

void Crew::fail(const std::string& what) {
  ended(launcher_, std::chrono::seconds(10));
  const auto ending = launcher_.reap();
  throw Error("bench", fmt::format("the ranks of '{}' {} ({}). Their own messages are above.", name,
                                   what, ending ? ending->text() : "still running"));
}

bool Crew::readable(int fd, const Deadline& deadline) {
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
void Crew::wait_ready() {
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

std::string Crew::read_line(Member& member, const Deadline& deadline) {
  std::string line;
  while (!take_line(member.unread, line)) {
    if (!readable(member.socket.get(), deadline)) fail("gave no answer");
    if (!read_some(member.socket.get(), member.unread)) fail("ended");
  }
  return line;
}

std::vector<json> Crew::ask_all(const json& order) {
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

void Crew::check_idle() {
  const double idle_s = std::exchange(idle_s_, 0), cpu_s = std::exchange(idle_cpu_s_, 0);
  if (idle_s < 10 || cpu_s <= kMaxIdleCpu * idle_s) return;
  throw Error("bench", fmt::format("'{}' used {:.2f} s of a core in {:.2f} s of waiting, while "
                                   "others were timed",
                                   name, cpu_s, idle_s));
}

void Crew::finish() {
  members_.clear();
  ended(launcher_, std::chrono::minutes(1));
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

}  // namespace lockstep::bench
