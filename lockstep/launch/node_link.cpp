#include "lockstep/launch/node_link.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kProtocol = 1;
constexpr std::size_t kLongestLine = 1u << 20;
constexpr milliseconds kHelloTimeout{10'000};
constexpr milliseconds kConnectTimeout{5000};
constexpr milliseconds kRetryDelay{200};
constexpr milliseconds kNodeZeroSlack{5000};
constexpr milliseconds kFirstProgress{3000};
constexpr milliseconds kProgress{10'000};

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

// The numeric address in `storage`, an IPv4 one without its IPv6 wrapping.
std::string address_text(const sockaddr_storage& storage) {
  char text[INET6_ADDRSTRLEN] = "";
  if (storage.ss_family == AF_INET6) {
    const auto& address = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&address)) {
      ::inet_ntop(AF_INET, address.s6_addr + 12, text, sizeof text);
    } else {
      ::inet_ntop(AF_INET6, &address, text, sizeof text);
    }
  } else {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, text,
                sizeof text);
  }
  return text;
}

std::string own_address_of(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return {};
  return address_text(storage);
}

// A connect to a local port nobody listens on can meet itself when the kernel picks that very port
// as its own end.
bool met_itself(int fd) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_size = sizeof own;
  socklen_t peer_size = sizeof peer;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
         own_size == peer_size && std::memcmp(&own, &peer, own_size) == 0;
}

bool is_loopback(const std::string& address) {
  return address.rfind("127.", 0) == 0 || address == "::1";
}

double seconds_since(EventLoop::Clock::time_point start) {
  return std::chrono::duration<double>(EventLoop::Clock::now() - start).count();
}

// A real number outside of int's range would be undefined behaviour, and another program may send
// it.
int int_at(const Json& json, const char* key) {
  const double value = json.at(key).get<double>();
  if (!(value >= INT_MIN && value <= INT_MAX)) {
    throw UsageError("launch", "another launcher's '{}' ({}) is not a number from {} to {}.", key,
                     value, INT_MIN, INT_MAX);
  }
  return static_cast<int>(value);
}

const std::pair<Message::Kind, const char*> kKindNames[] = {
    {Message::Kind::kHello, "hello"},   {Message::Kind::kRefused, "refused"},
    {Message::Kind::kSay, "say"},       {Message::Kind::kStart, "start"},
    {Message::Kind::kFailed, "failed"}, {Message::Kind::kStop, "stop"},
    {Message::Kind::kDown, "down"},     {Message::Kind::kRestart, "restart"},
    {Message::Kind::kEnd, "end"}};

}  // namespace

// ---------------------------------------------------------------- messages

std::string encode(const Message& message) {
  Json json{{"lockstep", kProtocol},    {"node", message.node}, {"attempt", message.attempt},
            {"signal", message.signal}, {"code", message.code}, {"text", message.text}};
  for (const auto& [kind, name] : kKindNames) {
    if (kind == message.kind) json["kind"] = name;
  }
  if (message.failure) json["failure"] = failure_to_json(*message.failure);
  if (message.kind == Message::Kind::kHello) {
    json["run_id"] = message.run_id;
    json["host"] = message.host;
    json["nnodes"] = message.nnodes;
    json["nproc_per_node"] = message.nproc_per_node;
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Message decode(const std::string& line) {
  try {
    const Json json = Json::parse(line);
    Message message;
    if (const int theirs = int_at(json, "lockstep"); theirs != kProtocol) {
      message.kind = Message::Kind::kForeign;
      message.text = fmt::format(
          "[launch] launchers of different versions of Lockstep met (protocols {} and {}). Install "
          "the same version on every host.",
          theirs, kProtocol);
      return message;
    }
    const std::string wanted = json.at("kind").get<std::string>();
    const auto found = std::find_if(std::begin(kKindNames), std::end(kKindNames),
                                    [&](const auto& entry) { return wanted == entry.second; });
    if (found == std::end(kKindNames))
      throw UsageError("launch", "unknown message '{}' from another launcher.", wanted);
    message.kind = found->first;
    message.node = int_at(json, "node");
    message.attempt = int_at(json, "attempt");
    message.signal = int_at(json, "signal");
    message.code = int_at(json, "code");
    json.at("text").get_to(message.text);
    if (json.contains("failure"))
      message.failure = failure_from_json(json["failure"].get<std::string>());
    if (message.kind == Message::Kind::kHello) {
      json.at("run_id").get_to(message.run_id);
      json.at("host").get_to(message.host);
      message.nnodes = int_at(json, "nnodes");
      message.nproc_per_node = int_at(json, "nproc_per_node");
    }
    return message;
  } catch (const Json::exception& error) {
    throw UsageError("launch", "not a launcher's message ({}).", error.what());
  }
}

// ---------------------------------------------------------------- Connection

Connection::Connection(EventLoop& loop, Fd socket, Handlers handlers)
    : loop_(loop), socket_(std::move(socket)), handlers_(std::move(handlers)) {
  set_nonblocking(socket_.get());
  tune(socket_.get());
  loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t events) { on_event(events); });
}

Connection::~Connection() {
  if (socket_) loop_.forget(socket_.get());
}

std::string Connection::local_address() const {
  return own_address_of(socket_.get());
}

void Connection::on_event(std::uint32_t events) {
  const std::weak_ptr<int> alive = alive_;
  if ((events & EPOLLOUT) != 0) write_some();
  if (!alive.expired() && socket_ && (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0)
    read_some();
}

void Connection::read_some() {
  const std::weak_ptr<int> alive = alive_;
  std::array<char, 16u << 10> buffer;
  const ssize_t n = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    return close(errno == ETIMEDOUT ? "nothing was heard from it" : std::strerror(errno));
  }
  if (n == 0) return close("the connection was closed");
  incoming_.append(buffer.data(), static_cast<std::size_t>(n));
  for (;;) {
    const std::size_t end = incoming_.find('\n');
    if (end == std::string::npos) break;
    const std::string line = incoming_.substr(0, end);
    incoming_.erase(0, end + 1);
    Message message;
    try {
      message = decode(line);
    } catch (const UsageError& error) {
      return close(error.what());
    }
    handlers_.message(message);
    if (alive.expired() || !socket_) return;
  }
  if (incoming_.size() > kLongestLine) close("it sent a line without an end");
}

void Connection::send(const Message& message) {
  if (!socket_) return;
  outgoing_ += encode(message);
  write_some();
}

void Connection::write_some() {
  while (!outgoing_.empty()) {
    const ssize_t n = ::send(socket_.get(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      // An error is reported by the reading side, which has an event for it.
      if (errno != EAGAIN) outgoing_.clear();
      break;
    }
    outgoing_.erase(0, static_cast<std::size_t>(n));
  }
  const std::uint32_t wish = outgoing_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
  loop_.change(socket_.get(), wish);
}

void Connection::close(const std::string& why) {
  if (!socket_) return;
  loop_.forget(socket_.get());
  socket_.reset();
  const auto closed = handlers_.closed;  // the handler may destroy this object
  closed(why);
}

// ---------------------------------------------------------------- Hub

Hub::Hub(EventLoop& loop, const LaunchPlan& plan, Fd listener, Handlers handlers)
    : loop_(loop),
      plan_(plan),
      listener_(std::move(listener)),
      handlers_(std::move(handlers)),
      started_(EventLoop::Clock::now()) {
  loop_.watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { on_connect(); });
  overdue_timer_ = loop_.after(plan_.rendezvous_timeout, [this] {
    overdue_timer_ = 0;
    handlers_.overdue(fmt::format(
        "[launch] only {} of {} launchers came within {} s; missing: node ranks {}. Start "
        "`lockstep run` there with --nnodes={} --node-rank=... --master-addr={} --master-port={}, "
        "and "
        "check that the port can be reached.",
        guest_of_node_.size() + 1, plan_.nnodes, plan_.rendezvous_timeout.count(), missing(),
        plan_.nnodes, plan_.master_addr, plan_.master_port));
  });
  progress_timer_ = loop_.after(kFirstProgress, [this] { report_progress(); });
}

Hub::~Hub() {
  for (auto& [number, guest] : guests_) loop_.cancel(guest.hello_timer);
  for (EventLoop::TimerId* timer : {&overdue_timer_, &progress_timer_, &goodbye_timer_})
    loop_.cancel(*timer);
  if (listener_) loop_.forget(listener_.get());
}

void Hub::on_connect() {
  Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket) return;
  const std::uint64_t number = ++last_guest_;
  Guest& guest = guests_[number];
  guest.connection = std::make_unique<Connection>(
      loop_, std::move(socket),
      Connection::Handlers{[this, number](const Message& message) { on_message(number, message); },
                           [this, number](const std::string& why) { on_closed(number, why); }});
  guest.hello_timer = loop_.after(kHelloTimeout, [this, number] { drop(number); });
}

void Hub::drop(std::uint64_t number) {
  const auto found = guests_.find(number);
  if (found == guests_.end()) return;
  loop_.cancel(found->second.hello_timer);
  // Posted: this may run inside a handler of the connection.
  std::shared_ptr<Connection> last(std::move(found->second.connection));
  loop_.post([last] {});
  guests_.erase(found);
}

void Hub::on_message(std::uint64_t number, const Message& message) {
  const auto found = guests_.find(number);
  if (found == guests_.end()) return;
  const int node = found->second.node;
  if (node >= 0) {
    handlers_.message(node, message);
  } else if (message.kind == Message::Kind::kHello) {
    on_hello(number, message);
  } else if (message.kind == Message::Kind::kForeign) {
    refuse(number, message.text);
  } else {
    drop(number);
  }
}

std::string Hub::reason_to_refuse(const Message& hello) const {
  const auto differs = [&](const char* flag, const auto& theirs, const auto& ours) {
    return fmt::format(
        "[launch] node rank {} on {} was started with {}={}, node 0 with {}={}. Use "
        "the same value on every host.",
        hello.node, hello.host, flag, theirs, flag, ours);
  };
  if (hello.run_id != plan_.run_id) return differs("--rdzv-id", hello.run_id, plan_.run_id);
  if (hello.nnodes != plan_.nnodes) return differs("--nnodes", hello.nnodes, plan_.nnodes);
  if (hello.nproc_per_node != plan_.nproc_per_node)
    return differs("--nproc-per-node", hello.nproc_per_node, plan_.nproc_per_node);
  if (hello.node < 1 || hello.node >= plan_.nnodes)
    return fmt::format("[launch] --node-rank={} on {} is not between 1 and {}.", hello.node,
                       hello.host, plan_.nnodes - 1);
  const auto taken = guest_of_node_.find(hello.node);
  if (taken != guest_of_node_.end())
    return fmt::format(
        "[launch] --node-rank={} of {} is already taken by {}. Give every host its own "
        "node rank.",
        hello.node, hello.host, guests_.at(taken->second).host);
  return {};
}

void Hub::refuse(std::uint64_t number, const std::string& reason) {
  Guest& guest = guests_.at(number);
  loop_.cancel(guest.hello_timer);
  handlers_.say(reason);
  Message answer;
  answer.kind = Message::Kind::kRefused;
  answer.text = reason;
  answer.code = 2;
  guest.connection->send(answer);
  // It hangs up when it has read that; should it not, this does.
  guest.hello_timer = loop_.after(kHelloTimeout, [this, number] { drop(number); });
}

void Hub::on_hello(std::uint64_t number, const Message& hello) {
  Guest& guest = guests_.at(number);
  loop_.cancel(guest.hello_timer);
  const std::string refusal = reason_to_refuse(hello);
  if (!refusal.empty()) return refuse(number, refusal);
  guest.node = hello.node;
  guest.host = hello.host;
  guest_of_node_[hello.node] = number;
  Message answer;
  answer.kind = Message::Kind::kSay;
  guest.connection->send(answer);
  check_complete();
}

void Hub::on_closed(std::uint64_t number, const std::string& why) {
  const auto found = guests_.find(number);
  if (found == guests_.end()) return;
  const int node = found->second.node;
  const std::string host = found->second.host;
  drop(number);
  if (node < 0) return;
  guest_of_node_.erase(node);
  if (on_goodbyes_) {
    if (guest_of_node_.empty()) {
      loop_.cancel(goodbye_timer_);
      loop_.post(std::exchange(on_goodbyes_, nullptr));
    }
  } else if (listener_) {
    handlers_.say(fmt::format("[launch] node rank {} on {} left again: {}.", node, host, why));
  } else {
    handlers_.lost(node, host, why);
  }
}

std::string Hub::missing() const {
  std::string text;
  for (int node = 1; node < plan_.nnodes; ++node) {
    if (guest_of_node_.count(node) == 0)
      text += fmt::format("{}{}", text.empty() ? "" : ", ", node);
  }
  return text;
}

void Hub::report_progress() {
  progress_timer_ = loop_.after(kProgress, [this] { report_progress(); });
  Message message;
  message.kind = Message::Kind::kSay;
  message.text = fmt::format(
      "[launch] waiting for node ranks {} at {}:{} ({} of {} are here, {:.0f} s "
      "of {} s).",
      missing(), plan_.master_addr, plan_.master_port, guest_of_node_.size() + 1, plan_.nnodes,
      seconds_since(started_), plan_.rendezvous_timeout.count());
  handlers_.say(message.text);
  broadcast(message);
}

void Hub::check_complete() {
  if (static_cast<int>(guest_of_node_.size()) + 1 < plan_.nnodes) return;
  loop_.cancel(overdue_timer_);
  loop_.cancel(progress_timer_);
  loop_.forget(listener_.get());
  listener_.reset();
  std::vector<std::uint64_t> strangers;
  for (const auto& [number, guest] : guests_) {
    if (guest.node < 0) strangers.push_back(number);
  }
  for (const std::uint64_t number : strangers) drop(number);
  loop_.post([this] { handlers_.complete(); });
}

void Hub::broadcast(const Message& message) {
  for (const auto& [node, number] : guest_of_node_) guests_.at(number).connection->send(message);
}

std::string Hub::local_address() const {
  std::string address;
  for (const auto& [node, number] : guest_of_node_) {
    const std::string own = guests_.at(number).connection->local_address();
    if (address.empty() || is_loopback(address)) address = own;
  }
  return address;
}

void Hub::wait_for_goodbyes(milliseconds patience, EventLoop::Task done) {
  if (guest_of_node_.empty()) return loop_.post(std::move(done));
  on_goodbyes_ = std::move(done);
  goodbye_timer_ = loop_.after(patience, [this] {
    goodbye_timer_ = 0;
    loop_.post(std::exchange(on_goodbyes_, nullptr));
  });
}

// ---------------------------------------------------------------- Spoke

Spoke::Spoke(EventLoop& loop, const LaunchPlan& plan, std::string host, Handlers handlers)
    : loop_(loop), plan_(plan), host_(std::move(host)), handlers_(std::move(handlers)) {}

Spoke::~Spoke() {
  for (EventLoop::TimerId* timer :
       {&overdue_timer_, &retry_timer_, &answer_timer_, &progress_timer_})
    loop_.cancel(*timer);
  if (pending_) loop_.forget(pending_.get());
}

void Spoke::connect() {
  started_ = EventLoop::Clock::now();
  overdue_timer_ = loop_.after(plan_.rendezvous_timeout, [this] {
    overdue_timer_ = 0;
    handlers_.failed(1, fmt::format("[launch] node 0's launcher was not found at {}:{} within {} s "
                                    "({}). Start it there with "
                                    "--node-rank=0, and check --master-addr, --master-port and "
                                    "that the port can be reached.",
                                    plan_.master_addr, plan_.master_port,
                                    plan_.rendezvous_timeout.count(), last_problem_));
  });
  progress_timer_ = loop_.after(kFirstProgress, [this] { report_progress(); });
  try_now();
}

void Spoke::report_progress() {
  progress_timer_ = 0;
  if (welcome_) return;  // from now on node 0 tells
  progress_timer_ = loop_.after(kProgress, [this] { report_progress(); });
  handlers_.say(fmt::format("[launch] waiting for node rank 0 at {}:{} ({}; {:.0f} s of {} s).",
                            plan_.master_addr, plan_.master_port, last_problem_,
                            seconds_since(started_), plan_.rendezvous_timeout.count()));
}

void Spoke::try_later(const std::string& why) {
  last_problem_ = why;
  loop_.cancel(answer_timer_);
  loop_.cancel(retry_timer_);
  if (pending_) loop_.forget(pending_.get());
  pending_.reset();
  std::shared_ptr<Connection> last(std::move(connection_));
  loop_.post([last] {});  // this may run inside one of its handlers
  retry_timer_ = loop_.after(kRetryDelay, [this] {
    retry_timer_ = 0;
    try_now();
  });
}

void Spoke::try_now() {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(plan_.master_port);
  const int error = ::getaddrinfo(plan_.master_addr.c_str(), port.c_str(), &hints, &found);
  if (error != 0) return try_later(fmt::format("its name: {}", ::gai_strerror(error)));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  // A name may have several addresses and answer at one: each try begins with the next.
  std::vector<const addrinfo*> order;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) order.push_back(at);
  std::rotate(order.begin(), order.begin() + static_cast<long>(tries_++ % order.size()),
              order.end());
  std::string problem = "no address";
  for (const addrinfo* at : order) {
    Fd socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) continue;
    if (::connect(socket.get(), at->ai_addr, at->ai_addrlen) != 0 && errno != EINPROGRESS) {
      problem = std::strerror(errno);
      continue;
    }
    pending_ = std::move(socket);
    answer_timer_ = loop_.after(kConnectTimeout, [this] { try_later("it does not answer"); });
    loop_.watch(pending_.get(), EPOLLOUT, [this](std::uint32_t) {
      int result = 0;
      socklen_t size = sizeof result;
      ::getsockopt(pending_.get(), SOL_SOCKET, SO_ERROR, &result, &size);
      if (result != 0) return try_later(std::strerror(result));
      if (met_itself(pending_.get())) return try_later("nobody listens there");
      loop_.forget(pending_.get());
      on_connected(std::move(pending_));
    });
    return;
  }
  try_later(problem);
}

void Spoke::on_connected(Fd socket) {
  loop_.cancel(answer_timer_);
  local_address_ = own_address_of(socket.get());
  connection_ = std::make_unique<Connection>(
      loop_, std::move(socket),
      Connection::Handlers{[this](const Message& message) { on_message(message); },
                           [this](const std::string& why) {
                             if (welcome_) return handlers_.lost(why);
                             try_later("what listens there is not a launcher that waits");
                           }});
  answer_timer_ =
      loop_.after(kConnectTimeout, [this] { try_later("what listens there does not answer"); });
  Message hello;
  hello.kind = Message::Kind::kHello;
  hello.node = plan_.node_rank;
  hello.run_id = plan_.run_id;
  hello.host = host_;
  hello.nnodes = plan_.nnodes;
  hello.nproc_per_node = plan_.nproc_per_node;
  connection_->send(hello);
}

void Spoke::on_message(const Message& message) {
  loop_.cancel(answer_timer_);
  if (message.kind == Message::Kind::kRefused) return handlers_.failed(message.code, message.text);
  if (message.kind == Message::Kind::kForeign) return handlers_.failed(2, message.text);
  if (!welcome_) {
    // From here on node 0 watches the clock; this is for a node 0 that hangs.
    welcome_ = true;
    loop_.cancel(overdue_timer_);
    overdue_timer_ = loop_.after(plan_.rendezvous_timeout + kNodeZeroSlack, [this] {
      overdue_timer_ = 0;
      handlers_.failed(1,
                       "[launch] node 0's launcher answered but never started the run. Look at "
                       "what it says; it may be stopped.");
    });
  }
  if (message.kind != Message::Kind::kSay) {
    loop_.cancel(overdue_timer_);
  } else {
    if (!message.text.empty()) handlers_.say(message.text);
    return;
  }
  handlers_.message(message);
}

void Spoke::send(const Message& message) {
  if (connection_) connection_->send(message);
}

}  // namespace lockstep::launch
