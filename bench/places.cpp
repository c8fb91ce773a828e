#include <filesystem>

#include "bench/bench.h"
#include "lockstep/core/error.h"

namespace lockstep::bench {
namespace fs = std::filesystem;

namespace {
fs::path here() {
  return fs::read_symlink("/proc/self/exe").parent_path();
}
}  // namespace

std::string program_beside(const std::string& relative) {
  const fs::path path = fs::weakly_canonical(here() / relative);
  if (!fs::exists(path))
    throw UsageError("bench", "{} is missing. Run ./dev build.", path.string());
  return path.string();
}

std::string peer(const std::string& file) {
  for (const char* place : {"../../bench/peers", "../share/lockstep/peers"}) {
    const fs::path path = fs::weakly_canonical(here() / place / file);
    if (fs::exists(path)) return path.string();
  }
  throw UsageError("bench", "the peer script {} is neither in the source tree nor installed.",
                   file);
}

std::string default_python() {
  return LOCKSTEP_DEFAULT_PYTHON;
}

}  // namespace lockstep::bench
