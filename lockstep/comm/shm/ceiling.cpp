#include "lockstep/comm/shm/ceiling.h"

#include "lockstep/comm/shm/layout.h"
#include "lockstep/comm/shm/reduce.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {

void sum_own_slice(const Alike& alike, int rank) {
  LOCKSTEP_ASSERT(alike.count >= 1 && alike.count <= kMaxRanks && rank < alike.count);
  const auto ranks = static_cast<std::size_t>(alike.count), own = static_cast<std::size_t>(rank);
  const std::size_t lines = alike.bytes / kLine;
  const std::size_t begin = lines * own / ranks * kLine;
  const std::size_t end = own + 1 == ranks ? alike.bytes : lines * (own + 1) / ranks * kLine;
  const std::byte* inputs[kMaxRanks];
  std::byte* outputs[kMaxRanks];
  for (int i = 0; i < alike.count; ++i) inputs[i] = outputs[i] = alike.arrays[i] + begin;
  combine(DType::kF32, Op::kSum,
          {inputs, alike.count, outputs, alike.count, (end - begin) / sizeof(float)});
}

}  // namespace lockstep::shm
