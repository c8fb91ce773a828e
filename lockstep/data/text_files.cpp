#include "lockstep/data/text_files.h"

#include <fcntl.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

std::string cause(int error_number) {
  return std::generic_category().message(error_number);
}

const char* remedy(int error_number) {
  if (error_number == EACCES || error_number == EPERM)
    return "Give this user permission to read it, or move it out of the data.";
  if (error_number == ENOENT) return "Check the path, or remove a link whose file is gone.";
  return "Check the file system, or move it out of the data.";
}

const char* kind_name(fs::file_type type) {
  switch (type) {
    case fs::file_type::directory:
      return "folder";
    case fs::file_type::fifo:
      return "named pipe";
    case fs::file_type::socket:
      return "socket";
    default:
      return "device";
  }
}

[[noreturn]] void refuse_folder(const std::string& folder, const std::error_code& error) {
  throw UsageError("data", "the folder {} cannot be listed ({}). {}", folder, error.message(),
                   remedy(error.value()));
}

}  // namespace

void refuse_text_file(const std::string& path, int error_number) {
  throw UsageError("data", "{} cannot be read ({}). {}", path, cause(error_number),
                   remedy(error_number));
}

void check_text_file(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) refuse_text_file(path, ENOENT);
  if (error) refuse_text_file(path, error.value());
  if (status.type() != fs::file_type::regular) {
    throw UsageError("data", "{} is a {}, not a file. Move it out of the data.", path,
                     kind_name(status.type()));
  }
  // The kind may have changed since: opening a named pipe must not block.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!fd) refuse_text_file(path, errno);
}

std::vector<std::string> files_below(const std::string& folder,
                                     const std::function<bool(const std::string& path)>& wanted) {
  std::vector<std::string> found;
  // Not a recursive iterator, which does not say which of the folders could not be listed.
  std::vector<std::string> folders{folder};
  while (!folders.empty()) {
    const std::string current = std::move(folders.back());
    folders.pop_back();
    std::error_code error;
    for (fs::directory_iterator entry(current, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
      const std::string path = entry->path().string();
      std::error_code unknown;
      const fs::file_type type = entry->symlink_status(unknown).type();
      if (unknown) refuse_text_file(path, unknown.value());
      if (type == fs::file_type::directory) {
        folders.push_back(path);
      } else if (wanted(path) && !fs::is_directory(path, unknown)) {
        check_text_file(path);
        found.push_back(path);
      }
    }
    if (error) refuse_folder(current, error);
  }
  return found;
}

}  // namespace lockstep::data
