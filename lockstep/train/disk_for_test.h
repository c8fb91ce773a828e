// A disk that is full, broken or slow for chosen files: takes the place of the C library's fsync in
// a test program that has disk_for_test.cpp among its sources.
//
//   disk().fails_for = "/checkpoint-2.";    // ENOSPC, or what `error` says
//   ...
//   disk().fails_for = nullptr;
//
// Checkpoints are written under a temporary name, so a part of a path chooses,
// and what is chosen fails where every writer asks whether its bytes are safe. Everything else is
// safe at once: nobody pulls the plug on a test, and a real fsync would take most of its time. Any
// thread may ask.
#pragma once

#include <atomic>
#include <cerrno>

namespace lockstep::train {

struct DiskForTest {
  std::atomic<const char*> fails_for{nullptr};
  std::atomic<int> error{ENOSPC};
  std::atomic<const char*> slow_for{nullptr};  // once: cleared when it has been slow
  std::atomic<int> slow_ms{0};                 // 0 ends what is slow now
  std::atomic<int> slow_now{0};
};

DiskForTest& disk();

}  // namespace lockstep::train
