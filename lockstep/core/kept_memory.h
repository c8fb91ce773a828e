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
// For blocks of megabytes: each has pages of its own. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace lockstep {

class KeptMemory {
 public:
  struct Counts {
    std::size_t used = 0, idle = 0;  // bytes held, with what sizes were rounded up by
    std::size_t peak = 0;            // the most that was ever used
    std::uint64_t fetched = 0;       // blocks from the kernel, the others were used again
  };

  explicit KeptMemory(std::size_t most_idle = SIZE_MAX) : most_idle_(most_idle) {}
  ~KeptMemory();
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  void* take(std::size_t bytes);  // begins a page
  void give_back(void* block);    // one that holds() and was not given back since

  bool holds(const void* block) const;

  void release_idle();
  Counts counts() const;

  // Around fork(), so that the child finds no call half done.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

 private:
  struct Block {
    std::size_t bytes = 0;
    std::uint64_t idle_since = 0;  // its key in idle_, 0 while it is in use
  };

  void* fetch(std::size_t bytes);
  void drop_oldest();

  const std::size_t most_idle_;
  mutable std::mutex mutex_;
  Counts counts_;
  std::uint64_t returns_ = 0;  // tells who has been idle longer
  std::unordered_map<const void*, Block> blocks_;
  std::map<std::size_t, std::vector<void*>> by_size_;  // idle ones, the last that was used last
  std::map<std::uint64_t, void*> idle_;                // the same, oldest first
};

}  // namespace lockstep
