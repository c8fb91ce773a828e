// Lets large CPU tensors lie where those of the last step lay, so that the kernel need not clear
// fresh pages for them in every step.
//
//   DistributedDataParallel model{net, world};   // on the CPU: switches it on for the process
//   CpuMemory::release_idle();                   // gives back what is kept, as before an
//   evaluation
//
// Tensors of a megabyte and more get their memory from a KeptMemory, which says how much it holds
// at most; smaller ones from malloc, as ever. LOCKSTEP_KEPT_MEMORY_BYTES bounds what lies idle, and
// 0 switches it off. A program that has set an allocator of its own keeps that one.
//
// Any thread may call. Tensors may outlive everything here: nothing is ever taken away again.
#pragma once

#include "lockstep/core/kept_memory.h"

namespace lockstep {

class CpuMemory {
 public:
  static void check_environment();  // UsageError where the variable is no number of bytes
  static void keep();
  static bool is_kept();
  static void release_idle();
  static KeptMemory::Counts counts();
};

}  // namespace lockstep
