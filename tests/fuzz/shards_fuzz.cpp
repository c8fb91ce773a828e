// The reader of token files, for a fuzzer: any bytes are either refused by UsageError or are tokens
// that fill the file exactly.
#include <cstdlib>
#include <span>

#include "lockstep/core/error.h"
#include "lockstep/data/shard_format.h"
#include "tests/fuzz/driver.h"

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using data::TokenFormat;
  const auto contents = std::as_bytes(std::span(data, size));
  for (const char* name : {"x.bin", "train.bin"})
    for (const auto format :
         {TokenFormat::kAuto, TokenFormat::kLlmc16, TokenFormat::kLlmc32, TokenFormat::kNanogpt}) {
      try {
        const data::TokenLayout layout = data::parse_token_file(contents, size, name, format);
        if (layout.data_offset + layout.count * layout.token_bytes != size) std::abort();
        if (layout.token_bytes != 2 && layout.token_bytes != 4) std::abort();
        if (format != TokenFormat::kAuto && layout.format != format) std::abort();
      } catch (const UsageError&) {
        // Refused with an error; anything else, such as a crash, is a finding.
      }
    }
  return 0;
}
