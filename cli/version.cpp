// `lockstep --version`. The only source that knows the commit: a new one recompiles nothing else.
#include "lockstep/version.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "cli/commands.h"

namespace lockstep::cli {

std::string version_text() {
  return fmt::format(
      "lockstep {}\n"
      "commit {}\n"
      "torch {}\n"
      "compiler {}\n"
      "To report a problem, see {}.\n",
      LOCKSTEP_VERSION, LOCKSTEP_BUILT_FROM, LOCKSTEP_BUILT_WITH_TORCH, LOCKSTEP_BUILT_BY,
      documentation("CONTRIBUTING.md"));
}

std::string documentation(const std::string& page) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::path prefix = fs::read_symlink("/proc/self/exe", ignored).parent_path().parent_path();
  for (const fs::path& folder : {prefix / "share/doc/lockstep", prefix.parent_path()})
    if (fs::exists(folder / "docs/api.md", ignored)) return folder / page;
  return page;
}

}  // namespace lockstep::cli
