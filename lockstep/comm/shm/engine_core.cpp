#include "lockstep/comm/shm/engine_core.h"

#include <fmt/ranges.h>
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/thread_signals.h"

namespace lockstep::shm {
namespace {

// It leaves between two steps, each of which is a pass over some memory.
constexpr std::chrono::seconds kThreadLeaves{2};
constexpr std::chrono::seconds kDriverLeaves{30};
// While there is always something to do, the clock is read after this many steps: a small operation
// has fewer, and a step is at most a pass over some memory. A pause is far shorter.
constexpr int kStepsPerLook = 4;
constexpr unsigned kPausesPerLook = 64;

// How often a process was forked on the way to this one. Counted, because asking for the process id
// is a system call, and a small operation takes only a few times as long.
std::atomic<unsigned> forks{0};

unsigned forks_until_now() {
  [[maybe_unused]] static const int counting =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  return forks.load();
}

CommContext context_of(const Ticket& ticket) {
  const auto* const collective = dynamic_cast<const Collective*>(&ticket);
  return {.operation = ticket.text(),
          .sequence = collective != nullptr ? collective->what.sequence : 0,
          .elapsed = ticket.deadline().elapsed()};
}

}  // namespace

// ---------------------------------------------------------------- life

EngineCore::EngineCore(const RankAndSize& info, const Layout& layout, std::vector<Peer> peers,
                       PolicyFactory policy)
    : group_(info, layout, std::move(peers)),
      failure_(group_),
      forks_(forks_until_now()),
      policy_(policy != nullptr ? policy(group_) : make_adaptive_policy(group_)),
      rounds_(group_),
      messages_(group_) {}

bool EngineCore::inherited() const {
  return forks.load(std::memory_order_relaxed) != forks_;
}

void EngineCore::throw_if_inherited() const {
  if (inherited())
    throw UsageError("shm",
                     "this process was forked off rank {}, whose engine this is. Communicate from "
                     "the rank itself, or start the child as a new process.",
                     group_.rank());
}

void EngineCore::throw_if_broken() const {
  throw_if_inherited();
  if (failure_.broken()) std::rethrow_exception(failure_.as_exception());
}

void EngineCore::fail(EngineFailure failure) noexcept {
  failure_.set(std::move(failure));
  std::unique_lock lock(mutex_);
  if (!driven_) drive(lock, {Mode::kOnce});
}

void EngineCore::close() noexcept {
  bool pending = false;
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    stopping_.store(true);
    // The engine's own thread may drive with nothing left to do; it stops when woken.
    const bool inside = thread_.get_id() == std::this_thread::get_id();
    waiters_.fetch_add(1);
    group_.wake_self();
    if (!inside) changed_.wait_for(lock, kThreadLeaves, [this] { return !thread_drives_; });
    waiters_.fetch_sub(1);
    pending = driven_ || has_work() || arrivals_.load() > 0;
  }
  if (pending) {
    failure_.set(
        {.text = fmt::format("rank {} closed its engine with operations under way", group_.rank()),
         .culprit = group_.rank()});
    stop_driving();
  } else if (!failure_.broken()) {
    group_.own().header->state.store(State::kClosed);
    group_.wake_all();
  }
  thread_called_.notify_one();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();  // a callback dropped the engine; the thread owns what it still needs
  else
    thread_.join();
}

// A driving thread may be in the middle of an array, its own or another operation's. Arrays are
// free once the engine is closed, so the thread must have stopped by then.
void EngineCore::stop_driving() noexcept {
  std::unique_lock lock(mutex_);
  waiters_.fetch_add(1);
  changed_.wait_for(lock, kDriverLeaves, [this] { return !driven_; });
  waiters_.fetch_sub(1);
  if (!driven_) drive(lock, {Mode::kOnce});
}

std::shared_ptr<SymmetricBlock> EngineCore::make_symmetric(std::size_t bytes,
                                                           const Deadline& deadline) {
  throw_if_broken();
  // A third rank that has closed in good order must not keep us from hearing the awaited one.
  const auto peer_failure = [this](int awaited) -> std::exception_ptr {
    if (failure_.broken()) return failure_.as_exception();
    for (const EngineFailure& each : failure_.of_peers())
      if (each.origin >= 0 || each.culprit == awaited) return failure_.as_exception(each);
    return nullptr;
  };
  try {
    return shm::make_symmetric(group_.blocks(), {group_.info(), group_.peers(), peer_failure},
                               bytes, deadline);
  } catch (const CommError& error) {
    // Ranks may disagree on which messages were exchanged, so the engine cannot continue.
    fail(failure_from("making a symmetric block", error));
    throw;
  }
}

// ---------------------------------------------------------------- starting and waiting

void EngineCore::add(const std::shared_ptr<Collective>& collective) {
  collective->what.sequence = ++sequence_;
  queue_.push_back(collective);
}

void EngineCore::start(const std::shared_ptr<Collective>& collective, bool caller_waits) {
  start_or_hand_over(collective, new_collectives_, caller_waits);
}

void EngineCore::start(const std::shared_ptr<Message>& message, bool caller_waits) {
  start_or_hand_over(message, new_messages_, caller_waits);
}

template <typename Operation>
void EngineCore::start_or_hand_over(const std::shared_ptr<Operation>& operation,
                                    std::vector<std::shared_ptr<Operation>>& arriving,
                                    bool caller_waits) {
  throw_if_broken();
  operation->engine_ = shared_from_this();
  std::unique_lock lock(mutex_);
  if (driven_) {
    arriving.push_back(operation);
    arrivals_.fetch_add(1);
  } else {
    add(operation);
    drive(lock, {Mode::kOnce});
  }
  if (operation->done()) return;
  if (driven_) group_.wake_self();
  if (caller_waits || (!driven_ && peers_can_finish(*operation))) return;
  policy_->started(*operation, *this);
}

// Whether they can without anything more from this rank.
bool EngineCore::peers_can_finish(const Ticket& ticket) const {
  return rounds_.in_first() && !queue_.empty() && queue_.front().get() == &ticket &&
         queue_.front()->one_round;
}

void EngineCore::wait(Ticket& ticket, const Deadline& deadline) {
  if (ticket.done() && inherited()) return;
  throw_if_inherited();
  policy_->waited_for(ticket, mutex_);
  if (ticket.done()) return;
  std::unique_lock lock(mutex_);
  waiters_.fetch_add(1);
  while (!ticket.done()) {
    if (!driven_) {
      drive(lock, {Mode::kUntil, &ticket, &deadline});
      continue;
    }
    // The engine's own thread makes way for a caller that waits.
    group_.wake_self();
    changed_.wait_for(lock, kLongestSleep);
    if (ticket.done() || !driven_ || !deadline.expired()) continue;
    // The driver will see it and end all tickets, so the array is not touched afterwards.
    failure_.set(
        {.timeout = true,
         .text = fmt::format("{} timed out after {} ms", ticket.text(), deadline.total().count()),
         .context = context_of(ticket)});
  }
  waiters_.fetch_sub(1);
  if (waiters_.load() > 0) return;
  // If another thread drives now, it wakes the engine's own thread when it stops with work
  // left.
  if ((driven_ || has_work()) && policy_->takes_over())
    wake_thread();
  else if (progress_wanted_)
    thread_called_.notify_one();
}

bool EngineCore::poll(Ticket& ticket) {
  throw_if_inherited();
  std::unique_lock lock(mutex_);
  if (!driven_) drive(lock, {Mode::kPoll, &ticket, nullptr});
  // A caller that only polls does not do the large pieces of work; someone must.
  if (!ticket.done() && !driven_ && !progress_wanted_ && !peers_can_finish(ticket)) wake_thread();
  return ticket.done();
}

void EngineCore::request_progress() {
  const std::lock_guard lock(mutex_);
  wake_thread();
}

// ---------------------------------------------------------------- who drives

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
  if (completions_.callbacks.empty()) return;
  auto callbacks = std::exchange(completions_.callbacks, {});
  lock.unlock();
  for (const auto& callback : callbacks) callback();
  // Destroying what they hold may wait for a lock whose owner waits for this one.
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

bool EngineCore::sleep_thread(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit,
                              const std::function<bool()>& also) {
  return thread_called_.wait_for(lock, limit, [&] { return stop_ || thread_is_due() || also(); });
}

void EngineCore::run_thread() {
  ::pthread_setname_np(::pthread_self(), "lockstep-shm");
  const SignalsBlocked blocked;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (!thread_is_due()) {
      policy_->park_thread(lock, *this);
    } else if (!has_work()) {
      progress_wanted_ = false;
    } else {
      thread_drives_ = true;
      drive(lock, {Mode::kProgress});
      thread_drives_ = false;
      changed_.notify_all();
    }
  }
}

// ---------------------------------------------------------------- the driver

void EngineCore::take_arrivals() {
  const std::lock_guard lock(mutex_);
  for (const auto& collective : new_collectives_) add(collective);
  for (const auto& message : new_messages_) add(message);
  new_collectives_.clear();
  new_messages_.clear();
  arrivals_.store(0);
}

void EngineCore::fail_all() {
  take_arrivals();
  const std::exception_ptr error = failure_.as_exception();
  for (const auto& collective : queue_) completions_.finish(*collective, error);
  queue_.clear();
  for (const auto& message : messages_.take_all()) completions_.finish(*message, error);
  rounds_.drop();
}

void EngineCore::work(const Task& task) noexcept {
  try {
    work_until(task);
  } catch (const EngineFailure& failure) {
    failure_.set(failure);
  } catch (const std::exception& error) {
    failure_.set(failure_from("an operation", error));
  }
  if (failure_.broken()) fail_all();
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
  if (!std::exchange(completions_.any, false)) return;
  if (waiters_.load() <= (task.mode == Mode::kUntil ? 1 : 0)) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void EngineCore::work_until(const Task& task) {
  // A caller that has not come to wait does a few cheap steps and leaves.
  const bool passing = task.mode == Mode::kOnce || task.mode == Mode::kPoll;
  const auto& callbacks = completions_.callbacks;
  int steps = 0;
  policy_->progressed();
  while (!failure_.broken()) {
    if (arrivals_.load() > 0) take_arrivals();
    if (step(passing)) {
      ++steps;
      if (task.mode != Mode::kOnce && steps % kStepsPerLook == 0) look_when_due(task);
      notify_waiters(task);
      if (satisfied(task) || callbacks.size() >= policy_->callbacks_at_once ||
          (passing && steps == policy_->steps_in_passing))
        return;
      policy_->progressed();
    } else if (passing) {
      if (task.mode == Mode::kPoll) look_when_due(task);
      return;
    } else if (satisfied(task)) {
      return;
    } else {
      pause(task);
      // The last look before a sleep may have finished something, and so may a peer's end.
      notify_waiters(task);
      if (!callbacks.empty()) return;
    }
  }
}

bool EngineCore::step(bool quick_only) {
  bool moved = messages_.pending() > 0 && messages_.pump(completions_);
  if (!queue_.empty() && (!quick_only || queue_.front()->quick)) moved |= step_head();
  return moved;
}

bool EngineCore::step_head() {
  const Rounds::Step step = rounds_.step(*queue_.front());
  if (step != Rounds::Step::kDone) return step == Rounds::Step::kMoved;
  const auto finished = std::move(queue_.front());
  queue_.pop_front();
  completions_.finish(*finished);
  return true;
}

void EngineCore::pause(const Task& task) {
  if (policy_->pause(rounds_.awaited())) {
    sleep(task);
    look_after_peers(task);
  } else if (++pauses_ % kPausesPerLook == 0) {
    look_when_due(task);
  }
}

void EngineCore::sleep(const Task& task) {
  const bool messages = messages_.pending() > 0;
  const auto awaited = [this] { return static_cast<std::uint32_t>(rounds_.awaited_rank()) + 1; };
  const std::uint32_t code = messages ? kAnyone : awaited();
  group_.sleep_while(code, [&] {
    const bool called = task.mode == Mode::kProgress && (waiters_.load() > 0 || stopping_.load());
    if (called || failure_.broken() || arrivals_.load() != 0 || step(false)) return false;
    // The awaited rank may have posted just before this was read; then another rank's post must
    // wake us.
    return messages || code == awaited();
  });
}

// ---------------------------------------------------------------- peers and deadlines

// For a thread that never sleeps between steps: one operation may keep moving while a collective
// behind it waits for a rank that has died.
void EngineCore::look_when_due(const Task& task) {
  if (Deadline::Clock::now() - looked_ > kLongestSleep) look_after_peers(task);
}

// What a rank completed before it ended counts, and all of it is visible once its end is known. It
// starts nothing more, so this terminates even if other ranks keep sending.
void EngineCore::finish_what_peers_left() {
  if (messages_.pending() > 0) messages_.pump(completions_);
  while (!failure_.broken() && !queue_.empty() && step_head()) {
  }
}

// A rank that has ended matters only to operations that need it, and must hide neither another
// rank's end nor the deadline.
void EngineCore::look_after_peers(const Task& task) {
  looked_ = Deadline::Clock::now();
  const std::vector<EngineFailure> found = failure_.of_peers();
  if (!found.empty()) finish_what_peers_left();
  if (failure_.broken()) return;
  const auto trouble = std::find_if(found.begin(), found.end(),
                                    [this](const EngineFailure& each) { return blocked_by(each); });
  if (trouble == found.end()) return check_deadlines(task);
  const Ticket* blocked = queue_.empty() ? nullptr : queue_.front().get();
  if (blocked == nullptr && trouble->culprit >= 0) blocked = messages_.with(trouble->culprit);
  EngineFailure failure = *trouble;
  if (blocked != nullptr) failure.context = context_of(*blocked);
  if (trouble->origin < 0 && blocked != nullptr)
    failure.text += fmt::format(
        " before it took part in {}. Look for the reason in that rank's output.{}{}",
        blocked->text(), queue_.empty() ? "" : " ", queue_.empty() ? "" : kUnevenInputs);
  failure_.set(std::move(failure));
}

// Another pair's messages continue without that rank, a collective never does.
bool EngineCore::blocked_by(const EngineFailure& trouble) const {
  if (!queue_.empty() || trouble.origin >= 0) return has_work();
  return messages_.with(trouble.culprit) != nullptr;
}

void EngineCore::check_deadlines(const Task& task) {
  if (task.until != nullptr && !task.until->done() && task.deadline != nullptr &&
      task.deadline->expired())
    return time_out(*task.until, *task.deadline);
  if (!queue_.empty() && queue_.front()->deadline().expired())
    return time_out(*queue_.front(), queue_.front()->deadline());
  const Message* message = messages_.pending() > 0 ? messages_.most_urgent() : nullptr;
  if (message != nullptr && message->deadline().expired()) time_out(*message, message->deadline());
}

void EngineCore::time_out(const Ticket& ticket, const Deadline& deadline) {
  const auto* message = dynamic_cast<const Message*>(&ticket);
  std::vector<int> missing;
  if (message != nullptr)
    missing.push_back(message->ends.peer);
  else if (!queue_.empty() && rounds_.awaited() != 0)
    missing = rounds_.behind();
  std::string text = fmt::format("rank {}: {} timed out after {} ms", group_.rank(), ticket.text(),
                                 deadline.total().count());
  const std::size_t why_at = text.size();
  if (!missing.empty()) {
    text += fmt::format(": {} {} did not arrive", missing.size() == 1 ? "rank" : "ranks",
                        fmt::join(missing, ", "));
    const bool behind_another = message == nullptr && queue_.front().get() != &ticket;
    if (behind_another) text += fmt::format(" in {} before it", queue_.front()->text());
  }
  text += ". It is stopped, slower than the limit, or took another branch of the program.";
  failure_.set({.timeout = true,
                .text = std::move(text),
                .why_at = why_at,
                .culprit = missing.empty() ? -1 : missing.front(),
                .context = context_of(ticket)});
}

}  // namespace lockstep::shm
