#include "lockstep/io/manifest.h"

#include <dirent.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTitle =
    "# lockstep-manifest-2: sha256sum -c SHA256SUMS verifies these files.\n";
constexpr std::string_view kSize = "# bytes: ", kItself = "# digest of the lines above: ";
constexpr const char* kFirstName = "MANIFEST.json";  // of versions before 0.2
constexpr std::size_t kMaxManifestBytes = 64u << 20;

[[noreturn]] void torn(const std::string& what) {
  throw UsageError("io",
                   "the manifest is not whole: {}. It was cut short or edited. Use another "
                   "checkpoint.",
                   what);
}

// Removes the next line of the text and returns its rest after `front`.
std::string_view take_line(std::string_view& text, std::string_view front) {
  const std::size_t end = text.find('\n');
  if (end == text.npos || !text.starts_with(front)) torn("it ends, or is another file");
  const std::string_view line = text.substr(front.size(), end - front.size());
  text.remove_prefix(end + 1);
  return line;
}

std::string manifest_path(const std::string& directory) {
  std::error_code ignored;
  const std::string path = fmt::format("{}/{}", directory, kManifestName);
  const std::string first = fmt::format("{}/{}", directory, kFirstName);
  return !fs::exists(path, ignored) && fs::exists(first, ignored) ? first : path;
}

// The file's contents are not verified: its checksum is of a kind that no other tool computes.
Manifest parse_first_version(const std::string& text, const std::string& path) {
  Manifest manifest;
  const Node root = parse_json(text, path, {.bytes = kMaxManifestBytes, .nodes = 10'000'000});
  if (as_string(root.at("format"), "format") != "lockstep-manifest-1")
    torn("it has another format");
  for (const Entry& entry : root.at("files").entries)
    manifest[entry.key].bytes =
        static_cast<std::uint64_t>(as_integer(entry.value.at("bytes"), "bytes"));
  return manifest;
}

// "" when it is a regular file of that size.
std::string wrong_file(const struct stat& info, const FileDigest& wanted) {
  if (!S_ISREG(info.st_mode)) return "it is not a regular file";
  const auto bytes = static_cast<std::uint64_t>(info.st_size);
  return bytes == wanted.bytes ? ""
                               : fmt::format("it has {} bytes instead of {}", bytes, wanted.bytes);
}

void check_file(const std::string& directory, const std::string& name, const FileDigest& wanted,
                Depth depth, std::vector<Fault>& faults) {
  const std::string path = directory + "/" + name;
  const auto fault = [&](FaultKind kind, const std::string& what) {
    faults.push_back({kind, name, fmt::format("{}: {}", name, what)});
  };
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT)
      fault(FaultKind::kMissing, "it is missing");
    else
      fault(FaultKind::kUnreadable, fmt::format("it cannot be read ({})", std::strerror(errno)));
    return;
  }
  if (const std::string what = wrong_file(info, wanted); !what.empty()) {
    fault(S_ISREG(info.st_mode) ? FaultKind::kSize : FaultKind::kUnreadable, what);
    return;
  }
  if (depth == Depth::kSizes || wanted.sha256.empty()) return;
  try {
    const FileDigest found = digest_file(path);
    if (found.bytes != wanted.bytes)
      fault(FaultKind::kSize,
            fmt::format("it has {} bytes instead of {}", found.bytes, wanted.bytes));
    else if (found.sha256 != wanted.sha256)
      fault(FaultKind::kChecksum,
            fmt::format("its SHA-256 is {} instead of {}", found.sha256, wanted.sha256));
  } catch (const SystemError& e) {
    fault(FaultKind::kUnreadable,
          fmt::format("it cannot be read ({})", std::strerror(e.error_number())));
  }
}

std::optional<Manifest> read_manifest(const std::string& directory, std::vector<Fault>& faults) {
  const std::string path = manifest_path(directory), name = fs::path(path).filename();
  const auto fault = [&](FaultKind kind, const std::string& what) {
    faults.push_back({kind, name, fmt::format("{}: {}", name, what)});
    return std::nullopt;
  };
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 && errno == ENOENT)
    return fault(FaultKind::kManifestMissing, "it is missing, so the rest cannot be checked");
  if (!S_ISREG(info.st_mode)) return fault(FaultKind::kUnreadable, "it cannot be read");
  try {
    const std::string text = read_file(path, kMaxManifestBytes);
    return name == kFirstName ? parse_first_version(text, name) : parse_manifest(text);
  } catch (const UsageError& e) {
    return fault(FaultKind::kManifestTorn, e.what());
  } catch (const SystemError& e) {
    return fault(FaultKind::kUnreadable,
                 fmt::format("it cannot be read ({})", std::strerror(e.error_number())));
  }
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  std::string text{kTitle};
  for (const auto& [name, digest] : manifest)
    text += fmt::format("{}{}\n{}  {}\n", kSize, digest.bytes, digest.sha256, name);
  return text + fmt::format("{}{}\n", kItself, sha256(bytes_of(text)));
}

Manifest parse_manifest(std::string_view text) {
  Manifest manifest;
  std::string_view rest = text;
  if (!rest.starts_with(kTitle)) torn("its first line is another one");
  rest.remove_prefix(kTitle.size());
  while (!rest.starts_with(kItself)) {
    FileDigest digest;
    const std::string_view bytes = take_line(rest, kSize), entry = take_line(rest, "");
    std::from_chars(bytes.data(), bytes.data() + bytes.size(), digest.bytes);
    const std::size_t gap = entry.find("  ");
    constexpr std::size_t kDigits = 64;
    if (gap != kDigits) torn("a line is not a digest and a name");
    digest.sha256 = entry.substr(0, gap);
    manifest[std::string(entry.substr(gap + 2))] = digest;
  }
  if (manifest_text(manifest) != text) torn("its own digest does not hold");
  return manifest;
}

bool has_manifest(const std::string& directory) {
  std::error_code ignored;
  return fs::exists(manifest_path(directory), ignored);
}

std::string manifest_digest(const std::string& directory) {
  return digest_file(manifest_path(directory)).sha256;
}

std::vector<Fault> verify(const std::string& directory, Depth depth) {
  std::vector<Fault> faults;
  const auto manifest = read_manifest(directory, faults);
  if (!manifest) return faults;
  for (const auto& [name, digest] : *manifest) check_file(directory, name, digest, depth, faults);
  if (depth == Depth::kFull && !manifest->empty() && manifest->begin()->second.sha256.empty())
    log::warning("io",
                 "{} was written by a version before 0.2: names and sizes are verified, "
                 "contents are not.",
                 directory);
  std::error_code error;
  std::set<std::string> extra;
  for (auto it = fs::directory_iterator(directory, error); !error && it != fs::directory_iterator();
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name != kManifestName && name != kFirstName && !manifest->contains(name))
      extra.insert(name);
  }
  if (error)
    faults.push_back({FaultKind::kUnreadable, "",
                      fmt::format("the directory cannot be read ({})", error.message())});
  for (const std::string& name : extra)
    faults.push_back(
        {FaultKind::kExtra, name, fmt::format("{}: it is there but not in the manifest", name)});
  return faults;
}

std::vector<Fault> damage_of(const std::string& directory, Depth depth) {
  std::vector<Fault> faults = verify(directory, depth);
  std::erase_if(faults, [](const Fault& fault) { return fault.kind == FaultKind::kExtra; });
  return faults;
}

std::string describe(const std::vector<Fault>& faults) {
  if (faults.empty()) return "whole";
  if (faults.size() == 1) return faults.front().text;
  return fmt::format("{} (and {} more)", faults.front().text, faults.size() - 1);
}

}  // namespace lockstep::io
