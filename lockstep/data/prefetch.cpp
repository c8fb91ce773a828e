#include "lockstep/data/prefetch.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"

namespace lockstep::data {
namespace {

constexpr std::chrono::seconds kStopTime{10};

struct Result {
  Thing thing{};
  std::exception_ptr error{};
};

}  // namespace

struct Prefetcher::Shared {
  struct Worker {
    std::thread thread{};
    bool ended = false;
  };

  std::mutex mutex;
  std::condition_variable to_make;
  std::condition_variable made_one;
  bool stop = false;
  std::uint64_t round = 0;
  std::shared_ptr<const Make> make;
  std::int64_t count = 0;
  std::int64_t begun = 0;  // things that a worker has taken on
  std::int64_t taken = 0;  // things that next() has handed out
  std::int64_t ahead = 1;
  std::vector<std::optional<Result>> ring;  // thing n lies at n modulo its size
  std::vector<Worker> workers;

  bool something_to_make() const { return begun < std::min(count, taken + ahead); }
  std::optional<Result>& place(std::int64_t number) {
    return ring[static_cast<std::size_t>(number % ahead)];
  }
  void drop() {
    ++round;
    make.reset();
    count = begun = taken = 0;
    ring.assign(static_cast<std::size_t>(ahead), std::nullopt);
  }
  void work(std::unique_lock<std::mutex>& lock);
  static void run(const std::shared_ptr<Shared>& shared, std::size_t index);
};

// Makes one thing, with the lock released meanwhile.
void Prefetcher::Shared::work(std::unique_lock<std::mutex>& lock) {
  const std::int64_t number = begun++;
  const std::uint64_t of_round = round;
  std::shared_ptr<const Make> maker = make;
  lock.unlock();
  Result made;
  try {
    made.thing = (*maker)(number);
  } catch (...) {
    made.error = std::current_exception();
  }
  maker.reset();  // before the lock: it may own the dataset
  lock.lock();
  if (of_round != round) {
    lock.unlock();
    made = {};
    lock.lock();
    return;
  }
  place(number) = std::move(made);
  if (number == taken) made_one.notify_all();
}

void Prefetcher::Shared::run(const std::shared_ptr<Shared>& shared, std::size_t index) {
  std::unique_lock lock(shared->mutex);
  while (!shared->stop) {
    if (shared->something_to_make())
      shared->work(lock);
    else
      shared->to_make.wait(lock);
  }
  shared->workers[index].ended = true;
  shared->made_one.notify_all();
}

Prefetcher::Prefetcher(PrefetcherOptions options)
    : options_(options), shared_(std::make_shared<Shared>()) {
  LOCKSTEP_ASSERT(options_.workers >= 1 && options_.ahead >= 1);
  shared_->ahead = options_.ahead;
  shared_->drop();
  const SignalsBlocked blocked;
  const std::lock_guard lock(shared_->mutex);  // workers find their entry when they get it
  shared_->workers.resize(static_cast<std::size_t>(options_.workers));
  for (std::size_t i = 0; i < shared_->workers.size(); ++i) {
    try {
      shared_->workers[i].thread = std::thread(&Shared::run, shared_, i);
    } catch (const std::system_error& error) {
      if (i == 0) throw SystemError("loader", "cannot start a worker thread", error.code().value());
      log::warning("loader", "only {} of {} workers could be started: {}", i, options_.workers,
                   error.what());
      shared_->workers.resize(i);
      break;
    }
    ::pthread_setname_np(shared_->workers[i].thread.native_handle(), "loader");
  }
}

Prefetcher::~Prefetcher() {
  std::unique_lock lock(shared_->mutex);
  shared_->stop = true;
  shared_->drop();
  shared_->to_make.notify_all();
  const auto all_ended = [this] {
    return std::all_of(shared_->workers.begin(), shared_->workers.end(),
                       [](const Shared::Worker& worker) { return worker.ended; });
  };
  shared_->made_one.wait_for(lock, kStopTime, all_ended);
  std::vector<Shared::Worker> workers;
  for (Shared::Worker& worker : shared_->workers)
    workers.push_back({std::move(worker.thread), worker.ended});
  lock.unlock();
  for (Shared::Worker& worker : workers) {
    if (worker.ended) {
      worker.thread.join();
    } else {
      worker.thread.detach();
      log::warning("loader",
                   "a worker has not come back from loading for {} s and is left behind. The "
                   "dataset probably waits for a file or a lock.",
                   kStopTime.count());
    }
  }
}

void Prefetcher::start(std::int64_t count, Make make) {
  const std::lock_guard lock(shared_->mutex);
  shared_->drop();
  shared_->make = std::make_shared<const Make>(std::move(make));
  shared_->count = count;
  shared_->to_make.notify_all();
}

Thing Prefetcher::next(const Deadline& deadline) {
  std::unique_lock lock(shared_->mutex);
  if (shared_->taken >= shared_->count) return nullptr;
  const std::int64_t number = shared_->taken;
  std::optional<Result>& place = shared_->place(number);
  if (!shared_->made_one.wait_until(lock, deadline.time(), [&] { return place.has_value(); })) {
    shared_->drop();
    throw TimeoutError("loader",
                       fmt::format("batch {} was not loaded within {} ms. The dataset probably "
                                   "waits for a file or a lock; raise LoaderOptions::timeout if "
                                   "loading is that slow.",
                                   number, deadline.total().count()),
                       {.operation = "load", .elapsed = deadline.elapsed()});
  }
  const Result made = std::move(*place);
  place.reset();
  ++shared_->taken;
  if (made.error) {
    shared_->drop();
    lock.unlock();
    std::rethrow_exception(made.error);
  }
  shared_->to_make.notify_one();
  return made.thing;
}

void Prefetcher::drop() {
  std::unique_lock lock(shared_->mutex);
  // The items and the function that made them may own much, so they are freed without the lock.
  const auto ring = std::exchange(shared_->ring, {});
  const auto make = std::move(shared_->make);
  shared_->drop();
  lock.unlock();
}

}  // namespace lockstep::data
