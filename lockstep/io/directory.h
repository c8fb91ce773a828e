// Atomically created directories (AtomicDir), numbered series of them such as checkpoint-100
// (newest_valid, retain), and a lock that lets one process at a time work in a folder
// (FolderLock).
//
// AtomicDir: the name is the commit. Files are written and fsynced under <name>.tmp-<pid>-<random>,
// then the manifest, then the directory; one rename makes it visible, and an fsync of the parent
// makes the rename last. A process that dies at any point leaves either no <name> or a complete
// one. The writer holds a lock on its temporary directory, so sweep() can distinguish what a dead
// writer left behind from what a living one is working on.
//
//   AtomicDir dir("out/checkpoint-100", {.expected_bytes = state_bytes});
//   dir.write("model.safetensors", [&](FileWriter& file) { write_safetensors(file, tensors); });
//   dir.commit();
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"

namespace lockstep::io {

struct AtomicDirOptions {
  // When not 0, a file system with less room than this is refused before anything is written.
  std::uint64_t expected_bytes = 0;
  // Replaces an existing directory of that name, without a moment in which neither exists (where
  // the file system can exchange two names; otherwise the old one is removed first).
  bool replace = false;
  WriteProgress* progress = nullptr;  // counts its files' writes; outlives the AtomicDir
};

// Used by one thread. Owns the temporary directory: any error, and dropping it without commit(),
// removes it. Errors of the system are SystemError with path, call and remedy.
class AtomicDir {
 public:
  // Creates missing parents. UsageError when the name is taken and `replace` is off.
  explicit AtomicDir(std::string final_path, AtomicDirOptions options = {});
  ~AtomicDir();
  AtomicDir(const AtomicDir&) = delete;
  AtomicDir& operator=(const AtomicDir&) = delete;

  // Writes one file, durable on return. Names are unique, without '/', and not the manifest's.
  void write(const std::string& name, const std::function<void(FileWriter&)>& fill);
  void write(const std::string& name, std::string_view contents);
  // Takes in a file that was created in path() by other means: reads its checksum and fsyncs it.
  void adopt(const std::string& name);

  // Manifest, fsync, rename, fsync. The directory is final_path() from here on. A file that is in
  // it without write() or adopt() is refused (UsageError).
  void commit();

  const std::string& path() const { return path_; }  // the temporary one until commit()
  const std::string& final_path() const { return final_path_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  void check_open(std::string_view what) const;
  void check_name(const std::string& name) const;
  void refuse_other_files() const;
  bool take_name();
  void discard() noexcept;
  // Runs one step; an error in it removes the temporary directory before it is passed on.
  void guarded(const std::function<void()>& step);

  std::string final_path_;
  AtomicDirOptions options_;
  std::string path_;
  Fd lock_;
  Manifest manifest_;
  std::uint64_t bytes_ = 0;
  bool open_ = false;
};

// Removes a directory such that its name never has partial contents: it is first renamed to a
// temporary name. SystemError when it cannot.
void remove_durably(const std::string& directory);

struct SweepResult {
  std::vector<std::string> removed;
  std::vector<std::pair<std::string, std::string>> remaining;  // path and reason
};

// Removes what dead writers and removers left in `parent`: directories with a temporary name whose
// lock nobody holds. A parent that does not exist holds nothing.
SweepResult sweep(const std::string& parent);

// Whether the last component is <something>.tmp-<pid>-<16 hexadecimal digits>.
bool is_temporary_name(const std::string& path);

// ---------------------------------------------------------------- numbered directories
//
//   Newest newest = newest_valid("out", "checkpoint-");
//   for (const PassedOver& p : newest.passed_over) log::warning("io", "{}: {}", p.path, p.reason);
//   if (newest.step >= 0) load(newest.path);

struct NumberedDir {
  std::int64_t step = -1;
  std::string path;
};

// The directories in `parent` whose name is the prefix and a decimal number, highest first; empty
// if the parent does not exist. SystemError when it cannot be read.
std::vector<NumberedDir> list_numbered(const std::string& parent, const std::string& prefix);

struct PassedOver {
  std::string path;
  std::string reason;
};

struct Newest {
  std::int64_t step = -1;  // -1: there is none
  std::string path;
  std::vector<PassedOver> passed_over;  // newer directories, and the fault of each
  std::string remark;                   // reports extra files that were added later; else empty
};

// The directory with the highest number up to `max_step` that verifies to the last byte. An extra
// file does not invalidate a checkpoint: it is reported in `remark`.
Newest newest_valid(const std::string& parent, const std::string& prefix,
                    std::int64_t max_step = std::numeric_limits<std::int64_t>::max());

struct RetainOptions {
  int limit = 0;                    // how many to keep, `durable` and `keep` included; at least 1
  std::string durable;              // the one just committed: never deleted
  std::vector<std::string> keep{};  // never deleted either (the best model)
};

// Deletes the oldest directories beyond the limit and returns them. Call it only after commit(): it
// checks `durable` first (names and sizes) and deletes nothing when that is damaged (UsageError).
// Visibly incomplete directories do not count as retained and are deleted first; extra files do not
// matter. A directory without our manifest, or unreadable, neither counts nor is deleted.
std::vector<std::string> retain(const std::string& parent, const std::string& prefix,
                                const RetainOptions& options);

// ---------------------------------------------------------------- one process at a time

inline constexpr const char* kFolderLockName = ".lockstep.lock";

// UsageError where `path` is a symbolic link: a run must not write through a link in its folder
// that another user could redirect.
void refuse_link(const std::string& path);

// A folder in which one process works at a time.
//
// The lock is flock() on a file in the folder, not the existence of that file, and ends with the
// process that holds it. A network file system may keep it for a while after a whole host has died;
// deleting the file helps then. The file says who holds the lock.
//
//   const FolderLock lock("out", "run 7", std::chrono::seconds(3));
//   if (!lock.holder().empty()) refuse(lock.holder());     // "pid 4242 on n1 since 2026-11-15 ..."
//
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
