// The inside of an Engine: who carries out operations, how a round goes, and what happens when one
// cannot be finished.
//
// One thread at a time drives the engine and does everything that touches shared memory: steps the
// collective at the head of the queue, moves messages, sleeps on this rank's bell, looks after the
// peers. Every operation is a state machine whose steps never wait, so another thread can take over
// between any two steps. `mutex_` guards who drives and what is handed to the driver; members
// marked (driver only) belong to the driver.
//
//   core->start(std::make_shared<Barrier>(core, deadline), false);
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/backoff.h"
#include "lockstep/comm/shm/collective.h"
#include "lockstep/comm/shm/layout.h"
#include "lockstep/comm/shm/messages.h"
#include "lockstep/comm/shm/rendezvous.h"
#include "lockstep/comm/shm/symmetric.h"
#include "lockstep/comm/shm/ticket.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {

// Why the engine is broken.
struct EngineFailure {
  bool timeout = false;
  bool disagreement = false;  // of ranks that are all alive
  std::string text;
  int culprit = -1;  // the rank to blame, if one is known
  int origin = -1;   // the rank that found it
  CommContext context{};
};

// What an exception says, without the name of this component before it.
std::string error_text(const std::exception& error);

class EngineCore : public std::enable_shared_from_this<EngineCore> {
 public:
  EngineCore(const RankInfo& place, const Layout& layout, std::vector<Peer> peers);

  const RankInfo& place() const { return place_; }
  const Layout& layout() const { return layout_; }
  const View& view(int rank) const { return views_[static_cast<std::size_t>(rank)]; }
  const std::vector<Peer>& peers() const { return peers_; }
  SymmetricBlocks& blocks() { return blocks_; }

  // Any thread.
  void start(const std::shared_ptr<Collective>& collective, bool caller_waits);
  void start(const std::shared_ptr<Message>& message, bool caller_waits);
  void wait(Ticket& ticket, const Deadline& deadline);
  bool poll(Ticket& ticket);
  void note_wait(const Ticket& ticket);  // someone has come to wait for it, done or not
  void want_progress();  // someone cares for the end of an operation but does not wait for it

  // Any thread. The first failure wins. settle() then ends what is pending, if nobody else does.
  void break_with(EngineFailure failure) noexcept;
  void settle() noexcept;
  bool broken() const { return broken_.load(); }
  void throw_if_broken() const;
  std::string failure() const;
  std::exception_ptr as_exception() const;  // the first failure
  std::exception_ptr as_exception(const EngineFailure& failure) const;
  // Peers that are dead, broken or closed, the gravest first.
  std::vector<EngineFailure> troubles() const;
  // In a child forked off the process that made the engine, everything belongs to the parent: the
  // rank, the thread, and perhaps a lock. Nothing may be touched there.
  bool inherited() const;
  // Fails what is pending, notifies the peers, joins the thread, and returns when no thread touches
  // an array any more. Nothing may be started after it.
  void close() noexcept;

  // For operations, called by the driver.
  void wake_peer(int rank) { wake_if_waiting(*view(rank).header, place_.rank); }
  void finish(Ticket& ticket, std::exception_ptr error = nullptr);

 private:
  enum class Mode { kOnce, kPoll, kUntil, kProgress };
  struct Task {
    Mode mode;
    const Ticket* until = nullptr;
    const Deadline* deadline = nullptr;
  };

  // With mutex_ held, some leaving it for a while.
  void drive(std::unique_lock<std::mutex>& lock, Task task);
  void after_start(const Ticket& ticket, bool caller_waits);
  void enqueue(const std::shared_ptr<Collective>& collective);
  bool on_its_way(const Ticket& ticket) const;
  bool has_work() const { return !queue_.empty() || messages_.pending() > 0; }
  void stop_driving() noexcept;
  void wake_thread();
  void run_thread();
  bool thread_is_due() const { return progress_wanted_ && !driven_ && waiters_.load() == 0; }
  void park(std::unique_lock<std::mutex>& lock);
  void hand_over();  // to the thread, what a caller has left

  // Driver only.
  void work(const Task& task) noexcept;
  void work_until(const Task& task);
  bool satisfied(const Task& task) const;
  void notify_waiters(const Task& task);
  void absorb();
  void fail_all();
  bool step(bool quick_only);
  bool step_collective(Collective& collective);
  void post(const Collective& collective);
  bool all_posted();
  bool agreed(Collective& collective);
  void pass(const Task& task);
  void migrate_off_shared_core();
  void sleep(const Task& task);
  void look_when_due(const Task& task);
  void look_after_peers(const Task& task);
  void take_what_is_left();
  bool blocked_by(const EngineFailure& trouble) const;
  void check_deadlines(const Task& task);
  void time_out(const Ticket& ticket, const Deadline& deadline);
  std::vector<int> behind() const;  // ranks that have not posted the round
  EngineFailure failure_in(const Ticket* ticket, std::string text) const;

  EngineFailure failure_of(int rank) const;
  std::string composed(const EngineFailure& failure) const;

  const RankInfo place_;
  const Layout layout_;
  const unsigned forks_;  // when it was made
  const std::vector<Peer> peers_;
  std::vector<View> views_;
  SymmetricBlocks blocks_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;        // for those who wait for a ticket or to drive
  std::condition_variable thread_called_;  // for the engine's own thread
  bool driven_ = false;
  bool thread_sits_ = false;  // the engine's own thread drives, or runs callbacks
  bool progress_wanted_ = false;
  bool stop_ = false;
  std::thread thread_;
  // Whether those who start operations come to wait for them at once; then the thread is let alone.
  std::uint64_t starts_ = 0;  // of operations that need more work, which nobody has promised to do
  // The last of them, until someone waits for it. Only compared: it may be done, and gone.
  std::atomic<const void*> unwaited_{nullptr};
  Deadline::Clock::time_point started_{};  // when it was
  unsigned prompt_waits_ = 0;              // in a row
  bool dozing_ = false;                    // the thread looks again soon, called or not
  std::vector<std::shared_ptr<Collective>> new_collectives_;
  std::vector<std::shared_ptr<Message>> new_messages_;
  // Written under mutex_, and read by the driver before it sleeps.
  std::atomic<int> arrivals_{0};  // new collectives and messages, not yet taken over
  std::atomic<int> waiters_{0};
  std::atomic<bool> stopping_{false};

  mutable std::mutex failure_mutex_;
  EngineFailure failure_;
  std::atomic<bool> broken_{false};

  // (driver only)
  std::deque<std::shared_ptr<Collective>> queue_;
  Messages messages_;
  std::uint64_t sequence_ = 0;  // of the last collective put into the queue
  std::uint64_t round_ = 0;     // the last one posted
  bool posted_ = false;         // the head of the queue has posted a round that is not finished
  bool first_round_ = true;     // of the head of the queue
  int arrived_ = 0;             // ranks below this one are known to have posted round_
  bool finished_any_ = false;
  Backoff backoff_;
  Deadline::Clock::time_point looked_{};  // after the peers
  Deadline::Clock::time_point moved_{};   // to another core
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace lockstep::shm
