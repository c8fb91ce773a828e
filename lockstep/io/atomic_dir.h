// A directory that has its name only when it is whole and on the disk.
//
// The name is the commit. Files are written and fsynced under
// <name>.tmp-<pid>-<random>, then the manifest, then the directory; one rename makes it visible,
// and an fsync of the parent makes the rename last. A process that dies at any point leaves either
// no <name> or a complete one. The writer holds a lock on its temporary directory, so sweep() can
// distinguish what a dead writer left behind from what a living one is working on.
//
//   AtomicDir dir("out/checkpoint-100", {.expected_bytes = state_bytes});
//   dir.write("model.safetensors", [&](FileWriter& file) { write_safetensors(file, tensors); });
//   dir.commit();
#pragma once

#include <cstdint>
#include <functional>
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
  // Takes the place of a directory that has the name already, without a moment in which neither is
  // there (where the file system can exchange two names; else the old one goes first).
  bool replace = false;
  WriteProgress* progress = nullptr;  // counts its files' writes; outlives the AtomicDir
};

// Used by one thread. Owns the temporary directory: any error, and dropping it without commit(),
// removes it. Errors of the system are SystemError with path, call and remedy.
class AtomicDir {
 public:
  // Makes missing parents. UsageError when the name is taken (and not to be replaced).
  explicit AtomicDir(std::string final_path, AtomicDirOptions options = {});
  ~AtomicDir();
  AtomicDir(const AtomicDir&) = delete;
  AtomicDir& operator=(const AtomicDir&) = delete;

  // One file, durable on return. Names are plain: no '/', not the manifest's, each once.
  void write(const std::string& name, const std::function<void(FileWriter&)>& fill);
  void write(const std::string& name, std::string_view contents);
  // A file that somebody else has put into path(): read for its checksum, and fsynced.
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

// Removes a directory so that no half of it is ever found under its name: renamed to a temporary
// name first. SystemError when it cannot.
void remove_durably(const std::string& directory);

struct SweepResult {
  std::vector<std::string> removed;
  std::vector<std::pair<std::string, std::string>> remaining;  // path, why
};

// Removes what dead writers and removers left in `parent`: directories with a temporary name whose
// lock nobody holds. A parent that does not exist holds nothing.
SweepResult sweep(const std::string& parent);

// Whether the last component is <something>.tmp-<pid>-<16 hexadecimal digits>.
bool is_temporary_name(const std::string& path);

}  // namespace lockstep::io
