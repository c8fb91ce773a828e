// The parser of safetensors headers, for a fuzzer: any bytes are either refused by UsageError or
// read into tensors that cover the data exactly.
#include <span>

#include "lockstep/io/safetensors.h"
#include "tests/fuzz/driver.h"

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
