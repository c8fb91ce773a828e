#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::child_for_test {
namespace {

std::map<std::string, std::function<int()>>& bodies() {
  static std::map<std::string, std::function<int()>> bodies;
  return bodies;
}

}  // namespace

Registration::Registration(const char* name, std::function<int()> body) {
  bodies().emplace(name, std::move(body));
}

Child::Child(const std::string& name, const std::map<std::string, std::string>& variables,
             const std::vector<int>& keep) {
  std::vector<std::string> environment;
  for (const auto& [key, value] : variables) environment.push_back(key + "=" + value);
  for (const char* key : {"PATH", "ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"}) {
    if (const char* value = std::getenv(key))
      environment.push_back(fmt::format("{}={}", key, value));
  }
  std::vector<char*> envp;
  for (auto& entry : environment) envp.push_back(entry.data());
  envp.push_back(nullptr);
  Pipe pipe = make_pipe();
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(pipe.write.get(), STDOUT_FILENO);
    ::dup2(pipe.write.get(), STDERR_FILENO);
    for (const int fd : keep) ::fcntl(fd, F_SETFD, 0);
    const std::string argument = "--child=" + name;
    ::execle("/proc/self/exe", "rank_test", argument.c_str(), nullptr, envp.data());
    ::_exit(127);
  }
  out_ = std::move(pipe.read);
}

Child::~Child() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

bool Child::read_some(int timeout_ms) {
  pollfd poll_fd{out_.get(), POLLIN, 0};
  if (::poll(&poll_fd, 1, timeout_ms) <= 0) return false;
  char buffer[4096];
  const ssize_t n = ::read(out_.get(), buffer, sizeof buffer);
  if (n > 0) output_.append(buffer, static_cast<std::size_t>(n));
  return n > 0;
}

bool Child::says(const std::string& text, std::chrono::seconds limit) {
  const Deadline deadline = Deadline::after(limit);
  while (output_.find(text) == std::string::npos) {
    if (!read_some(deadline.remaining_ms())) return output_.find(text) != std::string::npos;
  }
  return true;
}

int Child::wait(std::chrono::seconds limit) {
  const Deadline deadline = Deadline::after(limit);
  while (read_some(deadline.remaining_ms())) {
  }
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (deadline.expired()) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &status, 0);
      pid_ = -1;
      return -1000;
    }
    ::usleep(2000);
  }
  pid_ = -1;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int run_requested_child(int argc, char** argv) {
  const std::string prefix = "--child=";
  if (argc != 2 || std::string(argv[1]).rfind(prefix, 0) != 0) return -1;
  const auto found = bodies().find(argv[1] + prefix.size());
  return found == bodies().end() ? 126 : found->second();
}

}  // namespace lockstep::child_for_test

int main(int argc, char** argv) {
  const int code = lockstep::child_for_test::run_requested_child(argc, argv);
  if (code >= 0) return code;
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
