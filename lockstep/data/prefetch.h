// Worker threads that make numbered items in order, ahead of their consumer. Without torch, so that
// the thread sanitizer can check it; the loader's items are batches.
//
// A round can be dropped at any moment. An item still in the making then belongs to no round and is
// discarded when it is done; no thread waits for it.
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
  std::int64_t ahead = 2;  // maximum of items made, or in the making, that were not taken yet
};

// Used by one thread. `make` runs on the workers, several at a time. Workers sleep between rounds.
class Prefetcher {
 public:
  explicit Prefetcher(PrefetcherOptions options);
  // Stops the workers. A worker that does not return from `make` within 10 s is abandoned, with a
  // warning; everything it can access stays alive.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Begins a round of `count` items, and drops the previous one.
  void start(std::int64_t count, Make make);
  // The next item; nullptr after the last. Rethrows an exception of `make` at its item's turn, and
  // throws TimeoutError with the item's number at the deadline; both drop the round.
  Thing next(const Deadline& deadline);
  void drop();

 private:
  struct Shared;
  PrefetcherOptions options_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep::data
