#include "lockstep/core/home_path.h"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <vector>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

// The home directory of this user, or of the current one for an empty name; empty when unknown.
std::string home_of(const std::string& user) {
  std::vector<char> buffer(16u << 10);
  passwd entry{};
  passwd* found = nullptr;
  int error = 0;
  do {
    error = user.empty() ? ::getpwuid_r(::geteuid(), &entry, buffer.data(), buffer.size(), &found)
                         : ::getpwnam_r(user.c_str(), &entry, buffer.data(), buffer.size(), &found);
    if (error == ERANGE) buffer.resize(2 * buffer.size());
  } while (error == EINTR || (error == ERANGE && buffer.size() <= (1u << 20)));
  return found != nullptr && found->pw_dir != nullptr ? found->pw_dir : "";
}

}  // namespace

std::string expand_home(const std::string& path, std::string_view what) {
  if (!path.starts_with('~')) return path;
  const std::size_t end = std::min(path.find('/'), path.size());
  const std::string user = path.substr(1, end - 1);
  std::string home = user.empty() ? env::get("HOME").value_or("") : "";
  if (home.empty()) home = home_of(user);
  if (home.empty()) {
    throw UsageError("config",
                     "{}: '{}' names the home directory of {}, which is not known on this machine. "
                     "Write the whole path, or ./{} for a folder of that name.",
                     what, path, user.empty() ? "this user" : "user " + user, path);
  }
  return home + path.substr(end);
}

std::string hub_advice(const std::string& path) {
  const std::size_t slash = path.find('/');
  const bool two_words = slash != path.npos && slash > 0 && slash + 1 < path.size() &&
                         path.find('/', slash + 1) == path.npos && path.front() != '.' &&
                         path.front() != '~';
  std::error_code ignored;
  // A file in a folder that is there is missing itself.
  if (!two_words || std::filesystem::exists(path.substr(0, slash), ignored)) return "";
  const std::string folder = path.substr(slash + 1);
  return fmt::format(
      " If that is a model of Hugging Face's hub, download it first (huggingface-cli download {} "
      "--local-dir {}) and write {} instead.",
      path, folder, folder);
}

}  // namespace lockstep
