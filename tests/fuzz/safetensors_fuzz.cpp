// The parser of safetensors headers, for a fuzzer: any bytes are either refused by UsageError or
// read into tensors that cover the data exactly.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "lockstep/io/safetensors.h"

int fuzz_one(const std::uint8_t* data, std::size_t size);

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const auto contents = std::as_bytes(std::span(data, size));
  try {
    const io::SafetensorsHeader header = io::parse_safetensors(contents, "input");
    std::uint64_t at = 0;
    for (const io::TensorEntry& entry : header.tensors) {
      if (entry.begin != at || entry.end < at) std::abort();
      if (io::tensor_bytes(entry.dtype, entry.shape) != entry.end - at) std::abort();
      at = entry.end;
    }
    if (header.data_offset + at != size) std::abort();
  } catch (const UsageError&) {
    // Refused in words; anything else, a crash included, is a finding.
  }
  return 0;
}
