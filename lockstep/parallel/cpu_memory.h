// Lets large CPU tensors lie where those of the last step lay, so that the kernel need not clear
// fresh pages for them in every step.
//
//   DistributedDataParallel model{net, world};   // on the CPU: calls keep()
//   CpuMemory::release_idle();                   // after a spike, as torch.cuda.empty_cache()
//
// Tensors of a megabyte and more get their memory from a KeptMemory, which says how much it holds
// at most; smaller ones from malloc, as ever. LOCKSTEP_KEPT_MEMORY_BYTES bounds what lies idle, and
// 0 switches it off. A program that has set an allocator of its own keeps that one.
//
// Any thread may call; keep() first, before other threads make tensors. The allocator stays for
// good, so tensors may outlive everything.
#pragma once

#include "lockstep/core/kept_memory.h"

namespace lockstep {

class CpuMemory {
 public:
  static void check_environment();     // UsageError where the variable is no number of bytes
  static void keep();                  // for the process; more than once is once
  static bool is_kept();               // not when it is switched off
  static void release_idle();          // and forgets how much was in use at most
  static KeptMemory::Counts counts();  // zeros when nothing is kept
};

}  // namespace lockstep
