// A series of directories such as checkpoint-100, checkpoint-200: which one to load, which to
// delete.
//
//   Newest newest = newest_valid("out", "checkpoint-");
//   for (const PassedOver& p : newest.passed_over) log::warning("io", "{}: {}", p.path, p.reason);
//   if (newest.step >= 0) load(newest.path);
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace lockstep::io {

struct NumberedDir {
  std::int64_t step = -1;
  std::string path;
};

// Directories in `parent` named prefix and a decimal number, highest first; empty when the parent
// is not there. SystemError when it cannot be read.
std::vector<NumberedDir> list_numbered(const std::string& parent, const std::string& prefix);

struct PassedOver {
  std::string path;
  std::string reason;
};

struct Newest {
  std::int64_t step = -1;  // -1: there is none
  std::string path;
  std::vector<PassedOver> passed_over;  // newer ones, and what was wrong with each
  std::string remark;                   // files that somebody has put into it later; else empty
};

// The highest number up to `max_step` whose directory verifies to the last byte. A file too many is
// not a reason to lose a checkpoint: it is only remarked.
Newest newest_valid(const std::string& parent, const std::string& prefix,
                    std::int64_t max_step = std::numeric_limits<std::int64_t>::max());

struct RetainOptions {
  int limit = 0;                    // how many to keep, `durable` and `keep` included; at least 1
  std::string durable;              // the one just committed: never deleted
  std::vector<std::string> keep{};  // never deleted either (the best model)
};

// Deletes the oldest beyond the limit, and says which. Call it only after commit(): `durable` is
// looked at first (names and sizes), and when it is not whole nothing is deleted (UsageError).
// Those that visibly lack something do not count as retained and are deleted first. A file too many
// does not matter. What has no manifest of ours, or cannot be read, neither counts nor is deleted.
std::vector<std::string> retain(const std::string& parent, const std::string& prefix,
                                const RetainOptions& options);

}  // namespace lockstep::io
