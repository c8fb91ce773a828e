#include "lockstep/io/numbered_dirs.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/io/atomic_dir.h"
#include "lockstep/io/manifest.h"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;

// The number after the prefix, or -1 for a name of another kind.
std::int64_t step_of(const std::string& name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return -1;
  const char* begin = name.data() + prefix.size();
  const char* end = name.data() + name.size();
  if (begin == end || *begin < '0' || *begin > '9') return -1;
  std::int64_t step = -1;
  const auto [stop, error] = std::from_chars(begin, end, step);
  return error == std::errc() && stop == end ? step : -1;
}

bool same_place(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

// Whether it is ours and certainly of no use to anybody. Without a manifest of ours it belongs to
// another program; what cannot be read now may be read tomorrow.
bool is_waste(const std::vector<Fault>& damage) {
  return std::ranges::all_of(damage, [](const Fault& fault) {
    return fault.kind != FaultKind::kManifestMissing && fault.kind != FaultKind::kManifestTorn &&
           fault.kind != FaultKind::kUnreadable;
  });
}

}  // namespace

std::vector<NumberedDir> list_numbered(const std::string& parent, const std::string& prefix) {
  std::vector<NumberedDir> found;
  std::error_code error;
  for (auto it = fs::directory_iterator(parent, error); !error && it != fs::directory_iterator();
       it.increment(error)) {
    const std::int64_t step = step_of(it->path().filename().string(), prefix);
    std::error_code ignored;
    if (step >= 0 && it->is_directory(ignored)) found.push_back({step, it->path().string()});
  }
  if (error && error != std::errc::no_such_file_or_directory)
    throw file_error("read the directory", parent, error.value());
  // 7 and 007 are the same number: their names decide, so that every rank decides identically.
  std::ranges::sort(found, [](const NumberedDir& a, const NumberedDir& b) {
    return a.step != b.step ? a.step > b.step : a.path > b.path;
  });
  return found;
}

Newest newest_valid(const std::string& parent, const std::string& prefix, std::int64_t max_step) {
  Newest newest;
  for (const NumberedDir& dir : list_numbered(parent, prefix)) {
    if (dir.step > max_step) continue;
    const std::vector<Fault> faults = verify(dir.path);
    const bool whole = std::ranges::all_of(
        faults, [](const Fault& fault) { return fault.kind == FaultKind::kExtra; });
    if (whole) {
      newest.step = dir.step;
      newest.path = dir.path;
      if (!faults.empty()) newest.remark = describe(faults);
      return newest;
    }
    newest.passed_over.push_back({dir.path, describe(faults)});
  }
  return newest;
}

std::vector<std::string> retain(const std::string& parent, const std::string& prefix,
                                const RetainOptions& options) {
  if (options.limit < 1)
    throw UsageError("io", "at least 1 checkpoint must be retained (limit {}).", options.limit);
  if (const auto faults = damage_of(options.durable, Depth::kSizes); !faults.empty())
    throw UsageError("io",
                     "nothing is deleted, because {} is not whole: {}. Commit the new checkpoint "
                     "before old ones are deleted.",
                     options.durable, describe(faults));
  int retained = 0;
  std::vector<std::string> broken, old;  // both newest first
  for (const NumberedDir& dir : list_numbered(parent, prefix)) {
    const bool must_stay = same_place(dir.path, options.durable) ||
                           std::ranges::any_of(options.keep, [&](const std::string& path) {
                             return same_place(dir.path, path);
                           });
    if (must_stay)
      ++retained;
    else if (const auto damage = damage_of(dir.path, Depth::kSizes); damage.empty())
      old.push_back(dir.path);
    else if (is_waste(damage))
      broken.push_back(dir.path);
  }
  const auto room = static_cast<std::size_t>(std::max(0, options.limit - retained));
  std::vector<std::string> doomed(broken.rbegin(), broken.rend());
  if (old.size() > room)
    doomed.insert(doomed.end(), old.rbegin(), old.rend() - static_cast<std::ptrdiff_t>(room));
  for (const std::string& path : doomed) remove_durably(path);
  return doomed;
}

}  // namespace lockstep::io
