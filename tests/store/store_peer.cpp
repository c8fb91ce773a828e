// A rank that uses the store of its run: store_peer MODE.
//   world     a world with an all-reduce, then sleeps until it is ended
//   wait      rank 0 waits for a key that nobody sets; rank 1 kills itself
//   deadline  rank 0 waits 300 ms for such a key
//   fresh     sets a key and fails; the next attempt looks for it
//   parent    uses the store and starts itself as `child`, which says whether it has the channel
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "lockstep/comm/launcher_store.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/lockstep.h"

namespace {

void hold_a_world(lockstep::World& world) {
  at::Tensor one = at::ones({4});
  world.all_reduce(one).wait();
  std::printf("ready with %s, sum %g\n", world.backend().c_str(), one[0].item<double>());
  std::this_thread::sleep_for(std::chrono::minutes(10));
}

int use_store(const std::string& mode, const lockstep::RankEnv& env) {
  const auto store = lockstep::detail::open_launcher_store(env.store_channel);
  if (mode == "fresh") {
    if (env.rank != 0) return 0;
    std::printf("attempt %d finds the key: %s\n", env.attempt,
                store->check({"left by an attempt"}) ? "yes" : "no");
    store->set("left by an attempt", "1");
    return env.attempt == 0 ? 7 : 0;
  }
  if (env.rank == 1) {
    store->wait({"rank 0 is here"});
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (mode == "wait") ::raise(SIGKILL);
    return 0;
  }
  store->set("rank 0 is here", "1");
  const auto limit = std::chrono::milliseconds(mode == "wait" ? 60'000 : 300);
  try {
    store->wait({"never"}, limit);
  } catch (const std::exception& e) {
    std::printf("rank 0: %s\n", e.what());
    std::fflush(stdout);
    return mode == "wait" ? 5 : 0;
  }
  return 6;
}

}  // namespace

int main(int, char** argv) {
  const std::string mode = argv[1];
  if (mode == "world") return lockstep::run(hold_a_world);
  const lockstep::RankEnv env = lockstep::read_rank_env();
  std::printf("channel %s\n", env.store_channel >= 0 ? "there" : "not there");
  std::fflush(stdout);
  if (mode == "child") return 0;
  if (mode == "parent") {
    const auto store = lockstep::detail::open_launcher_store(env.store_channel);
    return std::system((std::string(argv[0]) + " child").c_str());
  }
  return use_store(mode, env);
}
