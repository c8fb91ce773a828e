#include "lockstep/launch/node_message.h"

#include <algorithm>
#include <climits>
#include <csignal>
#include <utility>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/utf8.h"

namespace lockstep::launch {
namespace {

constexpr int kProtocol = 3;
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

// Without line breaks, which would let a node write lines that look like this launcher's.
std::string one_line(std::string_view text) {
  std::string result = printable(text);
  std::replace(result.begin(), result.end(), '\n', ' ');
  return result;
}

void make_printable(RankFailure& failure) {
  failure.message = printable(failure.message);  // printed with every line indented
  for (std::string* text : {&failure.host, &failure.cause, &failure.program, &failure.error_file,
                            &failure.stacks, &failure.note, &failure.logs})
    *text = one_line(*text);
  for (auto* lines : {&failure.stack, &failure.last_lines, &failure.standing, &failure.others})
    for (std::string& line : *lines) line = one_line(line);
}

bool is_printable(char32_t c) {
  if (c < 0x20) return c == '\n' || c == '\t';
  const bool control = c >= 0x7f && c < 0xa0;
  const bool reorders =
      (c >= 0x200e && c <= 0x200f) || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  return !control && !reorders;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = at;
    const std::size_t size = utf8_size(text.substr(at));
    const char32_t c = size == 0 ? 0 : next_character(text, at);
    if (size > 0 && is_printable(c)) {
      result += text.substr(begin, size);
    } else if (size > 1) {
      result += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[begin]));
      at = begin + 1;
    }
  }
  return result;
}

std::string encode(const Message& message) {
  NodeMembers json = {
      {"lockstep", integer_node(kProtocol)},      {"node", integer_node(message.node)},
      {"attempt", integer_node(message.attempt)}, {"signal", integer_node(message.signal)},
      {"code", integer_node(message.code)},       {"text", text_node(message.text)}};
  for (const auto& [kind, name] : kKindNames) {
    if (kind == message.kind) json.emplace_back("kind", text_node(name));
  }
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
  }
  return to_json(map_node(std::move(json))) + "\n";
}

namespace {

Message::Kind kind_of(const std::string& wanted) {
  const auto found = std::find_if(std::begin(kKindNames), std::end(kKindNames),
                                  [&](const auto& entry) { return wanted == entry.second; });
  if (found == std::end(kKindNames))
    throw UsageError("launch", "unknown message '{}' from another launcher.", printable(wanted));
  return found->first;
}

// No failure, rejection or stop of another host may end this launcher with exit code 0.
void read_outcome(const Node& json, Message& message) {
  using Kind = Message::Kind;
  if (const Entry* failure = json.find("failure")) {
    message.failure = failure_from_json(as_string(failure->value, "failure"));
    int_of(message.failure->code, "failure.code", 1, kMaxExitCode);
    make_printable(*message.failure);
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
    const Node json = parse_json(line, "message");
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
    message.text = printable(text_at(json, "text"));
    read_outcome(json, message);
    if (message.kind == Message::Kind::kStart) {
      for (const Node& share : json.at("nodes").items)
        message.nodes.push_back(share_from_json(share));
    }
    if (message.kind == Message::Kind::kHandshake) {
      message.run_id = text_at(json, "run_id");
      message.host = one_line(text_at(json, "host"));
      if (message.host.size() > kMaxHostBytes)
        throw UsageError("launch", "another launcher's 'host' has {} bytes, more than {}.",
                         message.host.size(), kMaxHostBytes);
      message.nnodes = int_at(json, "nnodes", 1);
      message.share = share_from_json(json.at("share"));
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
