#include "lockstep/testing/worlds.h"

#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/error.h"
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

}  // namespace lockstep::testing
