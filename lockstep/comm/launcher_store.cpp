#include "lockstep/comm/launcher_store.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/bounded.h"
#include "lockstep/core/control.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/store_channel.h"

namespace lockstep::detail {
namespace {

using store::Command;
using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kMaxIdleConnections = 4;
// A cut connection is often seen a moment before its cause is announced.
constexpr std::chrono::milliseconds kCauseWait{1000};
constexpr std::chrono::milliseconds kAnswerWait{200};

// One command, as the protocol writes it.
class StoreRequest {
 public:
  explicit StoreRequest(Command command) : bytes_(1, static_cast<char>(command)) {}

  template <typename T>
  StoreRequest& number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  StoreRequest& key(const std::string& key) {
    if (key.size() > store::kMaxKeyBytes) {
      throw UsageError("store", "a key of {} bytes is too long: {} are allowed ('{}...').",
                       key.size(), store::kMaxKeyBytes, key.substr(0, 40));
    }
    number<std::uint64_t>(key.size());
    bytes_ += key;
    return *this;
  }
  StoreRequest& value(const Bytes& value) {
    if (value.size() > store::kMaxValueBytes) {
      throw UsageError("store",
                       "a value of {} bytes is too long: {} are allowed. Send data of this size "
                       "with World::broadcast.",
                       value.size(), store::kMaxValueBytes);
    }
    number<std::uint64_t>(value.size());
    bytes_.append(reinterpret_cast<const char*>(value.data()), value.size());
    return *this;
  }
  StoreRequest& keys(const std::vector<std::string>& keys) {
    number<std::uint64_t>(keys.size());
    for (const std::string& each : keys) key(each);
    return *this;
  }

  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// What a call was doing, for its errors.
struct StoreCall {
  std::string what;
  Deadline deadline;
};

[[noreturn]] void throw_connection_lost(const StoreCall& call) {
  if (control::failure(kCauseWait)) throw_if_doomed(call.what);
  throw CommError("store",
                  fmt::format("{}: the launcher has closed the connection to its store. It was "
                              "killed, or the call broke a limit of the store, which the "
                              "launcher's output says (node 0's, where there are several).",
                              call.what));
}

// False when the deadline has passed; throws when the launcher announces a failure.
bool socket_ready(int fd, short events, const StoreCall& call) {
  constexpr int kSliceMs = 100;
  for (;;) {
    pollfd ready{fd, events, 0};
    const int slice = std::clamp(call.deadline.remaining_ms(), 1, kSliceMs);
    const int count = ::poll(&ready, 1, slice);
    if (count > 0) return true;
    if (count < 0 && errno != EINTR) throw SystemError("store", "poll failed", errno);
    throw_if_doomed(call.what);
    if (call.deadline.expired()) return false;
  }
}

void await_socket(int fd, short events, const StoreCall& call) {
  if (socket_ready(fd, events, call)) return;
  throw TimeoutError("store",
                     fmt::format("{} timed out after {} ms. The rank that should set it is "
                                 "late, stuck or on another path. Look at its output.",
                                 call.what, call.deadline.total().count()),
                     {-1, -1, "store", 0, call.deadline.elapsed()});
}

class StoreConnection {
 public:
  explicit StoreConnection(Fd fd) : fd_(std::move(fd)) {}

  void send(const std::string& bytes, const StoreCall& call) const {
    for (std::size_t sent = 0; sent < bytes.size();) {
      const ssize_t n =
          ::send(fd_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0) {
        sent += static_cast<std::size_t>(n);
      } else if (errno == EAGAIN) {
        await_socket(fd_.get(), POLLOUT, call);
      } else if (errno != EINTR) {
        throw_connection_lost(call);
      }
    }
  }

  void receive(void* to, std::size_t size, const StoreCall& call) const {
    auto* at = static_cast<char*>(to);
    while (size > 0) {
      const ssize_t n = ::recv(fd_.get(), at, size, MSG_DONTWAIT);
      if (n > 0) {
        at += n;
        size -= static_cast<std::size_t>(n);
      } else if (n < 0 && errno == EAGAIN) {
        await_socket(fd_.get(), POLLIN, call);
      } else if (n == 0 || errno != EINTR) {
        throw_connection_lost(call);
      }
    }
  }

  template <typename T>
  T receive_number(const StoreCall& call) const {
    T value{};
    receive(&value, sizeof value, call);
    return value;
  }

  // The protocol does not answer a change; a ping behind it does. Until then what one call has set
  // may not be seen by the next, which may have another connection. A launcher that is stopped
  // (Ctrl-Z) must not hold up ranks that only leave something in the store, so a late answer is
  // read by the next call on this connection.
  void change(const std::string& request, const StoreCall& call) {
    send(request + StoreRequest(Command::kPing).number<std::uint32_t>(0).bytes(), call);
    ++unanswered_;
    const StoreCall soon{call.what,
                         Deadline::after(std::min(kAnswerWait, call.deadline.remaining()))};
    if (socket_ready(fd_.get(), POLLIN, soon)) read_answers(call);
  }
  void read_answers(const StoreCall& call) {
    for (; unanswered_ > 0; --unanswered_) receive_number<std::uint32_t>(call);
  }

  Bytes receive_value(const StoreCall& call) const {
    Bytes value(static_cast<std::size_t>(receive_number<std::uint64_t>(call)));
    receive(value.data(), value.size(), call);
    return value;
  }

 private:
  Fd fd_;
  int unanswered_ = 0;
};

// Connections that are not in use. A wait blocks its connection, so every call that runs has one.
class StoreConnections {
 public:
  explicit StoreConnections(int channel) : channel_(channel) {}

  StoreConnection take(const StoreCall& call) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        StoreConnection connection = std::move(idle_.back());
        idle_.pop_back();
        return connection;
      }
    }
    StoreConnection connection(open_store_connection(channel_, call.deadline));
    connection.send(StoreRequest(Command::kValidate).number(store::kMagic).bytes(), call);
    return connection;
  }

  void give_back(StoreConnection connection) {
    const std::lock_guard lock(mutex_);
    if (idle_.size() < kMaxIdleConnections) idle_.push_back(std::move(connection));
  }

 private:
  const int channel_;
  std::mutex mutex_;
  std::vector<StoreConnection> idle_;
};

class LauncherStore : public c10d::Store {
 public:
  explicit LauncherStore(std::shared_ptr<StoreConnections> connections)
      : connections_(std::move(connections)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = c10::make_intrusive<LauncherStore>(connections_);
    copy->setTimeout(getTimeout());
    return copy;
  }

  void set(const std::string& key, const Bytes& value) override {
    post(StoreRequest(Command::kSet).key(key).value(value), "setting " + key);
  }
  void append(const std::string& key, const Bytes& value) override {
    post(StoreRequest(Command::kAppend).key(key).value(value), "appending to " + key);
  }
  void queuePush(const std::string& key, const Bytes& value) override {
    post(StoreRequest(Command::kQueuePush).key(key).value(value), "pushing to " + key);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    if (keys.size() != values.size()) {
      throw UsageError("store", "multiSet was given {} keys and {} values.", keys.size(),
                       values.size());
    }
    StoreRequest request(Command::kMultiSet);
    request.number<std::uint64_t>(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) request.key(keys[i]).value(values[i]);
    post(request, "setting " + names(keys));
  }

  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return ask<Bytes>(StoreRequest(Command::kCompareSet).key(key).value(expected).value(desired),
                      "comparing " + key,
                      [](const auto& from, const auto& call) { return from.receive_value(call); });
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return ask_number(StoreRequest(Command::kAdd).key(key).number(amount), "adding to " + key);
  }
  bool deleteKey(const std::string& key) override {
    return ask_number(StoreRequest(Command::kDeleteKey).key(key), "deleting " + key) == 1;
  }
  std::int64_t getNumKeys() override {
    return ask_number(StoreRequest(Command::kNumKeys), "counting keys");
  }
  std::int64_t queueLen(const std::string& key) override {
    return ask_number(StoreRequest(Command::kQueueLen).key(key), "counting in " + key);
  }
  bool check(const std::vector<std::string>& keys) override {
    return ask<char>(StoreRequest(Command::kCheck).keys(keys), "looking for " + names(keys),
                     [](const auto& from, const auto& call) {
                       return from.template receive_number<char>(call);
                     }) == store::kReady;
  }

  Bytes get(const std::string& key) override {
    wait({key});
    return ask<Bytes>(StoreRequest(Command::kGet).key(key), "reading " + key,
                      [](const auto& from, const auto& call) { return from.receive_value(call); });
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return ask<std::vector<Bytes>>(StoreRequest(Command::kMultiGet).keys(keys),
                                   "reading " + names(keys),
                                   [count = keys.size()](const auto& from, const auto& call) {
                                     std::vector<Bytes> values;
                                     while (values.size() < count)
                                       values.push_back(from.receive_value(call));
                                     return values;
                                   });
  }
  std::vector<std::string> listKeys() override {
    return ask<std::vector<std::string>>(
        StoreRequest(Command::kListKeys), "listing keys", [](const auto& from, const auto& call) {
          std::vector<std::string> keys;
          for (auto left = from.template receive_number<std::int64_t>(call); left > 0; --left) {
            const Bytes key = from.receive_value(call);
            keys.emplace_back(key.begin(), key.end());
          }
          return keys;
        });
  }
  Bytes queuePop(const std::string& key, bool block) override {
    if (block) wait({key});
    const auto popped =
        ask<std::optional<Bytes>>(StoreRequest(Command::kQueuePop).key(key), "popping from " + key,
                                  [](const auto& from, const auto& call) -> std::optional<Bytes> {
                                    if (from.template receive_number<std::int64_t>(call) == 0)
                                      return std::nullopt;
                                    return from.receive_value(call);
                                  });
    TORCH_CHECK_WITH(DistQueueEmptyError, popped.has_value(), "queue is empty");
    return *popped;
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const StoreCall call = call_for("waiting for " + names(keys), timeout);
    const auto reply = exchange<char>(StoreRequest(Command::kWait).keys(keys).bytes(), call,
                                      [](const auto& from, const auto& the_call) {
                                        return from.template receive_number<char>(the_call);
                                      });
    LOCKSTEP_ASSERT(reply == store::kStopWaiting);
  }

  bool hasExtendedApi() const override { return true; }

 private:
  static std::string names(const std::vector<std::string>& keys) {
    constexpr std::size_t kShown = 8;
    std::string text;
    for (std::size_t i = 0; i < std::min(keys.size(), kShown); ++i)
      text += (i == 0 ? "" : ", ") + keys[i];
    if (keys.size() > kShown) text += fmt::format(" and {} more", keys.size() - kShown);
    return text;
  }

  static StoreCall call_for(const std::string& what, std::chrono::milliseconds timeout) {
    return {what,
            Deadline::after(timeout == c10d::Store::kNoTimeout ? std::chrono::milliseconds::max()
                                                               : timeout)};
  }

  // A connection on which something failed is closed: its replies would belong to another call, and
  // the launcher ends a wait when its connection closes.
  template <typename T, typename Read>
  T exchange(const std::string& request, const StoreCall& call, const Read& read) {
    StoreConnection connection = connections_->take(call);
    connection.send(request, call);
    connection.read_answers(call);
    T reply = read(connection, call);
    connections_->give_back(std::move(connection));
    return reply;
  }

  template <typename T, typename Read>
  T ask(const StoreRequest& request, const std::string& what, const Read& read) {
    return exchange<T>(request.bytes(), call_for(what, getTimeout()), read);
  }
  std::int64_t ask_number(const StoreRequest& request, const std::string& what) {
    return ask<std::int64_t>(request, what, [](const auto& from, const auto& call) {
      return from.template receive_number<std::int64_t>(call);
    });
  }
  void post(const StoreRequest& request, const std::string& what) {
    const StoreCall call = call_for(what, getTimeout());
    StoreConnection connection = connections_->take(call);
    connection.change(request.bytes(), call);
    connections_->give_back(std::move(connection));
  }

  const std::shared_ptr<StoreConnections> connections_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> open_launcher_store(int channel_fd) {
  auto store = c10::make_intrusive<LauncherStore>(std::make_shared<StoreConnections>(channel_fd));
  store->getNumKeys();  // fails here when the launcher is gone
  return store;
}

}  // namespace lockstep::detail
