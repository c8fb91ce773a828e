#include "lockstep/launch/node_message.h"

#include <algorithm>
#include <climits>
#include <csignal>
#include <utility>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/printable.h"

namespace lockstep::launch {
namespace {

constexpr int kProtocol = 4;
constexpr int kMaxExitCode = 255;
constexpr std::size_t kMaxHostBytes = 255;

int int_at(const Node& json, const char* key, int min = INT_MIN, int max = INT_MAX) {
  return int_of(as_real(json.at(key), key), key, min, max);
}

std::string text_at(const Node& json, const char* key) {
  return as_string(json.at(key), key);
}

const std::pair<Message::Kind, const char*> kKindNames[] = {
    {Message::Kind::kHandshake, "handshake"},
    {Message::Kind::kRefused, "refused"},
    {Message::Kind::kSay, "say"},
    {Message::Kind::kStart, "start"},
    {Message::Kind::kFailed, "failed"},
    {Message::Kind::kStop, "stop"},
    {Message::Kind::kDown, "down"},
    {Message::Kind::kRestart, "restart"},
    {Message::Kind::kEnd, "end"}};

Node share_to_json(const NodeShare& share) {
  return map_node({{"nproc_per_node", integer_node(share.nproc)}, {"role", text_node(share.role)}});
}

NodeShare share_from_json(const Node& json) {
  return {int_at(json, "nproc_per_node", 1, kMaxWorldSize), text_at(json, "role")};
}

}  // namespace

std::string encode(const Message& message) {
  NodeMembers json = {
      {"lockstep", integer_node(kProtocol)},      {"node", integer_node(message.node)},
      {"attempt", integer_node(message.attempt)}, {"signal", integer_node(message.signal)},
      {"code", integer_node(message.code)},       {"text", text_node(message.text)}};
  for (const auto& [kind, name] : kKindNames) {
    if (kind == message.kind) json.emplace_back("kind", text_node(name));
  }
  if (message.kind == Message::Kind::kStop)
    json.emplace_back("request", integer_node(message.request));
  if (message.failure) json.emplace_back("failure", text_node(failure_to_json(*message.failure)));
  if (message.kind == Message::Kind::kStart) {
    std::vector<Node> nodes;
    for (const NodeShare& share : message.nodes) nodes.push_back(share_to_json(share));
    json.emplace_back("nodes", list_node(std::move(nodes)));
  }
  if (message.kind == Message::Kind::kHandshake) {
    json.emplace_back("run_id", text_node(message.run_id));
    json.emplace_back("host", text_node(message.host));
    json.emplace_back("nnodes", integer_node(message.nnodes));
    json.emplace_back("share", share_to_json(message.share));
    NodeMembers flags;
    for (const auto& [name, value] : message.flags) flags.emplace_back(name, text_node(value));
    json.emplace_back("flags", map_node(std::move(flags)));
  }
  return to_json(map_node(std::move(json))) + "\n";
}

namespace {

// All of a message's text, whatever its fields are. Only a rank's message and what node 0 says have
// lines. A failure is JSON again; run ids and roles are compared, so they stay as they are.
void make_printable(Node& node, bool lines = false) {
  if (node.is(NodeKind::kString))
    node.text = lines ? printable_lines(node.text) : printable(node.text);
  for (Node& item : node.items) make_printable(item);
  for (Entry& entry : node.entries) {
    if (entry.key == "failure" || entry.key == "run_id" || entry.key == "role") continue;
    make_printable(entry.value, entry.key == "message" || entry.key == "text");
  }
}

Node parse_printable(const std::string& text, const std::string& name) {
  Node json = parse_json(text, name);
  make_printable(json);
  return json;
}

Message::Kind kind_of(const std::string& wanted) {
  const auto found = std::find_if(std::begin(kKindNames), std::end(kKindNames),
                                  [&](const auto& entry) { return wanted == entry.second; });
  if (found == std::end(kKindNames))
    throw UsageError("launch", "unknown message '{}' from another launcher.", wanted);
  return found->first;
}

// No failure, rejection or stop of another host may end this launcher with exit code 0.
void read_outcome(const Node& json, Message& message) {
  using Kind = Message::Kind;
  if (const Entry* failure = json.find("failure")) {
    const Node tree = parse_printable(as_string(failure->value, "failure"), "failure");
    message.failure = failure_from_json(to_json(tree));
    int_of(message.failure->code, "failure.code", 1, kMaxExitCode);
  }
  const bool failed =
      message.kind == Kind::kRefused || (message.kind == Kind::kEnd && message.failure.has_value());
  message.code = int_at(json, "code", failed ? 1 : 0, kMaxExitCode);
  const bool stop = message.kind == Kind::kStop;
  message.signal = int_at(json, "signal", stop ? 1 : 0, SIGRTMAX);
}

}  // namespace

Message decode(const std::string& line) {
  try {
    const Node json = parse_printable(line, "message");
    Message message;
    if (const int theirs = int_at(json, "lockstep"); theirs != kProtocol) {
      message.kind = Message::Kind::kForeign;
      message.text = fmt::format(
          "[launch] the launchers run different versions of Lockstep (protocols {} and {}). "
          "Install the same version on every host.",
          theirs, kProtocol);
      return message;
    }
    message.kind = kind_of(text_at(json, "kind"));
    message.node = int_at(json, "node", 0);
    message.attempt = int_at(json, "attempt", 0);
    message.text = text_at(json, "text");
    read_outcome(json, message);
    if (message.kind == Message::Kind::kStart) {
      for (const Node& share : json.at("nodes").items)
        message.nodes.push_back(share_from_json(share));
    }
    if (message.kind == Message::Kind::kStop) message.request = int_at(json, "request", 1);
    if (message.kind == Message::Kind::kHandshake) {
      message.run_id = text_at(json, "run_id");
      message.host = text_at(json, "host");
      if (message.host.size() > kMaxHostBytes)
        throw UsageError("launch", "another launcher's 'host' has {} bytes, more than {}.",
                         message.host.size(), kMaxHostBytes);
      message.nnodes = int_at(json, "nnodes", 1);
      message.share = share_from_json(json.at("share"));
      for (const Entry& flag : as_map(json.at("flags"), "flags").entries)
        message.flags[flag.key] = printable(as_string(flag.value, flag.key));
    }
    return message;
  } catch (const UsageError& error) {
    const std::string text = printable(error.what());
    constexpr std::string_view kOwn = "[launch] ";
    if (text.starts_with(kOwn)) throw UsageError("launch", "{}", text.substr(kOwn.size()));
    throw UsageError("launch", "not a launcher's message ({}).", text);
  }
}

}  // namespace lockstep::launch
