#include "lockstep/io/manifest.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>

#include "lockstep/core/json.h"
#include "lockstep/io/file.h"

namespace lockstep::io {
namespace {

constexpr std::string_view kFormat = "lockstep-manifest-1";
constexpr std::size_t kMaxManifestBytes = 64u << 20;

[[noreturn]] void torn(const std::string& what) {
  throw UsageError("io",
                   "the manifest is not whole: {}. It was cut short or edited. Use another "
                   "checkpoint.",
                   what);
}

std::optional<std::uint64_t> parse_checksum(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  std::uint64_t value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<std::uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

FileDigest parse_digest(JsonReader& json) {
  FileDigest digest;
  std::string key;
  json.enter_object();
  while (json.next_key(key)) {
    if (key == "bytes") {
      digest.bytes = json.unsigned_integer();
    } else if (key == "checksum") {
      const auto checksum = parse_checksum(json.string());
      if (!checksum) json.fail("not a checksum");
      digest.checksum = *checksum;
    } else {
      json.fail("an unknown key");
    }
  }
  return digest;
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
  if (depth == Depth::kSizes) return;
  try {
    const FileDigest found = digest_file(path);
    if (found.bytes != wanted.bytes)
      fault(FaultKind::kSize,
            fmt::format("it has {} bytes instead of {}", found.bytes, wanted.bytes));
    else if (found.checksum != wanted.checksum)
      fault(FaultKind::kChecksum,
            fmt::format("its checksum is {} instead of {}", checksum_text(found.checksum),
                        checksum_text(wanted.checksum)));
  } catch (const SystemError& e) {
    fault(FaultKind::kUnreadable,
          fmt::format("it cannot be read ({})", std::strerror(e.error_number())));
  }
}

std::optional<Manifest> read_manifest(const std::string& directory, std::vector<Fault>& faults) {
  const auto fault = [&](FaultKind kind, const std::string& what) {
    faults.push_back({kind, std::string(kManifestName), what});
    return std::nullopt;
  };
  const std::string path = directory + "/" + std::string(kManifestName);
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 && errno == ENOENT)
    return fault(FaultKind::kManifestMissing,
                 fmt::format("{}: it is missing, so the rest cannot be checked", kManifestName));
  if (!S_ISREG(info.st_mode))
    return fault(FaultKind::kUnreadable, fmt::format("{}: it cannot be read", kManifestName));
  try {
    return parse_manifest(read_file(path, kMaxManifestBytes));
  } catch (const UsageError& e) {
    return fault(FaultKind::kManifestTorn, fmt::format("{}: {}", kManifestName, e.what()));
  } catch (const SystemError& e) {
    return fault(FaultKind::kUnreadable, fmt::format("{}: it cannot be read ({})", kManifestName,
                                                     std::strerror(e.error_number())));
  }
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  std::string text = fmt::format("{{\n  \"format\": \"{}\",\n  \"files\": {{", kFormat);
  for (const auto& [name, digest] : manifest) {
    if (text.back() != '{') text += ',';
    text += fmt::format("\n    {}: {{\"bytes\": {}, \"checksum\": \"{}\"}}", json_quote(name),
                        digest.bytes, checksum_text(digest.checksum));
  }
  text += "\n  },\n";
  return text +
         fmt::format("  \"checksum\": \"{}\"\n}}\n", checksum_text(checksum64(bytes_of(text))));
}

Manifest parse_manifest(std::string_view text) {
  Manifest manifest;
  try {
    JsonReader json(text);
    std::string key;
    json.enter_object();
    while (json.next_key(key)) {
      if (key == "format") {
        const std::string format = json.string();
        if (format != kFormat) torn(fmt::format("it has the unknown format '{}'", format));
      } else if (key == "files") {
        std::string name;
        json.enter_object();
        while (json.next_key(name)) manifest[name] = parse_digest(json);
      } else if (key == "checksum") {
        json.string();
      } else {
        json.fail("an unknown key");
      }
    }
    json.end();
  } catch (const JsonError& e) {
    torn(fmt::format("at byte {}: {}", e.offset(), e.what()));
  }
  if (manifest_text(manifest) != text) torn("its own checksum does not hold");
  return manifest;
}

std::vector<Fault> verify(const std::string& directory, Depth depth) {
  std::vector<Fault> faults;
  const auto manifest = read_manifest(directory, faults);
  if (!manifest) return faults;
  for (const auto& [name, digest] : *manifest) check_file(directory, name, digest, depth, faults);
  std::error_code error;
  std::set<std::string> extra;
  for (auto it = std::filesystem::directory_iterator(directory, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name != kManifestName && !manifest->contains(name)) extra.insert(name);
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
