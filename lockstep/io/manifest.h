// SHA256SUMS: the names and digests of a directory's files in the form that `sha256sum -c` reads,
// with sizes and a digest of itself in comments, so that damage to a directory is found without
// knowing what it holds.
//
//   for (const Fault& fault : verify(dir)) log::warning("io", "{}", fault.text);
//
// The text is canonical: what is read must be exactly what would be written, so an edited manifest
// counts as damaged. Folders of versions before 0.2 have MANIFEST.json with a checksum of our own;
// only their names and sizes are verified.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/io/file.h"

namespace lockstep::io {

inline constexpr std::string_view kManifestName = "SHA256SUMS";
// Whether the directory has a manifest, of either version.
bool has_manifest(const std::string& directory);
// SHA-256 of the manifest itself: two directories with the same one hold the same files. Throws
// SystemError without a manifest.
std::string manifest_digest(const std::string& directory);

using Manifest = std::map<std::string, FileDigest>;

std::string manifest_text(const Manifest& manifest);
// UsageError, without the file's name, when the text is not exactly a manifest.
Manifest parse_manifest(std::string_view text);

enum class FaultKind {
  kManifestMissing,  // also: the directory is not there
  kManifestTorn,
  kMissing,
  kExtra,
  kSize,
  kChecksum,
  kUnreadable,
};

struct Fault {
  FaultKind kind = FaultKind::kMissing;
  std::string file;  // its name in the directory
  std::string text;  // one sentence for a person
};

enum class Depth {
  kSizes,  // names, kinds and sizes: what a torn write or a missing file shows
  kFull,   // every byte
};

// All faults of the directory; empty when it is undamaged. Never throws for what it finds on the
// disk.
std::vector<Fault> verify(const std::string& directory, Depth depth = Depth::kFull);
// The same without kExtra: an extra file is somebody's note and not damage.
std::vector<Fault> damage_of(const std::string& directory, Depth depth = Depth::kFull);

// The faults as one sentence: the first, and how many more.
std::string describe(const std::vector<Fault>& faults);

}  // namespace lockstep::io
