// A program that fails, or starts itself, in the ways run_test.py asks for.
//
//   run_peer throw RANK    that rank throws, the others are in an all-reduce
//   run_peer code N        the body of every rank returns N
//   run_peer three RANK    the body of that rank returns 3, the others are in an all-reduce
//   run_peer agree RANK    that rank's part of an agreement fails with a system error
//   run_peer caught RANK   the same, and every rank catches SystemError and continues
//   run_peer prepare RANK  what that rank needs before the rendezvous is missing
//   run_peer leave RANK    that rank's body returns before the others'
//   run_peer separate N    every rank runs N backward passes of its own
//   run_peer spawn N       spawn() of N ranks, twice, and what the calls returned
//   run_peer spawn-CASE    spawn() in a situation that it must refuse, or that a signal ends
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <lockstep/run.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/control.h"

namespace {

using lockstep::World;

void say(const std::string& line) {
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

void all_reduce(World& world) {
  at::Tensor one = at::ones({4}, at::TensorOptions().device(world.device()));
  world.all_reduce(one).wait();
  say(fmt::format("rank {} of {}: sum {}", world.rank(), world.size(), one[0].item<double>()));
}

[[gnu::noinline]] void fail_deep_inside(const std::string& how) {
  if (how == "throw") throw std::runtime_error("the reason");
  if (how == "usage") throw lockstep::UsageError("peer", "wrong use.");
  if (how == "torch") TORCH_CHECK(false, "a torch error");
  if (how == "number") throw 7;
  if (how == "segv") std::raise(SIGSEGV);
  if (how == "kill") std::raise(SIGKILL);
  if (how == "exit") std::_Exit(3);
  throw std::logic_error("unknown way to fail");
}

volatile std::sig_atomic_t g_asked_to_stop = 0;

// Saves when it is asked to stop, and distinguishes that from the launcher's stop on failure.
void compute() {
  for (int step = 0; step < 6000; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (g_asked_to_stop != 0 && !lockstep::control::failure()) say("saving");
  }
}

int fails(const std::string& how, int who) {
  return lockstep::run([&](World& world) {
    std::signal(SIGTERM, [](int) { g_asked_to_stop = 1; });
    all_reduce(world);
    if (world.rank() == who) fail_deep_inside(how);
    if (std::getenv("PEER_COMPUTES") != nullptr) compute();
    all_reduce(world);
    world.barrier();
    say("not reached");
  });
}

void agree(World& world, int who) {
  agree(world, [&] {
    if (world.rank() == who) throw lockstep::SystemError("peer", "cannot write", ENOSPC);
  });
}

int fails_to_agree(int who) {
  return lockstep::run([&](World& world) { agree(world, who); });
}

int catches(int who) {
  return lockstep::run([&](World& world) {
    try {
      agree(world, who);
    } catch (const lockstep::SystemError& error) {
      say(fmt::format("rank {} caught {}: {}", world.rank(), error.error_number(), error.what()));
    }
    all_reduce(world);
  });
}

int fails_to_prepare(int who) {
  const auto prepare = [who]() -> lockstep::WorldOptions {
    const char* rank = std::getenv("RANK");
    if (std::atoi(rank == nullptr ? "0" : rank) == who)
      throw lockstep::UsageError("peer", "the file is missing.");
    return {};
  };
  return lockstep::run(prepare, [](World& world) { all_reduce(world); });
}

int leaves_early(int who) {
  return lockstep::run([&](World& world) {
    world.all_reduce(at::empty({0})).wait();  // counted, though it moves nothing
    all_reduce(world);
    if (world.rank() != who) all_reduce(world);
  });
}

int returns(int code) {
  return lockstep::run([code](World& world) {
    all_reduce(world);
    return code;
  });
}

int returns_three(int who) {
  return lockstep::run([who](World& world) {
    all_reduce(world);
    if (world.rank() == who) return 3;
    all_reduce(world);
    return 0;
  });
}

// Without a wrapper. PEER_EXCHANGES: and the ranks exchange that many numbers.
int trains_separately(int passes) {
  return lockstep::run([passes](World& world) {
    const at::Tensor weight = at::ones({4}).set_requires_grad(true);
    for (int i = 0; i < passes; ++i) weight.mul(weight).sum().backward();
    if (const char* const numbers = std::getenv("PEER_EXCHANGES"); numbers != nullptr)
      world.all_reduce(at::ones({std::atoi(numbers)})).wait();
    world.barrier();
  });
}

// Joins a stuck thread in a destructor, as a library that waits for its connections may.
struct NeverReturns {
  ~NeverReturns() { std::this_thread::sleep_for(std::chrono::hours(1)); }
};

int hangs_on_exit() {
  static NeverReturns at_static_destruction;
  return lockstep::run([](World& world) {
    all_reduce(world);
    fail_deep_inside("throw");
  });
}

// As gloo does when its peer dies while it sends.
int breaks_a_pipe() {
  return lockstep::run([](World& world) {
    all_reduce(world);
    lockstep::Pipe pipe = lockstep::make_pipe();
    pipe.read.reset();
    const bool got_epipe = ::write(pipe.write.get(), "x", 1) < 0 && errno == EPIPE;
    // Programs that a rank starts must not inherit that.
    const int child = std::system("kill -PIPE $$");
    const bool ends = WIFSIGNALED(child) && WTERMSIG(child) == SIGPIPE;
    say(fmt::format("got EPIPE {}, its child ends {}", got_epipe, ends));
  });
}

int spawns(int nprocs) {
  // Every rank runs this line too, which shows a test that the arguments arrive.
  const auto first = [](World& world) {
    all_reduce(world);
    if (world.rank() == 1 && std::getenv("PEER_FAILS") != nullptr) fail_deep_inside("exit");
  };
  const int code = lockstep::spawn(first, nprocs);
  say(fmt::format("first spawn returned {}", code));
  const int second = lockstep::spawn(
      [code](World& world) { say(fmt::format("second, rank {}, knows {}", world.rank(), code)); },
      2);
  say(fmt::format("second spawn returned {}", second));
  return second;
}

int spawns_inside() {
  return lockstep::spawn(
      [](World&) { lockstep::spawn([](World& world) { all_reduce(world); }, 2); }, 2);
}

// Ranks that only a signal ends. No destructor of a world may be waited for.
int spawns_sleepers() {
  const int code = lockstep::spawn(
      [](World& world) {
        world.barrier();
        say(fmt::format("rank {} sleeps", world.rank()));
        std::this_thread::sleep_for(std::chrono::minutes(10));
      },
      2);
  say(fmt::format("spawn returned {}", code));
  return code;
}

int refuses(const std::string& why) {
  std::atomic<bool> stop{false};
  std::thread other;
  if (why == "spawn-joined") std::thread([] {}).join();
  if (why == "spawn-threads") {
    other = std::thread([&] {
      while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  if (why == "spawn-gone") std::filesystem::remove(std::filesystem::read_symlink("/proc/self/exe"));
  int code = 3;
  try {
    code = lockstep::spawn([](World& world) { all_reduce(world); }, 2);
  } catch (const lockstep::UsageError& e) {
    say(e.what());
  }
  stop = true;
  if (other.joinable()) other.join();
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const std::string mode = args.empty() ? "" : args[0];
  const int number = args.size() > 1 ? std::atoi(args[1].c_str()) : 0;
  if (mode == "code") return returns(number);
  if (mode == "three") return returns_three(number);
  if (mode == "agree") return fails_to_agree(number);
  if (mode == "caught") return catches(number);
  if (mode == "prepare") return fails_to_prepare(number);
  if (mode == "leave") return leaves_early(number);
  if (mode == "separate") return trains_separately(number);
  if (mode == "spawn") return spawns(number);
  if (mode == "spawn-inside") return spawns_inside();
  if (mode == "spawn-sleep") return spawns_sleepers();
  if (mode.starts_with("spawn-")) return refuses(mode);
  if (mode == "hang") return hangs_on_exit();
  if (mode == "pipe") return breaks_a_pipe();
  return fails(mode, number);
}
