#include "lockstep/comm/shm/progress_policy.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "lockstep/core/host.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;

// ---------------------------------------------------------------- the driver

// A wake-up through the kernel costs about as much as ten small operations, so it must stay the
// exception. Yielding the core costs little if no other process wants it, and helps if the awaited
// rank has no core. But an unrelated computing process takes it for milliseconds, and a sleeping
// rank would be woken sooner: after such a loss the next waits sleep at once.
constexpr std::chrono::microseconds kAlone{10};      // before the core is offered
constexpr std::chrono::microseconds kAwakeFor{100};  // before sleep
constexpr std::chrono::microseconds kLost{500};      // another process took the core
constexpr unsigned kWaitsAsleep = 200;
constexpr unsigned kTurnsPerLook = 8;          // at the clock
constexpr unsigned kOversubscribedTurns = 16;  // before the core is offered, if oversubscribed

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// For how long a waiting thread stays awake. With a core for each rank the answer is usually there
// within microseconds; without, the core is offered to the others at once.
class Backoff {
 public:
  explicit Backoff(bool oversubscribed) : oversubscribed_(oversubscribed) {}

  // Call when there was something to do.
  void renew() {
    if (turns_ > 0 && wary_ > 0) --wary_;
    turns_ = 0;
    offering_ = false;
    since_ = {};
    looked_ = {};
  }
  enum State {
    kSpin,
    kYield,  // once in a wait: it takes longer than an answer of ranks with cores of their own
    kPark    // it is time to sleep
  };
  // Passes a moment.
  State pass() {
    ++turns_;
    const bool offer = offering_ || (oversubscribed_ && turns_ > kOversubscribedTurns);
    if (offer && wary_ > 0) return kPark;
    if (offer)
      ::sched_yield();
    else
      pause_core();
    if (!offer && turns_ % kTurnsPerLook != 0) return kSpin;
    const auto before = std::exchange(looked_, Clock::now());
    if (since_ == Clock::time_point{}) since_ = looked_;
    if (offer && before != Clock::time_point{} && looked_ - before > kLost) wary_ = kWaitsAsleep;
    const bool alone = std::exchange(offering_, looked_ - since_ > kAlone);
    if (looked_ - since_ > kAwakeFor) return kPark;
    return offering_ && !alone && !oversubscribed_ ? kYield : kSpin;
  }

 private:
  const bool oversubscribed_;
  unsigned turns_ = 0;
  unsigned wary_ = 0;      // waits in which the core is not offered
  bool offering_ = false;  // the core, to others
  Clock::time_point since_{};
  Clock::time_point looked_{};  // at the clock
};

// The least time between moves: a move costs about as much as a wake-up, and another process may
// keep coming to the same core.
constexpr std::chrono::milliseconds kBetweenMoves{2};

// ---------------------------------------------------------------- the engine's thread

// Callers who come to wait within kPrompt, so many times in a row, are expected to do so again. One
// that does not loses at most two looks of the thread; each look costs a few microseconds.
constexpr std::chrono::microseconds kPrompt{100};
constexpr unsigned kPromptWaits = 2;
constexpr std::chrono::milliseconds kPark{1};
constexpr std::chrono::hours kUntilWoken{1};

class AdaptivePolicy final : public ProgressPolicy {
 public:
  explicit AdaptivePolicy(const Group& group)
      : group_(group), backoff_(group.size() > allowed_cores()) {}

  void progressed() override { backoff_.renew(); }
  bool pause(std::uint64_t round) override {
    const Backoff::State state = backoff_.pass();
    if (state == Backoff::kYield && round != 0) migrate_off_shared_core(round);
    return state == Backoff::kPark;
  }

  void started(const Ticket& ticket, ProgressHost& host) override {
    if (unwaited_.exchange(&ticket) != nullptr) prompt_waits_ = 0;
    ++starts_;
    if (!parked_ || prompt_waits_ < kPromptWaits) host.wake_thread();
    started_ = Clock::now();  // after the wake-up, which may have cost us the core
  }

  // Most callers wait for what they have just started. To wake the thread for each of these would
  // cost more than a small operation, and on a full machine the thread would take a core from a
  // rank.
  void waited_for(const Ticket& ticket, std::mutex& mutex) override {
    if (unwaited_.load(std::memory_order_relaxed) != &ticket) return;
    const std::lock_guard lock(mutex);
    if (unwaited_.load() != &ticket) return;
    unwaited_.store(nullptr);
    const bool prompt = Clock::now() - started_ < kPrompt;
    prompt_waits_ = prompt ? std::min(prompt_waits_ + 1, kPromptWaits) : 0;
  }

  // Work that was left to its caller, who then waited for something else, moves to the thread.
  bool takes_over() override {
    if (unwaited_.load() == nullptr) return false;
    unwaited_.store(nullptr);
    prompt_waits_ = 0;
    return true;
  }

  // While callers wait for what they start, the thread is not woken but looks by itself: an
  // operation that nobody waits for is found within two looks. After a look without a new start it
  // sleeps until the next start, or until it is woken.
  void park_thread(std::unique_lock<std::mutex>& lock, ProgressHost& host) override {
    if (prompt_waits_ < kPromptWaits) {
      host.sleep_thread(lock, kUntilWoken, [this] { return prompt_waits_ == kPromptWaits; });
      return;
    }
    const std::uint64_t seen = starts_;
    parked_ = true;
    const bool early = host.sleep_thread(lock, kPark, [] { return false; });
    parked_ = false;
    if (early || starts_ != seen) return;
    if (!host.has_waiters()) {
      if (host.driven()) return;  // by a thread that will not stay
      if (host.has_work() && takes_over()) return host.wake_thread();
    }
    host.sleep_thread(lock, kUntilWoken, [&] { return starts_ != seen; });
  }

 private:
  // A rank that is waited for and was last seen on this very core cannot run while this one looks.
  void migrate_off_shared_core(std::uint64_t round) {
    if (Clock::now() - moved_ < kBetweenMoves) return;
    const int here = ::sched_getcpu();
    std::vector<int> taken;
    bool shared = false;
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (rank == group_.rank()) continue;
      const Header& header = *group_.view(rank).header;
      const bool behind = header.posts[round & 1].round.load() < round;
      // A rank that is behind has made the post of the previous round, the others that of this one.
      const int there = header.posts[behind ? (round - 1) & 1 : round & 1].cpu.load();
      shared |= behind && there == here;
      taken.push_back(there);
    }
    if (!shared) return;
    moved_ = Clock::now();
    taken.push_back(here);
    migrate_off_cores(taken);
  }

  // Driver only.
  const Group& group_;
  Backoff backoff_;
  Clock::time_point moved_{};  // when it moved to another core

  // With the engine's mutex held.
  std::uint64_t starts_ = 0;
  // The last operation started, until someone waits for it. Only compared: it may be gone.
  std::atomic<const void*> unwaited_{nullptr};
  Clock::time_point started_{};  // when it was
  unsigned prompt_waits_ = 0;    // in a row
  bool parked_ = false;          // the thread looks again soon, woken or not
};

// A thread pinned for good would lose more than one move gains. The call fails if the process has
// just lost these cores (cpuset): then allow every core, of which the kernel grants those it has.
void allow_again(const cpu_set_t& cores, SetAffinity set) {
  constexpr int kTries = 3;
  for (int i = 0; i < kTries; ++i)
    if (set(0, sizeof cores, &cores) == 0) return;
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int core = 0; core < CPU_SETSIZE; ++core) CPU_SET(core, &all);
  set(0, sizeof all, &all);
}

}  // namespace

std::unique_ptr<ProgressPolicy> make_adaptive_policy(const Group& group) {
  return std::make_unique<AdaptivePolicy>(group);
}

void migrate_off_cores(const std::vector<int>& taken, SetAffinity set) {
  cpu_set_t before;
  if (::sched_getaffinity(0, sizeof before, &before) != 0) return;  // more cores than it can name
  // A thread that may not set its present cores could not come back.
  if (set(0, sizeof before, &before) != 0) return;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &before) || std::find(taken.begin(), taken.end(), core) != taken.end())
      continue;
    cpu_set_t free;
    CPU_ZERO(&free);
    CPU_SET(core, &free);
    if (set(0, sizeof free, &free) == 0) allow_again(before, set);
    return;
  }
}

}  // namespace lockstep::shm
