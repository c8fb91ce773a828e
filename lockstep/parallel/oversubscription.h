// Whether ranks of one host fill its cores, so that work beside the backward pass would only take
// them away from it.
//
// One rank's affinity mask says little alone. Ranks that are each bound to a core of their own may
// use one each and fill nothing; ranks that may all use the same sixteen share them. So the cores
// that any rank may use are counted, over all of them.
//
//   const int cores = cores_of_ranks(world);
//   const bool overlap = !oversubscribed(world.local_size(), at::get_num_threads(), cores);
#pragma once

#include "lockstep/comm/world.h"

namespace lockstep::parallel {

// Collective, for worlds of one host: cores that one or more of the ranks may use (affinity), and
// no more than the quota of their control groups pays for.
int cores_of_ranks(World& world);

constexpr bool oversubscribed(int ranks, int threads, int cores) {
  return ranks * threads >= cores;
}

}  // namespace lockstep::parallel
