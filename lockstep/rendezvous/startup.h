// The start-up conversation of a world. Every rank publishes its Handshake in a store that all can
// reach; rank 0 compares them and publishes how it ended, so all ranks continue or all throw the
// same.
//
//   RankInfo place = check_start(store, handshake, {.size = n, .timeout = limit});
#pragma once

#include <chrono>
#include <memory>

#include "lockstep/rendezvous/handshake.h"
#include "lockstep/rendezvous/key_value_store.h"

namespace lockstep::detail {

struct StartupOptions {
  int size = 1;
  bool share_device = false;  // several ranks may use one GPU
  std::chrono::milliseconds timeout{0};
};
using StartupStore = std::shared_ptr<CountingStore>;

// Collective. Returns this rank's place: as it was given, and otherwise counted over hosts. Throws
// UsageError where the ranks contradict each other, TimeoutError naming those that did not come,
// and CommError when the launcher announces a failure meanwhile.
RankInfo check_start(const StartupStore& store, const Handshake& handshake,
                     const StartupOptions& options);

// For a rank that comes only to say why it does not take part (handshake.refusal): returns when the
// others know, or after the timeout.
void report_refusal(const StartupStore& store, const Handshake& handshake,
                    const StartupOptions& options);

}  // namespace lockstep::detail
