// The files of a folder of text, none of them silently skipped: one that cannot be read is an error
// with its name, because a run that trains on the rest looks like any other.
//
//   for (const std::string& file : files_below("docs", [](const std::string& path) {
//          return path.ends_with(".md");
//        })) ...
//
// Functions without state; call from any thread. Without torch.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lockstep::data {

// Every file below `folder` whose path `wanted` accepts, unsorted. Links to files are followed,
// links to folders are not. UsageError when a folder cannot be listed, or when something that is
// wanted is not a readable regular file (see check_text_file).
std::vector<std::string> files_below(const std::string& folder,
                                     const std::function<bool(const std::string& path)>& wanted);

// UsageError with name, cause and remedy unless `path` is a regular file that this user may read.
void check_text_file(const std::string& path);

// The same error for a read that failed later.
[[noreturn]] void refuse_text_file(const std::string& path, int error_number);

}  // namespace lockstep::data
