// The strict JSON cursor of lockstep/core, beside a JSON library: it accepts nothing that the
// library refuses, refuses nothing that the library accepts (but for its bound on nesting), and
// what json_quote() writes comes back.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "lockstep/core/json.h"
#include "lockstep/core/text.h"
#include "tests/fuzz/driver.h"

namespace {

using lockstep::JsonError;
using lockstep::JsonReader;
using lockstep::fuzz::require;

constexpr int kDepth = 100;  // the reader's own bound is a little higher

// Whether the text is one value, and how deep it nests at most.
bool library_accepts(std::string_view text, int& deepest) {
  int depth = 0;
  const auto count = [&](int, nlohmann::json::parse_event_t event, nlohmann::json&) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start)
      deepest = std::max(deepest, ++depth);
    if (event == Event::object_end || event == Event::array_end) --depth;
    return true;
  };
  return !nlohmann::json::parse(text, count, false).is_discarded();
}

bool reader_accepts(std::string_view text) {
  try {
    JsonReader json(text);
    json.skip();
    json.end();
    return true;
  } catch (const JsonError& error) {
    require(error.offset() <= text.size(), "an error outside of the text");
    return false;
  }
}

std::optional<std::string> read_string(std::string_view text) {
  try {
    JsonReader json(text);
    std::string value = json.string();
    json.end();
    return value;
  } catch (const JsonError&) {
    return std::nullopt;
  }
}

// The typed calls, in whatever order the text suggests.
void walk(JsonReader& json) {
  std::string key;
  json.enter_object();
  while (json.next_key(key)) {
    if (key.size() % 4 == 0) {
      json.enter_array();
      while (json.next_element()) json.unsigned_integer();
    } else if (key.size() % 4 == 1) {
      json.string();
    } else if (key.size() % 4 == 2) {
      walk(json);
    } else {
      json.skip();
    }
  }
}

}  // namespace

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const bool ours = reader_accepts(text);
  int deepest = 0;
  const bool theirs = library_accepts(text, deepest);
  // A number too large for a double is a matter of its range, not of the grammar. The library
  // passes over a byte order mark and takes a zero byte for the end.
  const bool lenient = text.starts_with("\xEF\xBB\xBF") || text.find('\0') != text.npos;
  if (ours && text.find_first_of("eE0123456789") == text.npos)
    require(theirs, "read, though it is not JSON");
  if (theirs && deepest < kDepth && !lenient) require(ours, "refused, though it is JSON");
  try {
    JsonReader json(text);
    walk(json);
    json.end();
  } catch (const JsonError&) {
    // Refused with an error.
  }
  if (!lockstep::invalid_utf8(text))
    require(read_string(lockstep::json_quote(text)) == text, "quoted, but not brought back");
  return 0;
}
