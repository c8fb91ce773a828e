#include "lockstep/testing/worlds.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <mutex>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/memory/cpu_cache.h"

namespace lockstep::testing {
namespace {

// What the ranks of one world of threads share.
struct WorldOfThreads {
  std::mutex mutex;
  std::vector<World> worlds;
  std::vector<std::string> errors;
  std::exception_ptr first;
  bool aborted = false;

  void join(const World& world) {
    const std::lock_guard lock(mutex);
    worlds.push_back(world);
    if (aborted) worlds.back().abort("another rank of the test failed");
  }

  void fail(int rank, const char* what) {
    const std::lock_guard lock(mutex);
    errors[static_cast<std::size_t>(rank)] = what;
    if (!first) first = std::current_exception();
    aborted = true;
    for (auto& world : worlds)
      world.abort(fmt::format("rank {} of the test failed: {}", rank, what));
  }
};

std::shared_ptr<WorldOfThreads> run(int size, const std::function<void(World&)>& body,
                                    const ThreadOptions& options) {
  cache_cpu_memory();  // as run() does, so that tests see what programs get
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto shared = std::make_shared<WorldOfThreads>();
  shared->errors.resize(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([=, &body, &options] {
      Identity identity{.rank = rank, .size = size, .local_rank = rank, .local_size = size};
      WorldOptions world_options = options.world;
      if (!world_options.device) world_options.device = c10::Device(c10::kCPU);
      if (options.adjust) options.adjust(identity, world_options);
      try {
        World world = size == 1 && world_options.backend == "auto"
                          ? World()
                          : connect(store, identity, world_options);
        shared->join(world);
        body(world);
      } catch (const std::exception& e) {
        shared->fail(rank, e.what());
      } catch (...) {
        shared->fail(rank, "an exception of unknown type");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return shared;
}

}  // namespace

void run_threads(int size, const std::function<void(World&)>& body, const ThreadOptions& options) {
  const auto shared = run(size, body, options);
  if (shared->first) std::rethrow_exception(shared->first);
}

void run_on_mesh(const std::vector<MeshAxis>& axes, const std::function<void(const Mesh&)>& body,
                 const ThreadOptions& options) {
  int ranks = 1;
  for (const MeshAxis& axis : axes) ranks *= axis.size;
  run_threads(ranks, [&](World& world) { body(Mesh(world, axes)); }, options);
}

std::vector<std::string> run_threads_collecting(int size, const std::function<void(World&)>& body,
                                                const ThreadOptions& options) {
  return run(size, body, options)->errors;
}

namespace {

::testing::AssertionResult same_kind(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) {
    if (a.defined() == b.defined()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "one tensor is undefined";
  }
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) {
    return ::testing::AssertionFailure()
           << c10::toString(a.scalar_type()) << " " << a.sizes() << " against "
           << c10::toString(b.scalar_type()) << " " << b.sizes();
  }
  return ::testing::AssertionSuccess();
}

// Says where the first difference is: `bad` marks them, flat.
::testing::AssertionResult first_difference(const at::Tensor& a, const at::Tensor& b,
                                            const at::Tensor& bad) {
  const at::Tensor where = bad.reshape({-1}).nonzero();
  const int64_t index = where[0].item<int64_t>();
  std::ostringstream text;
  text << where.size(0) << " of " << a.numel() << " elements differ, first at flat index " << index
       << ": " << a.reshape({-1})[index].item() << " against " << b.reshape({-1})[index].item();
  return ::testing::AssertionFailure() << text.str();
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.detach().cpu().contiguous();
}

}  // namespace

::testing::AssertionResult tensors_equal(const at::Tensor& a, const at::Tensor& b) {
  const auto kind = same_kind(a, b);
  if (!kind || !a.defined()) return kind;
  const at::Tensor x = on_host(a), y = on_host(b);
  if (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0)
    return ::testing::AssertionSuccess();
  const at::Tensor rows = x.reshape({-1, 1}).view(at::kByte).ne(y.reshape({-1, 1}).view(at::kByte));
  return first_difference(x, y, rows.any(1));
}

::testing::AssertionResult tensors_near(const at::Tensor& a, const at::Tensor& b,
                                        double tolerance) {
  const auto kind = same_kind(a, b);
  if (!kind || !a.defined()) return kind;
  const at::Tensor x = on_host(a), y = on_host(b);
  const auto wide = x.is_complex() ? at::kComplexDouble : at::kDouble;
  // Written so that a NaN on either side counts as a difference.
  const at::Tensor bad = x.to(wide).sub(y.to(wide)).abs().le(tolerance).logical_not();
  if (!bad.any().item<bool>()) return ::testing::AssertionSuccess();
  return first_difference(x, y, bad);
}

// ---------------------------------------------------------------- processes

namespace {

constexpr const char* kChosen = "LOCKSTEP_TEST_RANK_OF";

// Variables of a launcher around the test must not reach the ranks.
constexpr const char* kForeign[] = {"RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "LOCAL_WORLD_SIZE",
                                    "GROUP_RANK",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "LOCKSTEP_STORE_CHANNEL",
                                    "LOCKSTEP_CONTROL_FD",
                                    "LOCKSTEP_RUN",
                                    "TORCHELASTIC_RUN_ID",
                                    "TORCHELASTIC_USE_AGENT_STORE",
                                    "TORCHELASTIC_RESTART_COUNT",
                                    "TORCHELASTIC_ERROR_FILE"};

struct Port {
  Fd fd;
  int number = 0;
};

// A port that is bound and not listened on: no other program gets it, and rank 0 may bind it too.
Port hold_port() {
  Port port{Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), 0};
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  if (!port.fd || ::setsockopt(port.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(port.fd.get(), raw, length) != 0 || ::getsockname(port.fd.get(), raw, &length) != 0) {
    throw SystemError("testing", "cannot bind a port of the loopback interface", errno);
  }
  port.number = ntohs(address.sin_port);
  return port;
}

struct Child {
  pid_t pid = -1;
  Fd output;
  // Both ends: a message to a rank that has just ended must not be a broken pipe.
  Pipe control;
  bool ended = false;
};

// What a rank runs: the command, or the body in a fork of this process.
struct Task {
  std::vector<std::string> command;
  std::function<void()> body = {};
};

// A fork has the other ranks' pipes too, which a program would not have.
void close_as_exec_would() {
  std::vector<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    found.push_back(std::atoi(entry.path().filename().c_str()));
  for (const int fd : found) {
    const int flags = ::fcntl(fd, F_GETFD);  // the directory's own is closed by now
    if (flags >= 0 && (flags & FD_CLOEXEC) != 0) ::close(fd);
  }
}

bool has_one_thread() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks)) == 1;
}

// Failed EXPECTs of the running test so far. Calls that this rank skips leave some behind.
int failed_parts() {
  const auto* result = ::testing::UnitTest::GetInstance()->current_test_info()->result();
  int failed = 0;
  for (int i = 0; i < result->total_part_count(); ++i)
    failed += result->GetTestPartResult(i).failed() ? 1 : 0;
  return failed;
}

[[noreturn]] void be_a_rank(const std::function<void()>& body) {
  int code = 0;
  const int before = failed_parts();
  try {
    body();
    if (failed_parts() > before) code = 1;
  } catch (const UsageError& e) {
    std::cerr << e.what() << std::endl;
    code = 2;
  } catch (const std::exception& e) {
    std::cerr << e.what() << std::endl;
    code = 1;
  } catch (...) {  // a fork must not continue as a second test program
    std::cerr << "an exception of unknown type" << std::endl;
    code = 1;
  }
  std::cout.flush();
  std::fflush(nullptr);
  // Threads of a world that failed are left behind on purpose; exit handlers would race with them.
  std::_Exit(code);
}

class Ranks : public RunningRanks {
 public:
  explicit Ranks(int size)
      : results_(static_cast<std::size_t>(size)), children_(static_cast<std::size_t>(size)) {}

  void start(int rank, const Task& task, const Variables& variables) {
    Child& child = at(rank);
    Pipe output = make_pipe();
    Pipe control = make_pipe();
    const pid_t parent = ::getpid();
    std::cout.flush();
    std::fflush(nullptr);  // a fork must not print again what is still in a buffer
    child.pid = ::fork();
    if (child.pid < 0) throw SystemError("testing", "cannot start a rank", errno);
    if (child.pid == 0) become(task, variables, {output.write.get(), control.read.get(), parent});
    child.output = std::move(output.read);
    child.control = std::move(control);
    set_nonblocking(child.output.get());
  }

  void kill(int rank, int signal) override {
    const std::lock_guard lock(mutex_);
    if (!at(rank).ended) ::kill(at(rank).pid, signal);
  }

  void announce_failure(int rank, const std::string& cause) override {
    const std::lock_guard lock(mutex_);
    const std::string line = fmt::format(
        "{{\"failed\": {{\"rank\": {}, \"host\": \"here\", \"cause\": \"{}\"}}}}\n", rank, cause);
    for (auto& child : children_) {
      if (!child.ended) write_all(child.control.write.get(), line);
    }
  }

  bool wait_for(int rank, const std::string& text, std::chrono::milliseconds limit) override {
    const auto deadline = Deadline::after(limit);
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        if (result(rank).output.find(text) != std::string::npos) return true;
        if (at(rank).ended || deadline.expired()) return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  // Reads outputs and collects exits until all ranks are gone; kills what the deadline leaves.
  std::vector<RankResult> finish(const Deadline& deadline) {
    for (std::size_t left = children_.size(); left > 0;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const std::lock_guard lock(mutex_);
      left = 0;
      for (int rank = 0; rank < static_cast<int>(children_.size()); ++rank) {
        Child& child = at(rank);
        drain(rank);
        if (child.ended) continue;
        int status = 0;
        if (::waitpid(child.pid, &status, WNOHANG) == child.pid) {
          child.ended = true;
          if (WIFEXITED(status)) result(rank).exit_code = WEXITSTATUS(status);
          if (WIFSIGNALED(status)) result(rank).signal = WTERMSIG(status);
          drain(rank);
        } else {
          ++left;
          if (!deadline.expired()) continue;
          result(rank).timed_out = true;
          ::kill(child.pid, SIGKILL);
        }
      }
    }
    return results_;
  }

 private:
  struct Inherit {
    int output, control;
    pid_t parent;
  };

  // Runs after fork, and before exec unless there is a body, so it makes only a few calls.
  [[noreturn]] static void become(const Task& task, const Variables& variables,
                                  const Inherit& inherit) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != inherit.parent) ::_exit(127);
    ::dup2(inherit.output, 1);
    ::dup2(inherit.output, 2);
    for (const char* name : kForeign) ::unsetenv(name);
    for (const auto& [name, value] : variables) {
      if (value.empty()) {
        ::unsetenv(name.c_str());
      } else {
        ::setenv(name.c_str(), value.c_str(), 1);
      }
    }
    if (variables.contains("LOCKSTEP_CONTROL_FD")) {
      ::setenv("LOCKSTEP_CONTROL_FD", std::to_string(inherit.control).c_str(), 1);
      ::fcntl(inherit.control, F_SETFD, 0);
    }
    if (task.body) {
      be_a_rank([&] {
        close_as_exec_would();
        task.body();
      });
    }
    std::vector<char*> argv;
    for (const auto& word : task.command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }

  void drain(int rank) {
    char buffer[1 << 14];
    for (;;) {
      const ssize_t n = ::read(at(rank).output.get(), buffer, sizeof buffer);
      if (n <= 0) return;
      result(rank).output.append(buffer, static_cast<std::size_t>(n));
    }
  }

  Child& at(int rank) { return children_[static_cast<std::size_t>(rank)]; }
  RankResult& result(int rank) { return results_[static_cast<std::size_t>(rank)]; }

  std::mutex mutex_;
  std::vector<RankResult> results_;
  std::vector<Child> children_;
};

// Identifies this run_processes call of this test: ranks skip the others.
std::string next_call() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  if (test == nullptr) throw UsageError("testing", "run_processes: only inside a test.");
  static std::atomic<int> calls{0};
  static std::string last;
  const std::string name = fmt::format("{}.{}", test->test_suite_name(), test->name());
  if (name != last) {
    last = name;
    calls = 0;
  }
  return fmt::format("{}#{}", name, calls++);
}

std::vector<RankResult> run_task(int size, const Task& task, const ProcessOptions& options) {
  const Port port = hold_port();
  if (options.port_is_taken) ::listen(port.fd.get(), 1);
  Ranks ranks(size);
  const Deadline deadline = Deadline::after(options.timeout);
  for (int rank = 0; rank < size; ++rank) {
    Variables variables{
        {"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(size)},
        {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(size)},
        {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", std::to_string(port.number)}};
    if (options.control) variables["LOCKSTEP_CONTROL_FD"] = "given";
    for (const auto& [name, value] : options.env) variables[name] = value;
    if (options.rank_env) {
      for (const auto& [name, value] : options.rank_env(rank)) variables[name] = value;
    }
    ranks.start(rank, task, variables);
  }
  std::thread meanwhile;
  if (options.meanwhile) meanwhile = std::thread([&] { options.meanwhile(ranks); });
  auto results = ranks.finish(deadline);
  if (meanwhile.joinable()) meanwhile.join();
  return results;
}

}  // namespace

std::vector<RankResult> run_program(int size, const std::vector<std::string>& command,
                                    const ProcessOptions& options) {
  return run_task(size, {command}, options);
}

std::vector<RankResult> run_bare_processes(int size, const std::function<void()>& body,
                                           const ProcessOptions& options) {
  const std::string call = next_call();
  if (const auto chosen = env::get(kChosen)) {
    if (*chosen != call) return std::vector<RankResult>(static_cast<std::size_t>(size));
    be_a_rank(body);
  }
  // The control descriptor is looked for when a program starts.
  if (!options.control && has_one_thread()) return run_task(size, {{}, body}, options);
  ProcessOptions with_choice = options;
  with_choice.env[kChosen] = call;
  const std::string filter = "--gtest_filter=" + call.substr(0, call.find('#'));
  return run_program(size, {"/proc/self/exe", filter, "--gtest_brief=1"}, with_choice);
}

std::vector<RankResult> run_processes(int size, const std::function<void(World&)>& body,
                                      const ProcessOptions& options) {
  return run_bare_processes(
      size,
      [&] {
        World world = World::from_env();
        body(world);
        world.finish();
      },
      options);
}

}  // namespace lockstep::testing
