// Caching of memory for large CPU tensors, and creation of gradients directly in buckets.
//
// With the cache the kernel does not clear fresh pages for the same tensors in every training step.
// It is process-wide and off until it is switched on: run() and spawn() do that for their ranks;
// any other program calls one function.
//
//   lockstep::cache_cpu_memory();    // in main(), before other threads make tensors
//   lockstep::empty_cpu_cache();     // after a spike, as torch.cuda.empty_cache()
//
// Tensors of 1 MiB and more come from a BlockCache (block_cache.h says what it holds at most and
// for how long); smaller ones from LibTorch's own allocator. LOCKSTEP_CPU_CACHE_MAX_BYTES bounds
// what is idle, and 0 disables caching. A program that has set an allocator of its own keeps that
// one.
//
// cache_cpu_memory() also installs in-place gradient allocation (InplaceGradients), which
// DistributedDataParallel uses if it is installed.
//
// Any thread may call. The allocator stays installed, so tensors may outlive everything.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace lockstep {

// True when caching is on, whether since this call or before. UsageError where an environment
// variable is not a number of bytes.
bool cache_cpu_memory();
bool is_cpu_memory_cached();

struct CpuCacheStats {
  std::size_t used = 0, idle = 0;  // bytes of blocks
  std::size_t peak = 0;            // peak of `used` since idle blocks were last released
  std::uint64_t mapped = 0;        // blocks obtained from the kernel; all other requests were hits
};

void empty_cpu_cache();           // unmaps what is idle
CpuCacheStats cpu_cache_stats();  // zeros when caching is off

namespace detail {

// In-place gradient allocation: lets autograd create large CPU gradients directly in the slots of
// the reducer's buckets, so that nothing has to copy them there. Off until enable().
//
//   InplaceGradients::offer(parameter, owner, [] { return slot; });  // called during backward
//   loss.backward();                     // parameter.grad() may lie in the slot's memory
//   InplaceGradients::withdraw(owner);
//
// docs/adr/0006 says how an allocation is recognised as a gradient's. Correctness does not depend
// on it: a gradient created elsewhere is copied as usual, and a temporary that got the slot is
// freed before the gradient arrives. A writer to a slot calls in_use() first all the same.
//
// Any thread may call. enable() installs an allocator for the process, which stays.
class InplaceGradients {
 public:
  // Where the parameter's next gradient should lie, or an undefined tensor.
  using Slot = std::function<at::Tensor()>;

  // UsageError where LOCKSTEP_GRAD_INPLACE_MIN_BYTES is not a number; 0 there leaves it off.
  static void enable();
  static bool is_enabled();

  static void offer(const at::Tensor& parameter, const void* owner, Slot slot);
  static void withdraw(const void* owner);

  static bool in_use(const at::Tensor& slot);  // whether a tensor uses it now

  static std::size_t offered();   // parameters
  static std::uint64_t served();  // gradients placed since the process began
  // Gradients of at least this size are placed; for tests. Returns the old value.
  static std::size_t set_min_bytes(std::size_t bytes);
};

}  // namespace detail
}  // namespace lockstep
