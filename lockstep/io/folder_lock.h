// A folder in which one process works at a time.
//
// The lock is a kernel flock on a file in the folder, not the existence of that file. It ends with
// the process that holds it, so nothing is left to clean up; only a network file system may keep it
// for a while when a whole host dies, and then deleting the file helps. What the file says is for
// people: who holds the lock.
//
//   const FolderLock lock("out", "run 7", std::chrono::seconds(3));
//   if (!lock.holder().empty()) refuse(lock.holder());     // "pid 4242 on n1 since 2026-11-15 ..."
#pragma once

#include <chrono>
#include <string>

#include "lockstep/core/fd.h"

namespace lockstep::io {

inline constexpr const char* kFolderLockName = ".lockstep.lock";

// UsageError where `path` is a symbolic link: for what a run writes in its folder and somebody else
// could point elsewhere.
void refuse_link(const std::string& path);

// Used by one thread. Owns the lock from construction to its end; a second one on the same folder,
// even in the same process, finds it taken.
class FolderLock {
 public:
  FolderLock() = default;
  // Makes the folder if need be. Where another holds the lock it waits for up to `timeout`: a
  // process that has just been killed needs a moment. `token` names those who may share it: a
  // holder with the same token does not count. Never throws: a file system without locks is a
  // problem() to report, no reason to end.
  FolderLock(const std::string& folder, const std::string& token,
             std::chrono::milliseconds timeout);

  bool held() const { return static_cast<bool>(fd_); }
  const std::string& holder() const { return holder_; }    // somebody else; empty: nobody
  const std::string& problem() const { return problem_; }  // why there is no lock and no holder

 private:
  void sign(const std::string& token);

  Fd fd_;
  std::string holder_;
  std::string problem_;
};

}  // namespace lockstep::io
