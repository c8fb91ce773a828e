// Any bytes, through the readers of YAML and JSON and through what reads their trees. A reader may
// refuse with UsageError; anything else, a crash or a tree that does not survive being written and
// read again is a defect.
#include <string>

#include "launcher/flags.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/train/config.h"
#include "tests/fuzz/driver.h"

namespace {

using lockstep::Node;
using lockstep::UsageError;
using lockstep::fuzz::require;

template <typename Read>
void attempt(Read&& read) {
  try {
    read();
  } catch (const UsageError& error) {
    require(std::string(error.what()).rfind("[config] ", 0) == 0, "an error without its component");
  }
}

bool has_special_number(const Node& node) {
  if (node.is(lockstep::NodeKind::kReal) && !(node.real - node.real == 0)) return true;
  for (const Node& item : node.items)
    if (has_special_number(item)) return true;
  for (const lockstep::Entry& entry : node.entries)
    if (has_special_number(entry.value)) return true;
  return false;
}

void check_tree(const Node& root) {
  if (!has_special_number(root)) {
    const std::string text = to_json(root);
    require(same_value(root, lockstep::parse_json(text, "again", {.bytes = 64u << 20})),
            "a tree that JSON does not bring back");
  }
  attempt([&] {
    const auto config = lockstep::train::resolve_config({.file = root});
    lockstep::parse_json(lockstep::train::config_json(config), "record", {.bytes = 64u << 20});
  });
  attempt([&] { lockstep::launch::read_accelerate_config(root); });
}

}  // namespace

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const lockstep::DocumentLimits limits{.bytes = 1u << 16, .depth = 32, .nodes = 2000};
  attempt([&] { check_tree(lockstep::parse_yaml(text, "fuzz.yaml", limits)); });
  attempt([&] { check_tree(lockstep::parse_json(text, "fuzz.json", limits)); });
  return 0;
}
