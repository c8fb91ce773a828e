#include "bench/crew.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "bench/bench.h"
#include "lockstep/core/error.h"

extern char** environ;

namespace lockstep::bench {
namespace {

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
  char buffer[4096];
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

launch::Process start(const CrewOptions& options, const std::string& socket) {
  launch::ProcessRequest request;
  // Ranks that wait for orders are not stalled.
  request.argv = {program_beside("../bin/lockstep"), "run", "--standalone", "--stall-timeout=0",
                  fmt::format("--nproc-per-node={}", options.ranks)};
  for (const auto& part : options.command) request.argv.push_back(part);
  request.argv.insert(request.argv.end(), {"--orders", socket});
  bool chosen = false;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    request.environment.emplace_back(*variable);
    chosen = chosen || request.environment.back().starts_with("LOCKSTEP_LOG=");
  }
  // Nobody reads a table to see how ranks and launcher start.
  if (!chosen) request.environment.emplace_back("LOCKSTEP_LOG=warning");
  ::sigprocmask(SIG_SETMASK, nullptr, &request.signal_mask);
  ::getrlimit(RLIMIT_NOFILE, &request.files);
  return launch::start_process(request);
}

}  // namespace

Crew::Crew(const CrewOptions& options, const std::string& socket)
    : options_(options),
      listener_(stream_socket()),
      members_(static_cast<std::size_t>(options.ranks)) {
  const sockaddr_un address = address_of(socket);
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener_.get(), options.ranks) != 0)
    throw SystemError("bench", fmt::format("cannot listen at '{}'", socket), errno);
  launcher_ = start(options, socket);
}

Crew::~Crew() {
  members_.clear();
  for (const int signal : {0, SIGTERM, SIGKILL}) {
    if (!launcher_.alive()) return;
    if (signal != 0) launcher_.signal_group(signal);
    pollfd ended{launcher_.pidfd(), POLLIN, 0};
    if (::poll(&ended, 1, 10'000) > 0) launcher_.reap();
  }
}

void Crew::fail(const std::string& what) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  pollfd ended{launcher_.pidfd(), POLLIN, 0};
  ::poll(&ended, 1, deadline.remaining_ms());
  const auto ending = launcher_.reap();
  throw Error("bench", fmt::format("the ranks of '{}' {} ({}). Their own messages are above.",
                                   options_.name, what, ending ? ending->text() : "still running"));
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

void Crew::wait_ready(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  for (int connected = 0; connected < options_.ranks; ++connected) {
    if (!readable(listener_.get(), deadline)) fail("did not connect in time");
    Member member{Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)), {}};
    if (!member.socket) throw SystemError("bench", "cannot accept a rank", errno);
    std::string line;
    while (!take_line(member.unread, line)) {
      if (!readable(member.socket.get(), deadline) ||
          !read_some(member.socket.get(), member.unread))
        fail("did not say who they are");
    }
    int rank = -1;
    if (std::sscanf(line.c_str(), "rank %d", &rank) != 1 || rank < 0 || rank >= options_.ranks)
      fail(fmt::format("said '{}' first", line));
    members_[static_cast<std::size_t>(rank)] = std::move(member);
  }
}

std::string Crew::read_line(std::size_t member, const Deadline& deadline) {
  std::string line;
  auto& [socket, unread] = members_[member];
  while (!take_line(unread, line)) {
    if (!readable(socket.get(), deadline)) fail(fmt::format("gave no answer (rank {})", member));
    if (!read_some(socket.get(), unread)) fail("ended");
  }
  return line;
}

std::vector<std::string> Crew::request(const std::string& line, std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  for (const auto& member : members_) send_line(member.socket.get(), line);
  std::vector<std::string> answers;
  for (std::size_t rank = 0; rank < members_.size(); ++rank)
    answers.push_back(read_line(rank, deadline));
  return answers;
}

void Crew::finish() {
  for (auto& member : members_) member.socket.reset();
  pollfd ended{launcher_.pidfd(), POLLIN, 0};
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  int count;
  do {
    count = ::poll(&ended, 1, deadline.remaining_ms());
  } while (count < 0 && errno == EINTR);
  const auto ending = launcher_.reap();
  if (!ending || !ending->ok())
    throw Error("bench", fmt::format("the ranks of '{}' did not end well ({})", options_.name,
                                     ending ? ending->text() : "still running"));
}

Orders::Orders(const std::string& path, int rank) : socket_(stream_socket()) {
  const sockaddr_un address = address_of(path);
  if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw SystemError("bench", fmt::format("cannot connect to '{}'", path), errno);
  answer(fmt::format("rank {}", rank));
}

// Without a deadline on purpose: the benchmark's death ends the stream.
bool Orders::next(std::string& line) {
  while (!take_line(unread_, line))
    if (!read_some(socket_.get(), unread_)) return false;
  return true;
}

void Orders::answer(const std::string& line) {
  send_line(socket_.get(), line);
}

}  // namespace lockstep::bench
