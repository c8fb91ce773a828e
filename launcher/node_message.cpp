#include "launcher/node_message.h"

#include <algorithm>
#include <climits>
#include <csignal>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep {

// Found by its namespace.
static void to_json(nlohmann::json& to, const NodeShare& share) {
  to = {{"nproc_per_node", share.nproc}, {"role", share.role}, {"program", share.program}};
}
static void from_json(const nlohmann::json& from, NodeShare& share) {
  from.at("nproc_per_node").get_to(share.nproc);
  from.at("role").get_to(share.role);
  from.at("program").get_to(share.program);
}

namespace launch {

// A launcher of the same protocol may be older, and not send all of them.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(RankFailure, rank, local_rank, node, pid, attempt,
                                                host, cause, code, time, after_s, message,
                                                restartable, stopped, program, error_file, stacks,
                                                stack, last_lines, standing, note, others, victims,
                                                ended_before, logs)

namespace {

using nlohmann::json;

constexpr int kProtocol = 5;
constexpr int kMaxExitCode = 255;
constexpr std::size_t kMaxHostBytes = 255;

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

// Where a message would be nested deeper, it is not one.
constexpr int kMaxDepth = 8;

// A number outside int's range would become another one.
int int_of(double value, std::string_view name, int min = INT_MIN, int max = INT_MAX) {
  if (!(value >= min && value <= max)) {
    throw UsageError("launch", "another launcher's '{}' ({}) is not a number from {} to {}.", name,
                     value, min, max);
  }
  return static_cast<int>(value);
}

// Makes all of a message's text printable, whatever its fields are, and checks its numbers. Only a
// rank's message and what node 0 says have lines. A failure is JSON again; run ids and roles are
// compared, so they stay as they are.
void check_values(json& value, const std::string& key) {
  if (value.is_number() && key != "time" && key != "after_s") int_of(value.get<double>(), key);
  if (value.is_string() && key != "failure" && key != "run_id" && key != "role") {
    const auto& text = value.get_ref<const std::string&>();
    value = key == "message" || key == "text" ? printable_lines(text) : printable(text);
  }
  if (value.is_array())
    for (json& item : value) check_values(item, key);
  if (!value.is_object()) return;
  for (auto& [name, member] : value.items()) check_values(member, name);
}

json parse_checked(const std::string& text) {
  json value = json::parse(text, [](int depth, json::parse_event_t, json&) {
    if (depth > kMaxDepth) throw UsageError("launch", "another launcher's message is too deep.");
    return true;
  });
  check_values(value, "");
  return value;
}

std::string text_of(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// A message that does not begin with our component gets a prefix that says what it is about.
template <typename Body>
auto refusing(const char* what, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    const std::string text = printable(error.what());
    constexpr std::string_view kOwn = "[launch] ";
    if (text.starts_with(kOwn)) throw UsageError("launch", "{}", text.substr(kOwn.size()));
    throw UsageError("launch", "{} ({}).", what, text);
  }
}

Message::Kind kind_of(const std::string& wanted) {
  const auto found = std::find_if(std::begin(kKindNames), std::end(kKindNames),
                                  [&](const auto& entry) { return wanted == entry.second; });
  if (found == std::end(kKindNames))
    throw UsageError("launch", "unknown message '{}' from another launcher.", wanted);
  return found->first;
}

// No failure, rejection or stop of another host may end this launcher with exit code 0.
void check(const Message& message) {
  using Kind = Message::Kind;
  if (message.failure) int_of(message.failure->code, "failure.code", 1, kMaxExitCode);
  const bool failed =
      message.kind == Kind::kRefused || (message.kind == Kind::kEnd && message.failure.has_value());
  int_of(message.code, "code", failed ? 1 : 0, kMaxExitCode);
  int_of(message.signal, "signal", message.kind == Kind::kStop ? 1 : 0, SIGRTMAX);
  int_of(message.node, "node", 0);
  int_of(message.attempt, "attempt", 0);
  int_of(message.request, "request", 1);
  for (const NodeShare& share : message.nodes)
    int_of(share.nproc, "nproc_per_node", 1, kMaxWorldSize);
  if (message.kind != Kind::kHandshake) return;
  int_of(message.share.nproc, "nproc_per_node", 1, kMaxWorldSize);
  int_of(message.nnodes, "nnodes", 1);
  if (message.host.size() > kMaxHostBytes)
    throw UsageError("launch", "another launcher's 'host' has {} bytes, more than {}.",
                     message.host.size(), kMaxHostBytes);
}

}  // namespace

std::string failure_to_json(const RankFailure& failure) {
  return text_of(failure);
}

RankFailure failure_from_json(const std::string& text) {
  return refusing("another launcher sent a failure that cannot be read", [&] {
    const json from = parse_checked(text);
    auto failure = from.get<RankFailure>();
    from.at("rank").get_to(failure.rank);
    failure.time = time_or_zero(failure.time);
    return failure;
  });
}

std::string encode(const Message& message) {
  json to = {{"lockstep", kProtocol},      {"node", message.node}, {"attempt", message.attempt},
             {"signal", message.signal},   {"code", message.code}, {"text", message.text},
             {"request", message.request}, {"run", message.run}};
  for (const auto& [kind, name] : kKindNames)
    if (kind == message.kind) to["kind"] = name;
  if (message.failure) to["failure"] = failure_to_json(*message.failure);
  if (message.kind == Message::Kind::kStart) to["nodes"] = message.nodes;
  if (message.kind == Message::Kind::kHandshake)
    to.update({{"run_id", message.run_id},
               {"host", message.host},
               {"nnodes", message.nnodes},
               {"share", message.share},
               {"flags", message.flags}});
  return text_of(to) + "\n";
}

Message decode(const std::string& line) {
  return refusing("not a launcher's message", [&] {
    const json from = parse_checked(line);
    Message message;
    if (const int theirs = from.at("lockstep"); theirs != kProtocol) {
      message.kind = Message::Kind::kForeign;
      message.text = fmt::format(
          "[launch] the launchers run different versions of Lockstep (protocols {} and {}). "
          "Install the same version on every host.",
          theirs, kProtocol);
      return message;
    }
    message.kind = kind_of(from.at("kind"));
    from.at("node").get_to(message.node);
    from.at("attempt").get_to(message.attempt);
    from.at("signal").get_to(message.signal);
    from.at("code").get_to(message.code);
    from.at("text").get_to(message.text);
    from.at("request").get_to(message.request);
    from.at("run").get_to(message.run);
    if (const auto failure = from.find("failure"); failure != from.end())
      message.failure = failure_from_json(*failure);
    if (message.kind == Message::Kind::kStart) from.at("nodes").get_to(message.nodes);
    if (message.kind == Message::Kind::kHandshake) {
      from.at("run_id").get_to(message.run_id);
      from.at("host").get_to(message.host);
      from.at("nnodes").get_to(message.nnodes);
      from.at("share").get_to(message.share);
      from.at("flags").get_to(message.flags);
    }
    check(message);
    return message;
  });
}

}  // namespace launch
}  // namespace lockstep
