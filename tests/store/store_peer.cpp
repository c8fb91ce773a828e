// A rank that uses the store of its run: store_peer MODE.
//   world     a world with an all-reduce, then sleeps until it is ended
//   wait      rank 0 waits for a key that nobody sets; rank 1 kills itself
//   fresh     sets a key and fails; the next attempt looks for it
//   hold      waits until every rank uses the store, then for a key that nobody sets
//   endure    the same, even after SIGTERM
//   values    each rank reads what the others have set, up to the largest value; then times small
//             calls beside large ones
//   parent    uses the store and starts itself as `child`, which says whether it has the channel
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/connect.h"
#include "lockstep/rendezvous/control.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/run.h"

namespace {

void hold_a_world(lockstep::World& world) {
  at::Tensor one = at::ones({4});
  world.all_reduce(one).wait();
  std::printf("ready with %s, sum %g\n", world.backend().c_str(), one[0].item<double>());
  std::this_thread::sleep_for(std::chrono::minutes(10));
}

using StorePtr = c10::intrusive_ptr<c10d::Store>;

void wait_for_all(const StorePtr& store, const std::string& what, int world_size) {
  if (store->add(what, 1) == world_size) store->set(what + ": all", "1");
  store->wait({what + ": all"}, std::chrono::seconds(60));
}

int hold(const StorePtr& store, const lockstep::RankEnv& env) {
  wait_for_all(store, "here", env.world_size);
  std::printf("ready with the store\n");
  std::fflush(stdout);
  try {
    store->wait({"never"}, std::chrono::minutes(2));
  } catch (const std::exception& e) {
    std::printf("rank %d: %s\n", env.rank, e.what());
    std::fflush(stdout);
  }
  return 5;
}

std::vector<std::uint8_t> random_bytes(int rank, std::size_t size) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) << 32 | size);
  std::vector<std::uint8_t> bytes(size);
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::uint8_t>(random()); });
  return bytes;
}

int exchange_values(const StorePtr& store, const lockstep::RankEnv& env) {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{15'999}, std::size_t{16'000},
        std::size_t{16'001}, std::size_t{64} << 10, std::size_t{1'000'003}, std::size_t{8} << 20}) {
    const auto key = [size](int rank) { return std::to_string(rank) + " " + std::to_string(size); };
    store->set(key(env.rank), random_bytes(env.rank, size));
    for (int rank = 0; rank < env.world_size; ++rank) {
      if (store->get(key(rank)) == random_bytes(rank, size)) continue;
      std::printf("%zu bytes of rank %d differ\n", size, rank);
      return 1;
    }
  }
  wait_for_all(store, "compared", env.world_size);

  std::atomic<int> busy = 3;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < busy; ++thread) {
    threads.emplace_back([&, thread] {
      const std::string key = fmt::format("{} of {}", thread, env.rank);
      const auto value = random_bytes(env.rank, std::size_t{8} << 20);
      for (int round = 0; round < 4; ++round) {
        store->set(key, value);
        if (store->get(key) != value) std::printf("a value differs\n");
      }
      --busy;
    });
  }
  std::vector<double> times_ms;
  while (busy > 0) {
    const auto began = std::chrono::steady_clock::now();
    store->add("counter", 1);
    times_ms.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began)
            .count());
  }
  for (std::thread& thread : threads) thread.join();
  std::sort(times_ms.begin(), times_ms.end());
  std::printf("values intact; a small call beside them took %.3f ms, at most %.3f ms\n",
              times_ms[times_ms.size() / 2], times_ms.back());
  return 0;
}

int use_store(const std::string& mode, const lockstep::RankEnv& env) {
  const auto store = lockstep::detail::open_launcher_store(env.store_channel);
  // A rank that learns of a failure while it waits may be slower than the SIGTERM that follows.
  // control.h restores the signal's default action at a failure, so the signal is ignored again
  // after that.
  lockstep::control::Subscription still_ignored;
  if (mode == "endure" || mode == "wait") {
    std::signal(SIGTERM, SIG_IGN);
    still_ignored = lockstep::control::subscribe(
        [](const lockstep::control::PeerFailure&) { std::signal(SIGTERM, SIG_IGN); });
  }
  if (mode == "hold" || mode == "endure") return hold(store, env);
  if (mode == "values") return exchange_values(store, env);
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
    ::raise(SIGKILL);
  }
  store->set("rank 0 is here", "1");
  try {
    store->wait({"never"}, std::chrono::seconds(60));
  } catch (const std::exception& e) {
    std::printf("rank 0: %s\n", e.what());
    std::fflush(stdout);
    return 5;
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
