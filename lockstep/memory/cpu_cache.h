// Caching of large CPU tensors' memory, so that the kernel does not clear fresh pages for the same
// tensors in every training step. Process-wide and off until it is switched on: run() and spawn()
// do that for their ranks; any other program calls one function.
//
//   lockstep::cache_cpu_memory();    // in main(), before other threads make tensors
//   lockstep::empty_cpu_cache();     // after a spike, as torch.cuda.empty_cache()
//
// Tensors of 1 MiB and more come from a BlockCache (block_cache.h says what it holds at most and
// for how long); smaller ones from LibTorch's own allocator. LOCKSTEP_CPU_CACHE_MAX_BYTES bounds
// what is idle, and 0 disables caching. A program that has set an allocator of its own keeps that
// one.
//
// Gradients in place: with the cache, cache_cpu_memory() installs in-place gradient allocation
// (inplace_gradients.h), which DistributedDataParallel uses where it is there.
//
// Any thread may call. The allocator stays installed, so tensors may outlive everything.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

// True when caching is on: switched on now or before. UsageError where an environment variable is
// not a number of bytes.
bool cache_cpu_memory();
bool is_cpu_memory_cached();

struct CpuCacheStats {
  std::size_t used = 0, idle = 0;  // bytes of blocks
  std::size_t peak = 0;            // peak of `used` since idle blocks were last released
  std::uint64_t mapped = 0;        // blocks obtained from the kernel; all other requests were hits
};

void empty_cpu_cache();           // unmaps what is idle
CpuCacheStats cpu_cache_stats();  // zeros when caching is off

}  // namespace lockstep
