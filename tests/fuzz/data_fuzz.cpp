// Files of training data: instructions, shards. Each program is compiled for one of them
// (driver.h).
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/json.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/data/shard_format.h"
#include "tests/fuzz/driver.h"

// The reader of instruction files, for a fuzzer: any bytes are either refused by UsageError, or
// read into texts that are the same when they are written as JSON and read again.
namespace fuzz_instructions {

using lockstep::json_quote;
using lockstep::data::Instruction;
using lockstep::data::RecordKind;

std::string messages(const Instruction& item, std::size_t begin, std::size_t end) {
  std::string text = "[";
  for (std::size_t i = begin; i < end; ++i)
    text += std::string(i > begin ? "," : "") + "{\"role\":" + json_quote(item.messages[i].role) +
            ",\"content\":" + json_quote(item.messages[i].content) + "}";
  return text + "]";
}

std::string object(const Instruction& item) {
  const std::size_t all = item.messages.size();
  if (item.kind == RecordKind::kChat && item.given > 0)
    return "{\"prompt\":" + messages(item, 0, item.given) +
           ",\"completion\":" + messages(item, item.given, all) + "}";
  if (item.kind == RecordKind::kChat) return "{\"messages\":" + messages(item, 0, all) + "}";
  if (item.kind == RecordKind::kCompletion)
    return "{\"prompt\":" + json_quote(item.instruction) +
           ",\"completion\":" + json_quote(item.output) + "}";
  return "{\"instruction\":" + json_quote(item.instruction) +
         ",\"input\":" + json_quote(item.input) + ",\"output\":" + json_quote(item.output) +
         ",\"answer\":" + json_quote(item.answer) + "}";
}

std::string written(const std::vector<Instruction>& items) {
  std::string text = "[";
  for (const Instruction& item : items) text += (text.size() > 1 ? "," : "") + object(item);
  return text + "]";
}

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<data::Instruction> items;
  try {
    items = data::parse_instructions(text, "input");
  } catch (const UsageError& error) {
    if (std::string_view(error.what()).find("[instructions] input:") != 0) std::abort();
    return 0;
  }
  if (data::parse_instructions(written(items), "again") != items) std::abort();
  for (const data::Instruction& item : items) {
    data::apply({}, item);
    try {
      data::apply({.response = item.instruction}, item);
    } catch (const UsageError&) {
      // A sample's text is not a template; it may be refused, but not crash.
    }
  }
  return 0;
}

}  // namespace fuzz_instructions

// The reader of token files, for a fuzzer: any bytes are either refused by UsageError or are tokens
// that fill the file exactly.
namespace fuzz_shards {

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

}  // namespace fuzz_shards

LOCKSTEP_FUZZ_ONE()
