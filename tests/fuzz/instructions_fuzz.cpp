// The reader of instruction files, for a fuzzer: any bytes are either refused by UsageError, or
// read into texts that are the same when they are written as JSON and read again.
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/json.h"
#include "lockstep/data/instruction_file.h"
#include "tests/fuzz/driver.h"

namespace {

std::string written(const std::vector<lockstep::data::Instruction>& items) {
  using lockstep::json_quote;
  std::string text = "[";
  for (const auto& item : items) {
    if (text.size() > 1) text += ",";
    text += "{\"instruction\":" + json_quote(item.instruction) +
            ",\"input\":" + json_quote(item.input) + ",\"output\":" + json_quote(item.output) +
            ",\"answer\":" + json_quote(item.answer) + "}";
  }
  return text + "]";
}

}  // namespace

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
