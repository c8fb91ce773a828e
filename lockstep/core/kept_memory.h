// Memory for those who ask for the same sizes again and again, as every training step does.
//
//   KeptMemory memory;
//   void* block = memory.take(bytes);   // undefined contents; nullptr: the system has no more
//   memory.give_back(block);            // kept for the next one of about that size
//
// The one hard idea: the kernel clears every page that it hands out, and malloc fetches large
// blocks anew each time, which was a sixth of a training step. So what is given back is kept, under
// two promises. Never is more held than a quarter above the most that was in use at one time: what
// has been idle longest goes back first. And where pages are huge, which makes it cheap to say, the
// kernel knows that it may take what is idle when memory runs short.
//
// For blocks of megabytes: each has pages of its own. Sizes are rounded up by an eighth at most,
// and a block that was kept may be a quarter larger than that. Any thread may call. All blocks end
// with it, those in use too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>

namespace lockstep {

class KeptMemory {
 public:
  struct Counts {
    std::size_t used = 0, idle = 0;  // bytes of blocks
    std::size_t peak = 0;            // the most that was used since the last release_idle()
    std::uint64_t fetched = 0;       // blocks from the kernel; all others were used again
  };

  explicit KeptMemory(std::size_t most_idle = SIZE_MAX) : most_idle_(most_idle) {}
  ~KeptMemory();
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  void* take(std::size_t bytes);  // begins a page
  void give_back(void* block);    // one that holds() and was not given back since

  bool holds(const void* block) const;
  void release_idle();  // and forgets the peak
  Counts counts() const;

  // Around fork(), so that the child finds no call half done.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

 private:
  struct Block {
    void* data = nullptr;
    std::size_t bytes = 0;
    bool in_use = true;
    int slow_marks = 0;  // how often telling the kernel took as long as small pages take
  };
  using Blocks = std::list<Block>;

  Blocks::iterator find_idle(std::size_t bytes);
  void* fetch(std::size_t bytes, std::unique_lock<std::mutex>& lock);
  Blocks drop_to(std::size_t most_idle);

  const std::size_t most_idle_;
  mutable std::mutex mutex_;
  Counts counts_;
  // Blocks move between the lists without asking for memory: whoever gives one back may be dealing
  // with the want of it.
  Blocks used_, idle_;  // the last given back at the end
  std::unordered_map<const void*, Blocks::iterator> by_address_;
};

}  // namespace lockstep
