#include "lockstep/rendezvous/store_table.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/rendezvous/store_client.h"

namespace lockstep {

using store::Command;

namespace {

// The arguments of each store::Command: k is a key, v a value, u a uint32, i an int64, K a counted
// list of keys, P one of pairs of a key and a value.
constexpr std::string_view kArguments[] = {"u",  "kv", "kvv", "k", "ki", "K",  "K", "",  "k",
                                           "kv", "K",  "P",   "",  "u",  "kv", "k", "k", ""};
static_assert(std::size(kArguments) == static_cast<std::size_t>(Command::kListKeys) + 1);

// The memory of a deque with one element and its map node, without the key and the element.
constexpr std::size_t kDequeBytes = 640;

template <typename T>
std::string bytes_of(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

void append_value(std::string& to, std::string_view value) {
  to += bytes_of<std::uint64_t>(value.size());
  to += value;
}

[[noreturn]] void refuse(const std::string& what) {
  throw CommError("store", what);
}

}  // namespace

// The arguments of any command.
struct StoreTable::Arguments {
  std::vector<std::string> keys;
  std::vector<std::string_view> values;
  std::int64_t number = 0;
};

// Reads from the front of the received bytes. Past their end everything reads as empty and
// incomplete() is true; the command is parsed again when there are more.
class StoreTable::Input {
 public:
  explicit Input(std::string_view bytes) : bytes_(bytes) {}

  bool incomplete() const { return incomplete_; }
  std::size_t used() const { return used_; }

  Arguments arguments(Command command) {
    const auto index = static_cast<std::size_t>(command);
    if (index == 0 || index >= std::size(kArguments))
      refuse(fmt::format(
          "command {} is not known. The client's PyTorch is probably newer than this launcher",
          index));
    Arguments got;
    for (const char kind : kArguments[index]) {
      if (kind == 'k') got.keys.push_back(key());
      if (kind == 'v') got.values.push_back(value());
      if (kind == 'u') got.number = number<std::uint32_t>();
      if (kind == 'i') got.number = number<std::int64_t>();
      if (kind == 'K' || kind == 'P') keys(got, kind == 'P');
    }
    return got;
  }

  template <typename T>
  T number() {
    T value{};
    const std::string_view bytes = take(sizeof value);
    if (!incomplete_) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string key() { return std::string(piece(store::kMaxKeyBytes, "key")); }
  std::string_view value() { return piece(store::kMaxValueBytes, "value"); }
  void keys(Arguments& to, bool with_values) {
    const auto count = number<std::uint64_t>();
    if (count > store::kMaxKeys) refuse(fmt::format("{} keys in one command are too many", count));
    for (auto left = count; left > 0 && !incomplete_; --left) {
      to.keys.push_back(key());
      if (with_values) to.values.push_back(value());
    }
  }

 private:
  std::string_view piece(std::size_t max_bytes, const char* what) {
    const auto size = number<std::uint64_t>();
    if (size > max_bytes)
      refuse(fmt::format("a {} of {} bytes is too long ({} are allowed)", what, size, max_bytes));
    return take(static_cast<std::size_t>(size));
  }
  std::string_view take(std::size_t size) {
    if (incomplete_ || bytes_.size() - used_ < size) {
      incomplete_ = true;
      return {};
    }
    used_ += size;
    return bytes_.substr(used_ - size, size);
  }

  std::string_view bytes_;
  std::size_t used_ = 0;
  bool incomplete_ = false;
};

std::size_t StoreTable::feed(Client client, std::string_view input) {
  Input in(input);
  if (run_command(client, in)) return in.used();
  if (input.size() > limits_.command_bytes)
    refuse(fmt::format("a command of more than {} bytes", limits_.command_bytes));
  return 0;
}

void StoreTable::drop(Client client) {
  stop_waiting(client);
  clients_.erase(client);
}

// ---------------------------------------------------------------- commands

// False, without any effect, if the command is incomplete.
bool StoreTable::run_command(Client client, Input& in) {
  State& state = clients_[client];
  const auto command = static_cast<Command>(in.number<std::uint8_t>());
  if (!state.validated) {
    const auto magic = in.number<std::uint32_t>();
    if (command != Command::kValidate) refuse("the first message is not from a TCPStore client");
    if (in.incomplete()) return false;
    if (magic != store::kMagic) refuse("the first message is not from a TCPStore client");
    return state.validated = true;
  }
  Arguments got = in.arguments(command);
  if (in.incomplete()) return false;
  execute(client, command, got);
  return true;
}

void StoreTable::execute(Client client, Command command, Arguments& got) {
  const std::string& key = got.keys.empty() ? std::string() : got.keys.front();
  const auto reply_number = [&](std::size_t number) {
    reply_(client, bytes_of(static_cast<std::int64_t>(number)));
  };
  switch (command) {
    case Command::kPing:
      return reply_(client, bytes_of(static_cast<std::uint32_t>(got.number)));
    case Command::kNumKeys:
      return reply_number(values_.size());
    case Command::kListKeys:
      return list(client);
    case Command::kCancelWait:
      stop_waiting(client);
      return reply_(client, std::string_view(&store::kWaitCanceled, 1));
    case Command::kCheck: {
      const bool all = std::ranges::all_of(got.keys, [this](const auto& k) { return present(k); });
      return reply_(client, std::string_view(all ? &store::kReady : &store::kNotReady, 1));
    }
    case Command::kWait:
      return wait(client, std::move(got.keys));
    case Command::kGet:
    case Command::kMultiGet:
      return reply_(client, value_reply(got.keys));
    case Command::kSet:
    case Command::kMultiSet:
      for (std::size_t i = 0; i < got.keys.size(); ++i)
        put(got.keys[i], std::string(got.values[i]));
      return;
    case Command::kAppend:
      return append(key, got.values[0]);
    case Command::kQueuePush:
      return push(key, got.values[0]);
    case Command::kQueuePop:
      return pop(client, key);
    case Command::kQueueLen: {
      const auto queue = queues_.find(key);
      return reply_number(queue == queues_.end() ? 0 : queue->second.size());
    }
    case Command::kCompareSet:
      return compare_set(client, key, got.values[0], got.values[1]);
    case Command::kAdd:
      return add(client, key, got.number);
    case Command::kDeleteKey:
      return reply_number(erase(key));
    case Command::kValidate:
      return;
  }
}

// ---------------------------------------------------------------- values

// Called before something grows. Throws if that would exceed the limit.
void StoreTable::reserve(std::size_t added, std::size_t removed) {
  if (bytes_ - removed + added > limits_.bytes)
    refuse(fmt::format("the store would hold more than {} bytes", limits_.bytes));
  bytes_ = bytes_ - removed + added;
}

void StoreTable::check_reply(std::size_t bytes) const {
  if (bytes > limits_.command_bytes)
    refuse(fmt::format("a reply of more than {} bytes", limits_.command_bytes));
}

void StoreTable::put(const std::string& key, std::string value) {
  const auto found = values_.find(key);
  if (found != values_.end()) {
    reserve(value.size(), found->second.size());
    found->second = std::move(value);
  } else {
    if (values_.size() >= limits_.keys)
      refuse(fmt::format("the store would hold more than {} keys", limits_.keys));
    reserve(key.size() + value.size(), 0);
    values_.emplace(key, std::move(value));
  }
  wake(key);
}

void StoreTable::append(const std::string& key, std::string_view value) {
  const auto found = values_.find(key);
  if (found == values_.end()) return put(key, std::string(value));
  reserve(value.size(), 0);
  found->second += value;
}

std::size_t StoreTable::erase(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return 0;
  reserve(0, key.size() + found->second.size());
  values_.erase(found);
  return 1;
}

std::string StoreTable::value_reply(const std::vector<std::string>& keys) const {
  std::string reply;
  for (const std::string& key : keys) {
    const auto found = values_.find(key);
    append_value(reply, found == values_.end() ? std::string_view() : found->second);
    check_reply(reply.size());
  }
  return reply;
}

void StoreTable::add(Client client, const std::string& key, std::int64_t amount) {
  std::int64_t old = 0;
  if (const auto found = values_.find(key); found != values_.end()) {
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), old);
    if (error != std::errc() || end != text.data() + text.size())
      refuse("a number cannot be added to a value that is not one");
  }
  // Wraps around instead of overflowing.
  const auto sum = static_cast<std::int64_t>(static_cast<std::uint64_t>(old) +
                                             static_cast<std::uint64_t>(amount));
  put(key, std::to_string(sum));
  reply_(client, bytes_of(sum));
}

// Replies the value afterwards; for a missing key `expected`, as c10d's servers do.
void StoreTable::compare_set(Client client, const std::string& key, std::string_view expected,
                             std::string_view desired) {
  std::string reply;
  const auto found = values_.find(key);
  if (found == values_.end() && !expected.empty()) {
    append_value(reply, expected);
    return reply_(client, reply);
  }
  if (found == values_.end() || found->second == expected) put(key, std::string(desired));
  const std::string& value = values_.at(key);
  check_reply(value.size());
  append_value(reply, value);
  reply_(client, reply);
}

void StoreTable::list(Client client) {
  std::string reply = bytes_of(static_cast<std::int64_t>(values_.size()));
  for (const auto& [key, value] : values_) {
    append_value(reply, key);
    check_reply(reply.size());
  }
  reply_(client, reply);
}

// ---------------------------------------------------------------- queues

void StoreTable::push(const std::string& key, std::string_view value) {
  const bool is_new = queues_.count(key) == 0;
  reserve(value.size() + sizeof(std::string) + (is_new ? key.size() + kDequeBytes : 0), 0);
  queues_[key].emplace_back(value);
  wake(key, true);
}

void StoreTable::pop(Client client, const std::string& key) {
  const auto queue = queues_.find(key);
  if (queue == queues_.end()) return reply_(client, bytes_of<std::int64_t>(0));
  std::string reply = bytes_of(static_cast<std::int64_t>(queue->second.size()));
  append_value(reply, queue->second.front());
  reserve(0, queue->second.front().size() + sizeof(std::string));
  queue->second.pop_front();
  if (queue->second.empty()) {
    reserve(0, key.size() + kDequeBytes);
    queues_.erase(queue);
  }
  reply_(client, reply);
}

// ---------------------------------------------------------------- waiting

bool StoreTable::present(const std::string& key) const {
  return values_.count(key) != 0 || queues_.count(key) != 0;
}

void StoreTable::wait(Client client, std::vector<std::string> keys) {
  State& state = clients_.at(client);
  if (!state.awaited.empty()) refuse("a client that waits cannot wait for something else");
  // Each key once: the time of stop_waiting() is quadratic in repeated keys.
  std::ranges::sort(keys);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  std::size_t bytes = 0;
  for (const std::string& key : keys) {
    if (present(key)) continue;
    state.awaited.push_back(key);
    bytes += 2 * key.size() + sizeof(std::string) + kDequeBytes;  // here and in waiters_
  }
  state.missing = state.awaited.size();
  if (state.missing == 0) return reply_(client, std::string_view(&store::kStopWaiting, 1));
  reserve(bytes, 0);
  state.awaited_bytes = bytes;
  for (const std::string& key : state.awaited) waiters_[key].push_back(client);
}

// A key counts once it was set, even if it is deleted before the others are, as in c10d's servers.
void StoreTable::wake(const std::string& key, bool one_only) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  std::deque<Client> woken;
  if (one_only) {
    woken.push_back(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) waiters_.erase(found);
  } else {
    woken.swap(found->second);
    waiters_.erase(found);
  }
  for (const Client client : woken) {
    if (--clients_.at(client).missing > 0) continue;
    stop_waiting(client);
    reply_(client, std::string_view(&store::kStopWaiting, 1));
  }
}

void StoreTable::stop_waiting(Client client) {
  const auto state = clients_.find(client);
  if (state == clients_.end() || state->second.awaited.empty()) return;
  for (const std::string& key : state->second.awaited) {
    const auto found = waiters_.find(key);
    if (found == waiters_.end()) continue;
    std::erase(found->second, client);
    if (found->second.empty()) waiters_.erase(found);
  }
  reserve(0, state->second.awaited_bytes);
  state->second.awaited.clear();
  state->second.awaited_bytes = 0;
}

namespace {

using Kind = StoreFrame::Kind;

// Credit is reported rarely enough to be cheap, and often enough that a sender does not stop.
constexpr std::size_t kReportAfter = StoreStreams::kStreamWindow / 4;

[[noreturn]] void reject(const char* what) {
  throw UsageError("launch", "another launcher's store frame {}", what);
}

void append_number(std::string& to, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to += static_cast<char>((value >> (8 * i)) & 0xff);
}

std::uint64_t number_at(std::string_view bytes, std::size_t at, int size) {
  std::uint64_t value = 0;
  for (int i = 0; i < size; ++i)
    value |= static_cast<std::uint64_t>(
                 static_cast<unsigned char>(bytes[at + static_cast<std::size_t>(i)]))
             << (8 * i);
  return value;
}

void check(const StoreFrame& frame) {
  if (frame.stream == 0 && frame.kind != Kind::kCredit) reject("has no stream");
  switch (frame.kind) {
    case Kind::kOpen:
      if (frame.value != StoreFrame::kNoRank && frame.value >= kMaxWorldSize)
        reject("opens a stream for a rank that cannot exist");
      return;
    case Kind::kData:
      if (frame.value == 0 || frame.value > StoreFrame::kMaxPayload) reject("has a bad length");
      return;
    case Kind::kClose:
      if (frame.value != 0) reject("closes with a value");
      return;
    case Kind::kCredit:
      if (frame.value == 0 || frame.value > StoreStreams::kLinkWindow)
        reject("reports more than a window");
      return;
  }
}

}  // namespace

bool begins_store_frame(char first) {
  return first >= static_cast<char>(Kind::kOpen) && first <= static_cast<char>(Kind::kCredit);
}

std::string encode(const StoreFrame& frame) {
  std::string bytes;
  bytes.reserve(StoreFrame::kHeaderBytes + frame.payload.size());
  bytes += static_cast<char>(frame.kind);
  append_number(bytes, frame.attempt, 4);
  append_number(bytes, frame.stream, 8);
  append_number(bytes, frame.value, 4);
  bytes += frame.payload;
  return bytes;
}

std::size_t decode(std::string_view bytes, StoreFrame& frame) {
  if (bytes.empty()) return 0;
  if (!begins_store_frame(bytes.front())) reject("has an unknown kind");
  if (bytes.size() < StoreFrame::kHeaderBytes) return 0;
  frame.kind = static_cast<Kind>(bytes.front());
  frame.attempt = static_cast<std::uint32_t>(number_at(bytes, 1, 4));
  frame.stream = number_at(bytes, 5, 8);
  frame.value = static_cast<std::uint32_t>(number_at(bytes, 13, 4));
  check(frame);
  const std::size_t payload = frame.kind == Kind::kData ? frame.value : 0;
  if (bytes.size() - StoreFrame::kHeaderBytes < payload) return 0;
  frame.payload = bytes.substr(StoreFrame::kHeaderBytes, payload);
  return StoreFrame::kHeaderBytes + payload;
}

// ---------------------------------------------------------------- sending

void StoreStreams::open(Id id, int rank) {
  streams_[id].rank = static_cast<std::uint32_t>(rank);  // -1 is kNoRank
}

std::size_t StoreStreams::room(const Stream& stream, std::size_t wanted) const {
  const std::size_t not_for_it = kFrameCost + (wanted > kSmallWrite ? kReserved : 0);
  const std::size_t on_link = link_credit_ > not_for_it ? link_credit_ - not_for_it : 0;
  return std::min({stream.credit, on_link, StoreFrame::kMaxPayload, wanted});
}

std::size_t StoreStreams::write(Id id, std::string_view bytes) {
  Stream& stream = streams_.at(id);
  std::size_t taken = 0;
  while (taken < bytes.size()) {
    const std::string_view payload = bytes.substr(taken, room(stream, bytes.size() - taken));
    if (payload.empty()) {
      if (!std::exchange(stream.waiting, true)) waiting_.push_back(id);
      break;
    }
    if (!std::exchange(stream.announced, true))
      handlers_.send({.kind = Kind::kOpen, .stream = id, .value = stream.rank});
    handlers_.send({.kind = Kind::kData,
                    .stream = id,
                    .value = static_cast<std::uint32_t>(payload.size()),
                    .payload = payload});
    stream.credit -= payload.size();
    link_credit_ -= payload.size() + kFrameCost;
    taken += payload.size();
  }
  return taken;
}

void StoreStreams::close(Id id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  const bool announced = found->second.announced;
  if (found->second.waiting) std::erase(waiting_, id);
  streams_.erase(found);
  if (announced) handlers_.send({.kind = Kind::kClose, .stream = id});
}

// ---------------------------------------------------------------- receiving

void StoreStreams::on_frame(const StoreFrame& frame) {
  switch (frame.kind) {
    case Kind::kOpen: {
      if (!handlers_.opened) reject("opens a stream to a node that has no store");
      if (streams_.size() >= kMaxStreams) reject("opens too many streams");
      if (streams_.count(frame.stream) != 0) reject("opens a stream again");
      Stream& stream = streams_[frame.stream];
      stream.rank = frame.value;
      stream.announced = true;
      return handlers_.opened(frame.stream, static_cast<int>(frame.value));
    }
    case Kind::kData:
      return on_data(frame);
    case Kind::kClose: {
      const auto found = streams_.find(frame.stream);
      if (found == streams_.end()) return;  // both sides closed it
      found->second.announced = false;
      close(frame.stream);
      return handlers_.closed(frame.stream);
    }
    case Kind::kCredit:
      return on_credit(frame);
  }
}

void StoreStreams::on_data(const StoreFrame& frame) {
  arrived_ += frame.payload.size() + kFrameCost;
  if (arrived_ >= kReportAfter)
    handlers_.send({.kind = Kind::kCredit,
                    .stream = 0,
                    .value = static_cast<std::uint32_t>(std::exchange(arrived_, 0))});
  const auto found = streams_.find(frame.stream);
  if (found == streams_.end()) return;  // closed here; the peer does not know yet
  found->second.unconsumed += frame.payload.size();
  if (found->second.unconsumed > kStreamWindow) reject("exceeds the window of its stream");
  handlers_.received(frame.stream, frame.payload);
}

void StoreStreams::consumed(Id id, std::size_t bytes) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  stream.consumed += bytes;
  if (stream.consumed < kReportAfter) return;
  stream.unconsumed -= stream.consumed;
  handlers_.send({.kind = Kind::kCredit,
                  .stream = id,
                  .value = static_cast<std::uint32_t>(std::exchange(stream.consumed, 0))});
}

void StoreStreams::on_credit(const StoreFrame& frame) {
  if (frame.stream == 0) {
    link_credit_ += frame.value;
    if (link_credit_ > kLinkWindow) reject("reports bytes that were not sent");
  } else if (const auto found = streams_.find(frame.stream); found != streams_.end()) {
    found->second.credit += frame.value;
    if (found->second.credit > kStreamWindow) reject("reports bytes that were not sent");
  }
  wake();
}

// Calls writable() once for each stream that can write. A stream that still cannot write everything
// moves to the end.
void StoreStreams::wake() {
  for (std::size_t left = waiting_.size(); left > 0 && link_credit_ > kFrameCost; --left) {
    if (waiting_.empty()) return;
    const Id id = waiting_.front();
    waiting_.pop_front();
    Stream& stream = streams_.at(id);
    if (stream.credit == 0) {
      waiting_.push_back(id);
      continue;
    }
    stream.waiting = false;
    handlers_.writable(id);
  }
}

}  // namespace lockstep
