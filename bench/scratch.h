// A directory for the files of one benchmark run, removed at its end.
//
//   const Scratch scratch;
//   run_command(fmt::format("measure >'{}'", scratch.file("figures")));
#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "lockstep/core/error.h"

namespace lockstep::bench {

class Scratch {
 public:
  Scratch() {
    std::string path = (std::filesystem::temp_directory_path() / "lockstep-bench-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr)
      throw SystemError("bench", "cannot make a temporary directory", errno);
    path_ = path;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// Runs it through the shell; throws Error when it fails.
inline void run_command(const std::string& command) {
  const int ended = std::system(command.c_str());
  const int code = WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
  if (code != 0) throw Error("bench", fmt::format("'{}' failed (exit code {})", command, code));
}

}  // namespace lockstep::bench
