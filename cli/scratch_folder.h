// A folder in TMPDIR for the files of one command, removed at its end.
//
//   const ScratchFolder folder("doctor");
//   write_file_atomically(folder.file("a.json"), text);
#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::cli {

class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& name) {
    const std::string base = env::get("TMPDIR").value_or("");
    path_ = (base.empty() ? "/tmp" : base) + "/lockstep_" + name + "_XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr)
      throw SystemError(name, "cannot make a folder " + path_, errno);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace lockstep::cli
