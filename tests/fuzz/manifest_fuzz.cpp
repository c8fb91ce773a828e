// The manifest of a checkpoint: text that is read is canonical to the byte, and names and sizes of
// any kind survive being written and read.
#include <cstring>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/utf8.h"
#include "lockstep/io/manifest.h"
#include "tests/fuzz/driver.h"

namespace {

using namespace lockstep::io;
using lockstep::fuzz::require;

bool same(const Manifest& a, const Manifest& b) {
  if (a.size() != b.size()) return false;
  for (auto i = a.begin(), j = b.begin(); i != a.end(); ++i, ++j)
    if (i->first != j->first || i->second.bytes != j->second.bytes ||
        i->second.checksum != j->second.checksum)
      return false;
  return true;
}

// The text as it is, and with the checksum that it should have: otherwise nothing beyond that last
// line would ever be reached.
std::string with_right_checksum(std::string_view text) {
  const std::size_t last = text.rfind("  \"checksum\": \"");
  if (last == text.npos) return std::string(text);
  const std::string body(text.substr(0, last));
  return body + "  \"checksum\": \"" + checksum_text(checksum64(bytes_of(body))) + "\"\n}\n";
}

void read(std::string_view text) {
  try {
    require(manifest_text(parse_manifest(text)) == text, "read, though not what would be written");
  } catch (const lockstep::UsageError& error) {
    require(std::string_view(error.what()).starts_with("[io] "), "an error without its component");
  }
}

// Each line a name; its bytes are the numbers too.
void write_and_read(std::string_view text) {
  Manifest manifest;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (lockstep::invalid_utf8(line)) continue;
    FileDigest digest;
    std::memcpy(&digest.bytes, line.data(), std::min(line.size(), sizeof digest.bytes));
    digest.checksum = checksum64(bytes_of(line));
    manifest[std::string(line)] = digest;
  }
  require(same(parse_manifest(manifest_text(manifest)), manifest), "written, but not brought back");
}

}  // namespace

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read(text);
  read(with_right_checksum(text));
  write_and_read(text);
  return 0;
}
