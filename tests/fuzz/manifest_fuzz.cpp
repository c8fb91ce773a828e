// The manifest of a checkpoint: text that is read is canonical to the byte, and names and sizes of
// any kind survive being written and read.
#include <cstring>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/io/manifest.h"
#include "tests/fuzz/driver.h"

namespace {

using namespace lockstep::io;
using lockstep::fuzz::require;

// The text as it is, and with the digest that would belong to it: otherwise nothing but that last
// line would ever be reached.
std::string with_right_digest(std::string_view text) {
  constexpr std::string_view kItself = "# digest of the lines above: ";
  const std::size_t last = text.rfind(kItself);
  if (last == text.npos) return std::string(text);
  const std::string body(text.substr(0, last));
  return body + std::string(kItself) + sha256(bytes_of(body)) + "\n";
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
    if (lockstep::invalid_utf8(line) || line.empty()) continue;
    FileDigest digest;
    std::memcpy(&digest.bytes, line.data(), std::min(line.size(), sizeof digest.bytes));
    digest.sha256 = sha256(bytes_of(line));
    manifest[std::string(line)] = digest;
  }
  require(parse_manifest(manifest_text(manifest)) == manifest, "written, but not brought back");
}

}  // namespace

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read(text);
  read(with_right_digest(text));
  write_and_read(text);
  return 0;
}
