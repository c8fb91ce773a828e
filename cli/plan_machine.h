// The devices and links that `lockstep plan` counts with: those that were named, or this machine's.
//
//   const Here here = devices_here("4xH100-80GB");      // "": what is found here
//   plan::Cluster cluster = cluster_of("nvlink+ib400", 8, here);
//
// Functions without state; call from any thread.
#pragma once

#include <string>

#include "observe/plan/cards.h"
#include "observe/plan/scaling.h"

namespace lockstep::cli {

struct Here {
  plan::Devices devices;
  std::string name;  // of this machine's devices; empty: they were named, and may be elsewhere
};

// What the text of --gpus names. UsageError for a card that is not known.
Here devices_here(const std::string& gpus);
// The text of --link, or where it is empty what was measured here, or what is usual for the card.
plan::Cluster cluster_of(const std::string& link, int per_node, const Here& here);

}  // namespace lockstep::cli
