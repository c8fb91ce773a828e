#include "launcher/node_connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {
namespace {

constexpr std::size_t kMaxLine = 1u << 20;
constexpr std::size_t kMaxFirstLine = 4u << 10;  // before a peer has joined
constexpr std::size_t kMaxUnsentToNode = 16u << 20;

void tune(int fd) {
  const auto set = [fd](int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(kLostAfter.count()));
}

// The address of one end of a socket; `ask` is ::getsockname or ::getpeername.
std::string address_of(int fd, int (*ask)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  return ask(fd, address, &size) == 0 ? address_text(address) : "?";
}

}  // namespace

Connection::Connection(EventLoop& loop, Fd socket, std::unique_ptr<SecureChannel> channel,
                       Handlers handlers)
    : loop_(loop),
      socket_(std::move(socket)),
      channel_(std::move(channel)),
      handlers_(std::move(handlers)) {
  set_nonblocking(socket_.get());
  tune(socket_.get());
  loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t events) { on_event(events); });
  if (!channel_) return;
  channel_->start(outgoing_);
  write_some();
}

Connection::~Connection() {
  if (socket_) loop_.forget(socket_.get());
}

std::string Connection::local_address() const {
  return address_of(socket_.get(), ::getsockname);
}

std::string Connection::peer_address() const {
  return address_of(socket_.get(), ::getpeername);
}

void Connection::on_event(std::uint32_t events) {
  const std::weak_ptr<int> alive = alive_;
  if ((events & EPOLLOUT) != 0) write_some();
  if (!alive.expired() && socket_ && (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0)
    read_some();
}

void Connection::read_some() {
  std::array<char, 64u << 10> buffer;
  const ssize_t n = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    return close({errno == ETIMEDOUT ? "nothing was heard from it" : std::strerror(errno)});
  }
  if (n == 0) return close({"the connection was closed"});
  if (take({buffer.data(), static_cast<std::size_t>(n)})) read_messages();
}

// A launcher without a secret sends JSON, one with a secret TLS. Each recognises the other by the
// first byte, and answers in the other's protocol.
bool Connection::is_other_protocol(char first) {
  constexpr char kTlsAlert = 0x15;
  constexpr char kTlsHandshake = 0x16;
  if (channel_ && first == '{') {
    outgoing_ += std::string_view("\x15\x03\x03\x00\x02\x02\x28", 7);  // handshake_failure
    write_some();
    close({"it does not use TLS", Closing::Secret::kPeerHasNone});
    return true;
  }
  if (channel_ || (first != kTlsAlert && first != kTlsHandshake)) return false;
  outgoing_ += encode({.kind = Message::Kind::kRefused, .code = 2});
  write_some();
  close({"it uses TLS", Closing::Secret::kPeerHasOne});
  return true;
}

bool Connection::take(std::string_view bytes) {
  if (std::exchange(silent_, false) && is_other_protocol(bytes.front())) return false;
  if (!channel_) {
    incoming_ += bytes;
    return true;
  }
  const bool good = channel_->receive(bytes, incoming_, outgoing_);
  write_some();  // an alert, if the handshake failed
  if (!good)
    close({channel_->problem(),
           channel_->wrong_key() ? Closing::Secret::kDiffers : Closing::Secret::kFine});
  return good;
}

void Connection::read_messages() {
  const std::weak_ptr<int> alive = alive_;
  std::size_t used = 0;
  for (std::size_t size = 1; size > 0 && used < incoming_.size(); used += size) {
    std::optional<Message> message;
    try {
      size = read_one(std::string_view(incoming_).substr(used), message);
    } catch (const UsageError& error) {
      return close({printable(error.what())});
    }
    if (message) handlers_.message(*message);
    if (alive.expired() || !socket_) return;
  }
  incoming_.erase(0, used);
}

// Passes a frame to its handler, or reads a line. Returns its size, 0 if it is incomplete.
std::size_t Connection::read_one(std::string_view bytes, std::optional<Message>& message) {
  if (trusted_ && begins_store_frame(bytes.front())) {
    StoreFrame frame;
    const std::size_t size = decode(bytes, frame);
    if (size > 0) handlers_.frame(frame);
    return size;
  }
  const std::size_t max_line = trusted_ ? kMaxLine : kMaxFirstLine;
  const std::size_t end = std::min(bytes.find('\n'), bytes.size());
  if (end > max_line) throw UsageError("launch", "it sent a line of more than {} bytes", max_line);
  if (end == bytes.size()) return 0;
  message = decode(std::string(bytes.substr(0, end)));
  return end + 1;
}

void Connection::send_bytes(std::string_view bytes) {
  if (!socket_) return;
  if (channel_) {
    channel_->send(bytes, outgoing_);
  } else {
    outgoing_ += bytes;
  }
  write_some();
}

void Connection::write_some() {
  while (!outgoing_.empty()) {
    const ssize_t n = ::send(socket_.get(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      // The event of the reading side reports an error, and the end of a peer that does not read.
      if (errno != EAGAIN) outgoing_.clear();
      if (outgoing_.size() > kMaxUnsentToNode) ::shutdown(socket_.get(), SHUT_RDWR);
      break;
    }
    outgoing_.erase(0, static_cast<std::size_t>(n));
  }
  const std::uint32_t events = outgoing_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
  loop_.change(socket_.get(), events);
}

void Connection::close(Closing closing) {
  if (!socket_) return;
  loop_.forget(socket_.get());
  // Closing with unread data resets the connection, and the peer may lose the last message.
  std::array<char, 4096> rest;
  for (int i = 0; i < 16 && ::recv(socket_.get(), rest.data(), rest.size(), 0) > 0; ++i) {
  }
  socket_.reset();
  const auto closed = handlers_.closed;  // the handler may destroy this object
  closed(closing);
}

}  // namespace lockstep::launch

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

// With defaults, because an older launcher with the same protocol may not send all fields.
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

constexpr int kMaxDepth = 8;  // of JSON; no message is nested deeper

// Converts without wrapping a number that does not fit an int.
int int_of(double value, std::string_view name, int min = INT_MIN, int max = INT_MAX) {
  if (!(value >= min && value <= max)) {
    throw UsageError("launch", "another launcher's '{}' ({}) is not a number from {} to {}.", name,
                     value, min, max);
  }
  return static_cast<int>(value);
}

// Makes all text of a message printable, whatever its fields, and checks its numbers. Only a rank's
// message and node 0's text have several lines. A failure is JSON itself, and run ids and roles are
// compared, so those stay unchanged.
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

// Turns any exception of `body` into a UsageError; one that is not ours begins with `what`.
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

// A failure, rejection or stop of another host must not end this launcher with exit code 0.
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
      message.kind = Message::Kind::kOtherVersion;
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
