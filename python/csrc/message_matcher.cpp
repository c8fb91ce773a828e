#include "python/csrc/message_matcher.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::python {
namespace {

using std::chrono::microseconds;

// A receive of an envelope may be posted long before it comes; a waiter has its own deadline.
Deadline far_away() {
  return Deadline::after(std::chrono::hours(24 * 365));
}

// A receive from any source polls often at first, then less.
constexpr microseconds kShortestPause{20};
constexpr microseconds kLongestPause{1000};
// How long a receive may go without a waiter before the polling thread serves it, and how long that
// thread stays awake after the last receive.
constexpr microseconds kUnwatched{500};
constexpr std::chrono::milliseconds kAwake{50};
using Clock = std::chrono::steady_clock;

std::exception_ptr failure(const std::string& text) {
  return std::make_exception_ptr(CommError("lockstep_torch", text));
}

}  // namespace

// ---------------------------------------------------------------- one receive

bool Receive::wait_until(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.time(), [this] { return done(); });
}

std::exception_ptr Receive::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Receive::give_up(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  given_up_ = std::move(error);
}

void Receive::finish(int from, std::exception_ptr error) {
  std::shared_ptr<void> owner;
  {
    const std::lock_guard lock(mutex_);
    if (done()) return;
    from_.store(from);
    error_ = given_up_ ? given_up_ : std::move(error);
    owner = std::move(owner_);
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  // Destroying a tensor here may need Python's lock, whose holder may want the matcher.
  if (owner) Deferral::run([owner = std::move(owner)] {});
}

// ---------------------------------------------------------------- the matcher

MessageMatcher::MessageMatcher(shm::Engine& engine)
    : engine_(engine), incoming_(static_cast<std::size_t>(engine.size())) {}

MessageMatcher::~MessageMatcher() {
  LOCKSTEP_ASSERT(!poller_.joinable());
}

void MessageMatcher::close(std::unique_ptr<shm::Engine> engine) noexcept {
  const Deferral deferral;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  called_.notify_all();
  if (poller_.joinable()) {
    if (poller_.get_id() == std::this_thread::get_id())
      poller_.detach();  // ending a receive dropped the group; the thread holds this matcher itself
    else
      poller_.join();
  }
  engine.reset();
  // From here on nothing writes into the arrays.
  const auto error = failure("the process group was destroyed with a receive pending");
  const std::lock_guard lock(mutex_);
  fail_all(error);
  for (Incoming& incoming : incoming_)
    if (const auto target = std::exchange(incoming.target, nullptr)) target->finish(-1, error);
}

std::vector<shm::TicketPtr> MessageMatcher::send(const Message& message, const Deadline& deadline) {
  const Deferral deferral;
  const std::lock_guard lock(mutex_);
  sent_.remove_if([](const Sent& sent) { return sent.ticket && sent.ticket->done(); });
  sent_.push_back({{message.tag, message.bytes}, nullptr});
  Sent& sent = sent_.back();
  const shm::StartOptions options{.deadline = deadline};
  try {
    sent.ticket = engine_.send(&sent.envelope, sizeof sent.envelope, message.peer, options);
  } catch (...) {
    sent_.pop_back();
    throw;
  }
  return {sent.ticket, engine_.send(message.data, message.bytes, message.peer, options)};
}

std::shared_ptr<Receive> MessageMatcher::receive(ReceiveRequest request) {
  auto receive = std::make_shared<Receive>();
  receive->data_ = static_cast<std::byte*>(request.data);
  receive->bytes_ = request.bytes;
  receive->source_ = request.source;
  receive->tag_ = request.tag;
  receive->owner_ = std::move(request.owner);
  const Deferral deferral;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw CommError("lockstep_torch", "the process group was destroyed");
    requests_.push_back(receive);
    make_progress();
    received_ = Clock::now();
    if (!receive->done() && !std::exchange(polling_, true)) {
      if (!poller_.joinable())
        poller_ = std::thread([self = weak_from_this()] {
          if (const auto matcher = self.lock()) matcher->poll();
        });
      called_.notify_all();
    }
  }
  return receive;
}

void MessageMatcher::request_progress(const Receive& receive) {
  const Deferral deferral;
  const std::lock_guard lock(mutex_);
  if (!closed_ && !receive.done() && receive.source_ != kAnyone)
    watch(incoming_from(receive.source_));
}

void MessageMatcher::wait(Receive& receive, const Deadline& deadline) {
  while (!receive.done()) {
    make_progress();
    // The waiting thread copies the message itself if the source is known.
    if (const auto ticket = ticket_of(receive)) {
      try {
        ticket->wait(deadline);
      } catch (const CommError&) {
        make_progress();  // the receive has the same failure
      }
      continue;
    }
    if (!receive.wait_until(deadline)) give_up(receive, deadline);
  }
}

// The receive ends when nobody writes into its array any more. While the contents are on their way
// that is after their ticket has ended, which the engine's failure causes.
void MessageMatcher::give_up(Receive& receive, const Deadline& deadline) {
  const std::string text =
      fmt::format("recv timed out after {} ms: no message came", deadline.total().count());
  shm::TicketPtr contents;
  {
    const Deferral deferral;
    const std::lock_guard lock(mutex_);
    receive.give_up(std::make_exception_ptr(TimeoutError("lockstep_torch", text)));
    requests_.remove_if([&](const auto& request) { return request.get() == &receive; });
    for (const Incoming& incoming : incoming_)
      if (incoming.target.get() == &receive) contents = incoming.contents;
    if (!closed_) engine_.abort(fmt::format("rank {}: {}", engine_.rank(), text));
  }
  try {
    if (contents) contents->wait();
  } catch (const CommError&) {
    // Expected: the engine is broken.
  }
  const Deferral deferral;
  receive.finish(-1, nullptr);
}

shm::TicketPtr MessageMatcher::ticket_of(const Receive& receive) {
  const std::lock_guard lock(mutex_);
  if (closed_ || receive.done() || receive.source_ == kAnyone) return nullptr;
  const Incoming& incoming = incoming_from(receive.source_);
  return incoming.contents ? incoming.contents : incoming.header;
}

// ---------------------------------------------------------------- progress

void MessageMatcher::make_progress() noexcept {
  const Deferral deferral;
  const std::lock_guard lock(mutex_);
  if (progressing_) {
    again_ = true;
    return;
  }
  progressing_ = true;
  do {
    again_ = false;
    try {
      if (!closed_) advance_all();
    } catch (const std::exception&) {
      fail_all(std::current_exception());
    }
  } while (again_);
  progressing_ = false;
}

void MessageMatcher::advance_all() {
  // Unexpected messages: they came before a receive was posted.
  for (auto message = unexpected_.begin(); message != unexpected_.end();) {
    const auto request = find_request(message->from, message->envelope.tag);
    if (request == requests_.end()) {
      ++message;
      continue;
    }
    const auto taker = *request;
    requests_.erase(request);
    if (taker->bytes_ != message->contents.size()) {
      taker->finish(message->from,
                    failure(fmt::format("rank {} sent {} bytes (tag {}), but {} are expected. Both "
                                        "sides of a message must name the same size.",
                                        message->from, message->contents.size(),
                                        message->envelope.tag, taker->bytes_)));
    } else {
      if (taker->bytes_ > 0) std::memcpy(taker->data_, message->contents.data(), taker->bytes_);
      taker->finish(message->from, nullptr);
    }
    message = unexpected_.erase(message);
  }
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (peer == engine_.rank()) continue;
    while (advance(peer)) {
    }
  }
}

bool MessageMatcher::advance(int peer) {
  Incoming& incoming = incoming_from(peer);
  if (incoming.contents) {
    if (!incoming.contents->done()) return false;
    arrived(peer);
    return true;
  }
  if (incoming.header) return incoming.header->done() && opened(peer);
  if (!wants(peer)) return false;
  incoming.header = engine_.recv(&incoming.envelope, sizeof incoming.envelope, peer,
                                 {.deadline = far_away(), .caller_waits = true});
  incoming.watched = false;
  incoming.asked = Clock::now();
  return true;
}

// The envelope has arrived: the contents go to the first matching receive, or are buffered.
bool MessageMatcher::opened(int peer) {
  Incoming& incoming = incoming_from(peer);
  if (const auto error = incoming.header->error()) std::rethrow_exception(error);
  incoming.header = nullptr;
  const std::size_t bytes = incoming.envelope.bytes;
  const auto request = find_request(peer, incoming.envelope.tag);
  std::byte* data = nullptr;
  // A request of another size fails when the contents, which must be read anyway, have arrived.
  if (request != requests_.end() && (*request)->bytes_ == bytes) {
    incoming.target = *request;
    requests_.erase(request);
    data = incoming.target->data_;
  } else {
    incoming.unexpected = {peer, incoming.envelope, std::vector<std::byte>(bytes)};
    data = incoming.unexpected.contents.data();
  }
  incoming.contents =
      engine_.recv(data, bytes, peer, {.deadline = far_away(), .caller_waits = true});
  incoming.asked = Clock::now();
  if (incoming.target) incoming.target->matched_.store(true, std::memory_order_release);
  // A receive without a waiter for the envelope has none for the contents either.
  if (std::exchange(incoming.watched, false)) watch(incoming);
  return true;
}

void MessageMatcher::arrived(int peer) {
  Incoming& incoming = incoming_from(peer);
  const auto ticket = std::exchange(incoming.contents, nullptr);
  const auto target = std::exchange(incoming.target, nullptr);
  const auto error = ticket->error();
  if (target) target->finish(peer, error);
  if (error) std::rethrow_exception(error);
  if (target) return;
  unexpected_.push_back(std::move(incoming.unexpected));
  again_ = true;
}

bool MessageMatcher::wants(int peer) const {
  bool anyone = false;
  for (const auto& request : requests_) {
    if (request->source_ == peer) return true;
    anyone |= request->source_ == kAnyone;
  }
  return anyone && engine_.probe(peer) == shm::Probe::kWaiting;
}

std::list<std::shared_ptr<Receive>>::iterator MessageMatcher::find_request(int peer,
                                                                           std::int64_t tag) {
  return std::find_if(requests_.begin(), requests_.end(), [&](const auto& request) {
    return (request->source_ == peer || request->source_ == kAnyone) && request->tag_ == tag;
  });
}

void MessageMatcher::watch(Incoming& incoming) {
  const auto ticket = incoming.contents ? incoming.contents : incoming.header;
  if (!ticket || std::exchange(incoming.watched, true)) return;
  ticket->on_done([self = weak_from_this()] {
    if (const auto matcher = self.lock()) matcher->make_progress();
  });
}

// True while there are tickets that nobody may be waiting for.
bool MessageMatcher::watch_over() {
  bool any = false;
  for (Incoming& incoming : incoming_) {
    if (incoming.watched || !(incoming.header || incoming.contents)) continue;
    any = true;
    if (Clock::now() - incoming.asked > kUnwatched) watch(incoming);
  }
  return any;
}

void MessageMatcher::fail_all(const std::exception_ptr& error) {
  for (const auto& request : std::exchange(requests_, {})) request->finish(-1, error);
}

// ---------------------------------------------------------------- messages from anyone

bool MessageMatcher::anyone_wanted() const {
  return std::any_of(requests_.begin(), requests_.end(),
                     [](const auto& request) { return request->source_ == kAnyone; });
}

// Looks at the other ranks as long as somebody would take a message from any of them, and after
// receives that nobody waits for.
void MessageMatcher::poll() {
  auto pause = kShortestPause;
  for (;;) {
    bool unwatched = false;
    {
      const Deferral deferral;
      const std::lock_guard lock(mutex_);
      if (closed_) return;
      make_progress();
      look_for_anyone();
      unwatched = watch_over();
    }
    std::unique_lock lock(mutex_);
    if (anyone_wanted()) {
      called_.wait_for(lock, pause, [this] { return closed_; });
      pause = std::min(pause * 2, kLongestPause);
      continue;
    }
    pause = kShortestPause;
    if (unwatched || Clock::now() - received_ < kAwake) {
      called_.wait_for(lock, kLongestPause, [this] { return closed_; });
    } else {
      polling_ = false;
      called_.wait(lock, [this] { return closed_ || polling_; });
    }
  }
}

// Fails receives from anyone when no rank is left that could answer, or one has died.
void MessageMatcher::look_for_anyone() {
  if (!anyone_wanted()) return;
  std::string text = engine_.failure();
  bool open = false;
  for (int peer = 0; peer < engine_.size() && text.empty(); ++peer) {
    if (peer == engine_.rank()) continue;
    const auto probe = incoming_from(peer).header || incoming_from(peer).contents
                           ? shm::Probe::kNone
                           : engine_.probe(peer);
    open |= probe == shm::Probe::kNone || probe == shm::Probe::kWaiting;
    if (probe == shm::Probe::kFailed)
      text = fmt::format(
          "rank {} has ended while rank {} waits for a message from anyone. Look "
          "for the reason in that rank's output.",
          peer, engine_.rank());
  }
  if (text.empty() && !open)
    text = "a message from anyone is expected, but all other ranks have left the process group";
  if (text.empty()) return;
  for (auto request = requests_.begin(); request != requests_.end();) {
    if ((*request)->source_ != kAnyone) {
      ++request;
      continue;
    }
    (*request)->finish(-1, failure(text));
    request = requests_.erase(request);
  }
}

}  // namespace lockstep::python
