// A cache of large memory blocks, for callers that ask for the same sizes again and again.
//
//   BlockCache cache;
//   void* block = cache.allocate(bytes);   // undefined contents; nullptr: out of memory
//   cache.deallocate(block);               // idle: the next request of about that size gets it
//
// docs/adr/0007 says why. What the cache holds is bounded three ways. Used and idle
// blocks together are at most a quarter above the recent peak of used ones; a block that has been
// idle for max_idle_time is unmapped (by a thread that exists only while something is idle); and
// where pages are huge, the kernel may reclaim idle blocks at any time (MADV_FREE).
//
// For blocks of megabytes: each has its own pages. Sizes are rounded up by at most an eighth, and
// an idle block serves requests down to four fifths of its size. Thread-safe. The destructor unmaps
// all blocks, including those in use.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

namespace lockstep {

struct BlockCacheOptions {
  std::size_t max_idle_bytes = SIZE_MAX;
  std::chrono::milliseconds max_idle_time{30000};
};

struct BlockCacheStats {
  std::size_t used = 0, idle = 0;  // bytes of blocks
  std::size_t peak = 0;            // peak of `used` since idle blocks were last released
  std::uint64_t mapped = 0;        // blocks obtained from the kernel; all other requests were hits
};

class BlockCache {
 public:
  explicit BlockCache(const BlockCacheOptions& options = {}) : options_(options) {}
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  void* allocate(std::size_t bytes);  // page-aligned
  void deallocate(void* block);       // one that owns() and is in use

  bool owns(const void* block) const;
  void release_idle();  // also resets the peak
  BlockCacheStats stats() const;

  // Called around fork(), so that the child inherits neither a locked mutex nor a lost thread.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  using Clock = std::chrono::steady_clock;
  struct Block {
    void* data = nullptr;
    std::size_t bytes = 0;
    bool in_use = true;
    int slow_marks = 0;  // how often MADV_FREE took as long as it takes for small pages
    Clock::time_point idle_since = {};
  };
  using Blocks = std::list<Block>;

  Blocks::iterator find_idle(std::size_t bytes);
  void* map_new(std::size_t bytes, std::unique_lock<std::mutex>& lock);
  Blocks drop_oldest();
  Blocks drop_to(std::size_t max_idle_bytes);
  void start_trimmer();
  void trim();

  const BlockCacheOptions options_;
  mutable std::mutex mutex_;
  BlockCacheStats stats_;
  // Blocks move between the lists without allocating: a caller may be freeing memory because there
  // is none left.
  Blocks used_, idle_;  // idle: the last deallocated at the end
  std::unordered_map<const void*, Blocks::iterator> by_address_;

  // Unmaps blocks that were idle too long. The thread ends when nothing is idle, and the next
  // deallocate() starts another.
  std::condition_variable stop_;
  bool stopping_ = false, trimming_ = false;
  std::optional<std::thread> trimmer_;
};

}  // namespace lockstep
