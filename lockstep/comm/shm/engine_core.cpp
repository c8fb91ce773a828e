#include "lockstep/comm/shm/engine_core.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/cores.h"
#include "lockstep/core/disagreement.h"
#include "lockstep/core/thread_signals.h"

namespace lockstep::shm {
namespace {

// It leaves between two steps, each of which is a pass over some memory.
constexpr std::chrono::seconds kThreadLeaves{2};
constexpr std::chrono::seconds kDriverLeaves{30};
// A move costs about as much as a wake-up; where another process comes to the same core again and
// again it must not be all that happens.
constexpr std::chrono::milliseconds kBetweenMoves{2};
// While there is always something to do, the clock is read after this many steps: a small operation
// has fewer, and a step is at most a pass over some memory.
constexpr int kStepsPerLook = 4;
// Callers who come to wait within the first of these, so many times in a row, are taken to do so
// again. One that does not loses at most two looks of the thread; each look costs it a few
// microseconds.
constexpr std::chrono::microseconds kPrompt{100};
constexpr unsigned kPromptWaits = 2;
constexpr std::chrono::milliseconds kPark{1};

// How often a process was forked on the way to this one. Counted, because asking for the process id
// is a system call, and a small operation takes only a few times as long.
std::atomic<unsigned> forks{0};

unsigned forks_until_now() {
  [[maybe_unused]] static const int counting =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  return forks.load();
}

}  // namespace

// ---------------------------------------------------------------- tickets

Ticket::Ticket(std::shared_ptr<EngineCore> core, const Deadline& deadline)
    : core_(std::move(core)), deadline_(deadline) {}
Ticket::~Ticket() = default;

void Ticket::wait(const Deadline& deadline) {
  core_->note_wait(*this);
  if (!done()) core_->wait(*this, deadline);
  if (auto failed = error()) std::rethrow_exception(failed);
}

void Ticket::wait() {
  wait(deadline_);
}

bool Ticket::poll() {
  return done() || core_->poll(*this);
}

std::exception_ptr Ticket::error() const {
  return done() ? error_ : nullptr;  // stays as it is from then on
}

void Ticket::on_done(std::function<void()> callback) {
  // In a forked child nothing ends any more, and a lock may be held by a thread of the parent.
  if (core_->inherited()) {
    new std::function<void()>(std::move(callback));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!done()) {
      callback_ = std::move(callback);
      callback = nullptr;
    }
  }
  if (callback)
    callback();
  else
    core_->want_progress();
}

void EngineCore::finish(Ticket& ticket, std::exception_ptr error) {
  const std::lock_guard lock(ticket.mutex_);
  ticket.error_ = std::move(error);
  if (ticket.callback_) callbacks_.push_back(std::exchange(ticket.callback_, nullptr));
  ticket.done_.store(true, std::memory_order_release);
  finished_any_ = true;
}

// ---------------------------------------------------------------- life

EngineCore::EngineCore(const RankInfo& place, const Layout& layout, std::vector<Peer> peers)
    : place_(place),
      layout_(layout),
      forks_(forks_until_now()),
      peers_(std::move(peers)),
      messages_(place.size),
      backoff_(place.size > allowed_cores()) {
  for (const Peer& peer : peers_) views_.push_back(layout_.view(peer.segment->data()));
}

bool EngineCore::inherited() const {
  return forks.load(std::memory_order_relaxed) != forks_;
}

void EngineCore::close() noexcept {
  bool pending = false;
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    stopping_.store(true);
    // The engine's own thread may drive there with nothing left to do; it leaves when called.
    const bool inside = thread_.get_id() == std::this_thread::get_id();
    waiters_.fetch_add(1);
    wake(*view(place_.rank).header);
    if (!inside) changed_.wait_for(lock, kThreadLeaves, [this] { return !thread_sits_; });
    waiters_.fetch_sub(1);
    pending = driven_ || has_work() || arrivals_.load() > 0;
  }
  if (pending) {
    EngineFailure failure;
    failure.text = fmt::format("rank {} closed its engine with operations under way", place_.rank);
    failure.culprit = place_.rank;
    break_with(std::move(failure));
    stop_driving();
  } else if (!broken()) {
    view(place_.rank).header->state.store(State::kClosed);
    for (int rank = 0; rank < place_.size; ++rank) wake(*view(rank).header);
  }
  thread_called_.notify_one();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();  // a callback dropped the engine; the thread owns what it still needs
  else
    thread_.join();
}

// A thread that waits may be in the middle of an array, its own or one that nobody else remembers.
// Arrays are free once the engine is closed, so it has to be gone by then.
void EngineCore::stop_driving() noexcept {
  std::unique_lock lock(mutex_);
  waiters_.fetch_add(1);
  changed_.wait_for(lock, kDriverLeaves, [this] { return !driven_; });
  waiters_.fetch_sub(1);
  if (!driven_) drive(lock, {Mode::kOnce});
}

// ---------------------------------------------------------------- failure

std::string error_text(const std::exception& error) {
  std::string text = error.what();
  const std::string component = "[shm] ";
  if (text.rfind(component, 0) == 0) text.erase(0, component.size());
  return text;
}

void EngineCore::break_with(EngineFailure failure) noexcept {
  if (failure.origin < 0) failure.origin = place_.rank;
  {
    const std::lock_guard lock(failure_mutex_);
    if (broken()) return;
    failure_ = std::move(failure);
    broken_.store(true);
    Header& own = *view(place_.rank).header;
    own.trouble.origin = failure_.origin;
    own.trouble.culprit = failure_.culprit;
    own.trouble.timeout = failure_.timeout ? 1 : 0;
    own.trouble.disagreement = failure_.disagreement ? 1 : 0;
    failure_.text.copy(own.trouble.text, sizeof own.trouble.text - 1);
    own.state.store(State::kBroken);
  }
  for (int rank = 0; rank < place_.size; ++rank) wake(*view(rank).header);
}

void EngineCore::settle() noexcept {
  std::unique_lock lock(mutex_);
  if (!driven_) drive(lock, {Mode::kOnce});
}

// A failure that another rank has found is reported with that rank's message.
std::string EngineCore::composed(const EngineFailure& failure) const {
  if (failure.origin < 0 || failure.origin == place_.rank) return failure.text;
  return fmt::format("rank {} failed: {}", failure.origin, failure.text);
}

std::string EngineCore::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return broken() ? composed(failure_) : "";
}

std::exception_ptr EngineCore::as_exception() const {
  const std::lock_guard lock(failure_mutex_);
  return as_exception(failure_);
}

std::exception_ptr EngineCore::as_exception(const EngineFailure& failure) const {
  CommContext context = failure.context;
  context.rank = place_.rank;
  context.peer = failure.culprit;
  if (failure.timeout)
    return std::make_exception_ptr(TimeoutError("shm", composed(failure), std::move(context)));
  if (failure.disagreement)
    return std::make_exception_ptr(Disagreement("shm", composed(failure), std::move(context)));
  return std::make_exception_ptr(CommError("shm", composed(failure), std::move(context)));
}

void EngineCore::throw_if_broken() const {
  if (inherited())
    throw UsageError("shm",
                     "this process was forked off rank {}, whose engine this is. Communicate from "
                     "the rank itself, or start the child as a new process.",
                     place_.rank);
  if (broken()) std::rethrow_exception(as_exception());
}

// ---------------------------------------------------------------- starting and waiting

void EngineCore::enqueue(const std::shared_ptr<Collective>& collective) {
  collective->what.sequence = ++sequence_;
  queue_.push_back(collective);
}

void EngineCore::start(const std::shared_ptr<Collective>& collective, bool caller_waits) {
  throw_if_broken();
  std::unique_lock lock(mutex_);
  if (driven_) {
    new_collectives_.push_back(collective);
    arrivals_.fetch_add(1);
  } else {
    enqueue(collective);
    drive(lock, {Mode::kOnce});
  }
  after_start(*collective, caller_waits);
}

void EngineCore::start(const std::shared_ptr<Message>& message, bool caller_waits) {
  throw_if_broken();
  std::unique_lock lock(mutex_);
  if (driven_) {
    new_messages_.push_back(message);
    arrivals_.fetch_add(1);
  } else {
    messages_.add(message);
    drive(lock, {Mode::kOnce});
  }
  after_start(*message, caller_waits);
}

void EngineCore::after_start(const Ticket& ticket, bool caller_waits) {
  if (ticket.done()) return;
  if (driven_) wake(*view(place_.rank).header);
  if (caller_waits || (!driven_ && on_its_way(ticket))) return;
  if (unwaited_.exchange(&ticket) != nullptr) prompt_waits_ = 0;
  ++starts_;
  if (!dozing_ || prompt_waits_ < kPromptWaits) wake_thread();
  started_ = Deadline::Clock::now();  // after the wake-up, which may have cost us the core
}

// Most callers wait for what they have just started. To wake the thread for each of these would
// cost more than a small operation, and on a full machine the thread would take a core from a rank.
void EngineCore::note_wait(const Ticket& ticket) {
  if (unwaited_.load(std::memory_order_relaxed) != &ticket || inherited()) return;
  const std::lock_guard lock(mutex_);
  if (unwaited_.load() != &ticket) return;
  unwaited_.store(nullptr);
  const bool prompt = Deadline::Clock::now() - started_ < kPrompt;
  prompt_waits_ = prompt ? std::min(prompt_waits_ + 1, kPromptWaits) : 0;
}

// True when the peers can finish it without anything more from this rank.
bool EngineCore::on_its_way(const Ticket& ticket) const {
  return posted_ && first_round_ && !queue_.empty() && queue_.front().get() == &ticket &&
         queue_.front()->one_round;
}

void EngineCore::wait(Ticket& ticket, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  waiters_.fetch_add(1);
  while (!ticket.done()) {
    if (!driven_) {
      drive(lock, {Mode::kUntil, &ticket, &deadline});
      continue;
    }
    // The engine's own thread lets a waiter drive.
    wake(*view(place_.rank).header);
    changed_.wait_for(lock, kLongestSleep);
    if (ticket.done() || !driven_ || !deadline.expired()) continue;
    // The driver will see it and end all tickets, so the array is not touched afterwards.
    EngineFailure failure = failure_in(
        &ticket, fmt::format("{} timed out after {} ms", ticket.text(), deadline.total().count()));
    failure.timeout = true;
    break_with(std::move(failure));
  }
  waiters_.fetch_sub(1);
  if (waiters_.load() > 0) return;
  // Work that was left to a caller, which then waited for something else, goes to the engine's
  // thread. A present driver wakes it when it stops driving, if there is still work.
  if (unwaited_.load() != nullptr && (driven_ || has_work()))
    hand_over();
  else if (progress_wanted_)
    thread_called_.notify_one();
}

void EngineCore::hand_over() {
  unwaited_.store(nullptr);
  prompt_waits_ = 0;
  wake_thread();
}

bool EngineCore::poll(Ticket& ticket) {
  std::unique_lock lock(mutex_);
  if (!driven_) drive(lock, {Mode::kPoll, &ticket, nullptr});
  // Who only asks does not do the large pieces of work; someone must.
  if (!ticket.done() && !driven_ && !progress_wanted_ && !on_its_way(ticket)) wake_thread();
  return ticket.done();
}

void EngineCore::want_progress() {
  const std::lock_guard lock(mutex_);
  wake_thread();
}

// ---------------------------------------------------------------- the driver

void EngineCore::drive(std::unique_lock<std::mutex>& lock, Task task) {
  const int self = task.mode == Mode::kUntil ? 1 : 0;  // counted among the waiters
  driven_ = true;
  for (;;) {
    lock.unlock();
    work(task);
    lock.lock();
    if (arrivals_.load() == 0) break;
    task.mode = Mode::kOnce;
  }
  driven_ = false;
  if (!has_work()) progress_wanted_ = false;
  if (waiters_.load() > self)
    changed_.notify_all();
  else if (progress_wanted_)
    thread_called_.notify_one();
  if (callbacks_.empty()) return;
  auto callbacks = std::exchange(callbacks_, {});
  lock.unlock();
  for (const auto& callback : callbacks) callback();
  // What they hold may end with them, and wait for a lock whose owner waits for this one.
  callbacks.clear();
  lock.lock();
}

void EngineCore::wake_thread() {
  if (stop_) return;
  progress_wanted_ = true;
  if (!thread_.joinable())
    thread_ = std::thread([self = shared_from_this()] { self->run_thread(); });
  else
    thread_called_.notify_one();
}

void EngineCore::run_thread() {
  ::pthread_setname_np(::pthread_self(), "lockstep-shm");
  const SignalsBlocked blocked;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (prompt_waits_ < kPromptWaits)
      thread_called_.wait(
          lock, [this] { return stop_ || thread_is_due() || prompt_waits_ == kPromptWaits; });
    else
      park(lock);
    if (stop_) return;
    if (!thread_is_due()) continue;
    if (!has_work()) {
      progress_wanted_ = false;
      continue;
    }
    thread_sits_ = true;
    drive(lock, {Mode::kProgress});
    thread_sits_ = false;
    changed_.notify_all();
  }
}

// While callers wait for what they start, the thread is not called but looks by itself: an
// operation that has nobody is found within two looks. After one without a start it sleeps until
// the next start, or until it is called.
void EngineCore::park(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t seen = starts_;
  const auto called = [this] { return stop_ || thread_is_due(); };
  dozing_ = true;
  const bool early = thread_called_.wait_for(lock, kPark, called);
  dozing_ = false;
  if (early || starts_ != seen) return;
  if (waiters_.load() == 0) {
    if (driven_) return;  // by someone who will not stay
    if (unwaited_.load() != nullptr && has_work()) return hand_over();
  }
  thread_called_.wait(lock, [&] { return called() || starts_ != seen; });
}

void EngineCore::absorb() {
  const std::lock_guard lock(mutex_);
  for (const auto& collective : new_collectives_) enqueue(collective);
  for (const auto& message : new_messages_) messages_.add(message);
  new_collectives_.clear();
  new_messages_.clear();
  arrivals_.store(0);
}

void EngineCore::fail_all() {
  absorb();
  const std::exception_ptr error = as_exception();
  for (const auto& collective : queue_) finish(*collective, error);
  queue_.clear();
  for (const auto& message : messages_.take_all()) finish(*message, error);
  posted_ = false;
  first_round_ = true;
}

void EngineCore::work(const Task& task) noexcept {
  try {
    work_until(task);
  } catch (const std::exception& error) {
    EngineFailure failure = failure_in(nullptr, error_text(error));
    failure.disagreement = dynamic_cast<const Disagreement*>(&error) != nullptr;
    break_with(std::move(failure));
  }
  if (broken()) fail_all();
}

bool EngineCore::satisfied(const Task& task) const {
  switch (task.mode) {
    case Mode::kOnce:
    case Mode::kPoll:
      return false;
    case Mode::kUntil:
      return task.until->done();
    case Mode::kProgress:
      return !has_work() || waiters_.load() > 0 || stopping_.load();
  }
  return true;
}

void EngineCore::notify_waiters(const Task& task) {
  if (!std::exchange(finished_any_, false)) return;
  if (waiters_.load() <= (task.mode == Mode::kUntil ? 1 : 0)) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void EngineCore::work_until(const Task& task) {
  // Someone who has not come to wait does a few cheap steps and goes.
  const bool passing = task.mode == Mode::kOnce || task.mode == Mode::kPoll;
  int turns_left = 8;
  int steps = 0;
  backoff_.renew();
  while (!broken()) {
    if (arrivals_.load() > 0) absorb();
    if (step(passing)) {
      if (task.mode != Mode::kOnce && ++steps % kStepsPerLook == 0) look_when_due(task);
      notify_waiters(task);
      if (satisfied(task) || !callbacks_.empty() || (passing && --turns_left == 0)) return;
      backoff_.renew();
    } else if (passing) {
      if (task.mode == Mode::kPoll) look_when_due(task);
      return;
    } else if (satisfied(task)) {
      return;
    } else {
      pass(task);
      // The last look before a sleep may have finished something, and so may a peer's end.
      notify_waiters(task);
      if (!callbacks_.empty()) return;
    }
  }
}

void EngineCore::pass(const Task& task) {
  switch (backoff_.pass()) {
    case Backoff::kSpin:
      return;
    case Backoff::kYield:
      return migrate_off_shared_core();
    case Backoff::kPark:
      sleep(task);
      look_after_peers(task);
  }
}

// A rank that is waited for and was last seen on this very core cannot run while this one looks.
void EngineCore::migrate_off_shared_core() {
  if (!posted_ || Deadline::Clock::now() - moved_ < kBetweenMoves) return;
  const int here = ::sched_getcpu();
  std::vector<int> taken;
  bool shared = false;
  for (int rank = 0; rank < place_.size; ++rank) {
    if (rank == place_.rank) continue;
    const Header& header = *view(rank).header;
    const bool behind = header.posts[round_ & 1].round.load() < round_;
    // Who is behind has made the post of the round before, the others this one.
    const int there = header.posts[behind ? (round_ - 1) & 1 : round_ & 1].cpu.load();
    shared |= behind && there == here;
    taken.push_back(there);
  }
  if (!shared) return;
  moved_ = Deadline::Clock::now();
  taken.push_back(here);
  migrate_off_cores(taken);
}

void EngineCore::sleep(const Task& task) {
  const bool messages = messages_.pending() > 0;
  const std::uint32_t code = messages ? kAnyone : static_cast<std::uint32_t>(arrived_) + 1;
  sleep_unless(*view(place_.rank).header, code, [&] {
    const bool called = task.mode == Mode::kProgress && (waiters_.load() > 0 || stopping_.load());
    if (called || broken() || arrivals_.load() != 0 || step(false)) return false;
    // Who was waited for may have come just before this was to be read; then it is another rank's
    // post that must wake us.
    return messages || code == static_cast<std::uint32_t>(arrived_) + 1;
  });
}

}  // namespace lockstep::shm
