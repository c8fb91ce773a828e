// Documents: JSON, YAML and what is read from their trees, the state of a training, and what a
// dashboard sends. Each program is compiled for one of them (driver.h).
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "launcher/flags.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/json.h"
#include "lockstep/core/text.h"
#include "lockstep/train/config.h"
#include "lockstep/train/trainer_state.h"
#include "observe/dashboard/http.h"
#include "observe/dashboard/run_summary.h"
#include "tests/fuzz/driver.h"

namespace {

using namespace lockstep;
using fuzz::require;

// Runs `read`, which may refuse with an error that begins like this.
template <typename Read>
void attempt(std::string_view component, Read&& read) {
  try {
    read();
  } catch (const UsageError& error) {
    require(std::string_view(error.what()).starts_with(component),
            "an error without its component");
  }
}

}  // namespace

// The strict JSON cursor of lockstep/core, beside a JSON library: it accepts nothing that the
// library refuses, refuses nothing that the library accepts (but for its bound on nesting), and
// what json_quote() writes comes back.
namespace fuzz_json {

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
  if (!invalid_utf8(text))
    require(read_string(json_quote(text)) == text, "quoted, but not brought back");
  return 0;
}

}  // namespace fuzz_json

// Any bytes, through the readers of YAML and JSON and through what reads their trees. A reader may
// refuse with UsageError; anything else, a crash or a tree that does not survive being written and
// read again is a defect.
namespace fuzz_yaml {

bool has_special_number(const Node& node) {
  if (node.is(NodeKind::kReal) && !(node.real - node.real == 0)) return true;
  for (const Node& item : node.items)
    if (has_special_number(item)) return true;
  for (const Entry& entry : node.entries)
    if (has_special_number(entry.value)) return true;
  return false;
}

void check_tree(const Node& root) {
  if (!has_special_number(root)) {
    const std::string text = to_json(root);
    require(same_value(root, parse_json(text, "again", {.bytes = 64u << 20})),
            "a tree that JSON does not bring back");
  }
  attempt("[config] ", [&] {
    const auto config = train::resolve_config({.file = root});
    parse_json(train::config_json(config), "record", {.bytes = 64u << 20});
  });
  attempt("[config] ", [&] { launch::read_accelerate_config(root); });
}

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const DocumentLimits limits{.bytes = 1u << 16, .depth = 32, .nodes = 2000};
  attempt("[config] ", [&] { check_tree(parse_yaml(text, "fuzz.yaml", limits)); });
  attempt("[config] ", [&] { check_tree(parse_json(text, "fuzz.json", limits)); });
  return 0;
}

}  // namespace fuzz_yaml

// trainer_state.json and sampler.json of a checkpoint: what is read is the same when it is written
// and read again; the rest is refused with an error.
namespace fuzz_trainer_state {

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace train;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  attempt("[", [&] {
    const std::string again = trainer_state_text(parse_trainer_state(text, "input"));
    require(trainer_state_text(parse_trainer_state(again, "again")) == again,
            "a state that changes when it is written");
  });
  attempt("[", [&] {
    const std::string again = data_position_text(parse_data_position(text, "input"));
    require(data_position_text(parse_data_position(again, "again")) == again,
            "a position that changes when it is written");
  });
  return 0;
}

}  // namespace fuzz_trainer_state

// What a dashboard sends, drawn by `lockstep monitor`: whatever it is, the terminal gets lines that
// fit and no control characters. The same bytes as a Host header and as an address are refused, or
// are something that a foreign page cannot send.
namespace fuzz_snapshot {

void draw(const std::string& text) {
  constexpr int kColumns = 40;
  std::string drawn;
  try {
    const Node snapshot = dashboard::parse_snapshot(text);
    drawn = dashboard::terminal_view(snapshot, {.columns = kColumns, .rows = 20});
    dashboard::status_line(snapshot);
  } catch (const CommError&) {
    return;  // not JSON
  }
  require(!invalid_utf8(drawn), "what is not UTF-8 is printed");
  std::istringstream lines(drawn);
  for (std::string line; std::getline(lines, line);) {
    require(character_count(line) <= kColumns, "a line that does not fit");
    for (std::size_t at = 0; at < line.size();) {
      const char32_t character = next_character(line, at);
      require(character >= 0x20 && (character < 0x7f || character >= 0xa0), "a control character");
    }
  }
}

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  draw(text);
  if (dashboard::host_allowed(text, "127.0.0.1")) {
    const char first = static_cast<char>(text[0] | 0x20);
    require(first == 'l' || text.starts_with("127.") || text.starts_with("["), "a foreign Host");
  }
  try {
    const dashboard::DashboardUrl url = dashboard::parse_dashboard_url(text);
    require(url.port > 0 && url.port <= 65535 && !url.host.empty(), "an address of nothing");
    for (const char c : url.host + url.token)
      require(c != '\r' && c != '\n' && c != ' ', "an address that adds a header");
  } catch (const UsageError&) {
  }
  try {
    dashboard::parse_listen_address(text, "--dashboard");
  } catch (const UsageError&) {
  }
  return 0;
}

}  // namespace fuzz_snapshot

LOCKSTEP_FUZZ_ONE()
