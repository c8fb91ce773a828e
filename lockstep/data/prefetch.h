// Threads that make numbered things, in order, ahead of the thread that takes them. Without torch,
// so that the thread sanitizer sees it; the loader's things are batches.
//
// A round can be dropped at any moment. What a worker is still making then no longer belongs to any
// round and is thrown away when it is done; nobody waits for it.
//
//   Prefetcher prefetcher{{.workers = 2, .ahead = 4}};
//   prefetcher.start(100, [](std::int64_t number) { return std::make_shared<Batch>(...); });
//   while (auto thing = prefetcher.next(deadline)) use(thing);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "lockstep/core/deadline.h"

namespace lockstep::data {

using Thing = std::shared_ptr<void>;
using Make = std::function<Thing(std::int64_t number)>;

struct PrefetcherOptions {
  int workers = 1;
  std::int64_t ahead = 2;  // how many may be made, or in the making, before they are taken
};

// Used by one thread. `make` runs on the workers, several at a time. Workers sleep between rounds.
class Prefetcher {
 public:
  explicit Prefetcher(PrefetcherOptions options);
  // Stops the workers. One that does not come back from `make` within 10 s is left behind, with a
  // warning; everything it can touch stays alive.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Begins a round of `count` things, and drops the one before.
  void start(std::int64_t count, Make make);
  // The next thing; nullptr after the last. Rethrows what `make` threw, when it is that thing's
  // turn, and throws TimeoutError with its number at the deadline; both drop the round.
  Thing next(const Deadline& deadline);
  void drop();

 private:
  struct Shared;
  PrefetcherOptions options_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep::data
