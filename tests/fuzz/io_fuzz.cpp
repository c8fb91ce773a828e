// Files of checkpoints: manifest, safetensors. Each program is compiled for one of them (driver.h).
#include <cstring>
#include <span>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/io/manifest.h"
#include "lockstep/io/safetensors.h"
#include "tests/fuzz/driver.h"

// The manifest of a checkpoint: text that is read is canonical to the byte, and names and sizes of
// any kind survive being written and read.
namespace fuzz_manifest {

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

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read(text);
  read(with_right_digest(text));
  write_and_read(text);
  return 0;
}

}  // namespace fuzz_manifest

// The parser of safetensors headers, for a fuzzer: any bytes are either refused by UsageError or
// read into tensors that cover the data exactly.
namespace fuzz_safetensors {

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const auto contents = std::as_bytes(std::span(data, size));
  try {
    const io::SafetensorsHeader header = io::parse_safetensors(contents, "input");
    std::uint64_t at = 0;
    for (const io::TensorEntry& entry : header.tensors) {
      fuzz::require(entry.begin == at && entry.end >= at, "a hole or an overlap");
      fuzz::require(io::tensor_bytes(entry.dtype, entry.shape) == entry.end - at, "a wrong size");
      at = entry.end;
    }
    fuzz::require(header.data_offset + at == size, "bytes that belong to no tensor");
  } catch (const UsageError&) {
    // Refused with an error; anything else, such as a crash, is a finding.
  }
  return 0;
}

}  // namespace fuzz_safetensors

LOCKSTEP_FUZZ_ONE()
