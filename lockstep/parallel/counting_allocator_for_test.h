// CountingAllocator: how much memory each rank holds, where ranks are threads of a test.
//
//   CountingAllocator allocator;                     // until its end, for tensors on the CPU
//   this_rank = std::make_shared<Count>();           // on the thread of each rank
//   this_rank->live, this_rank->peak                 // bytes, freed on whichever thread
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace lockstep::testing {

// What ranks, which are threads here, have allocated and nobody has freed, on whichever thread.
struct Count {
  void add(std::int64_t bytes) {
    const std::int64_t now = live += bytes;
    std::int64_t most = peak;
    while (now > most && !peak.compare_exchange_weak(most, now)) {
    }
  }
  std::atomic<std::int64_t> live{0}, peak{0};
};
inline thread_local std::shared_ptr<Count> this_rank;

class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() { c10::SetCPUAllocator(this, kPriority); }
  ~CountingAllocator() override { c10::SetCPUAllocator(base_, kPriority); }
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr memory = base_->allocate(bytes);
    if (!this_rank) return memory;
    void* const data = memory.get();
    auto* const block = new Block{std::move(memory), static_cast<std::int64_t>(bytes), this_rank};
    block->count->add(block->bytes);
    return {data, block, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  static constexpr std::uint8_t kPriority = 100;
  struct Block {
    c10::DataPtr memory;
    std::int64_t bytes;
    std::shared_ptr<Count> count;
  };
  static void release(void* context) {
    auto* const block = static_cast<Block*>(context);
    block->count->live -= block->bytes;
    delete block;
  }
  c10::Allocator* base_ = c10::GetCPUAllocator();
};

}  // namespace lockstep::testing
