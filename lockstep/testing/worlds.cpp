#include "lockstep/testing/worlds.h"

#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/error.h"
#include "lockstep/memory/cpu_cache.h"

namespace lockstep::testing {

namespace {

// What the ranks of one world of threads share.
struct Crew {
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

std::shared_ptr<Crew> run(int size, const std::function<void(World&)>& body,
                          const ThreadOptions& options) {
  cache_cpu_memory();  // as run() does, so that tests see what programs get
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto crew = std::make_shared<Crew>();
  crew->errors.resize(static_cast<std::size_t>(size));
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
        crew->join(world);
        body(world);
      } catch (const std::exception& e) {
        crew->fail(rank, e.what());
      } catch (...) {
        crew->fail(rank, "an exception of unknown type");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return crew;
}

}  // namespace

void run_threads(int size, const std::function<void(World&)>& body, const ThreadOptions& options) {
  const auto crew = run(size, body, options);
  if (crew->first) std::rethrow_exception(crew->first);
}

std::vector<std::string> run_threads_collecting(int size, const std::function<void(World&)>& body,
                                                const ThreadOptions& options) {
  return run(size, body, options)->errors;
}

}  // namespace lockstep::testing
