// The implementation of Engine: the queue of operations, the thread that executes them, and the
// handling of operations that cannot finish.
//
// One thread at a time is the driver. It does everything that touches shared memory: it steps the
// collective at the head of the queue, moves messages, sleeps on this rank's bell, and looks after
// the peers. Every operation is a state machine whose steps never wait, so another thread can
// become the driver between any two steps. `mutex_` guards who drives and what is handed to the
// driver. How the driver waits, and when the engine's own thread drives, is ProgressPolicy's
// decision.
//
//   const auto barrier = std::make_shared<Barrier>(group, deadline, Kind::kBarrier);
//   core->start(barrier, /*caller_waits=*/false);
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"
#include "lockstep/comm/shm/group.h"
#include "lockstep/comm/shm/operations.h"
#include "lockstep/comm/shm/progress_policy.h"

namespace lockstep::shm {

class EngineCore final : private ProgressHost, public std::enable_shared_from_this<EngineCore> {
 public:
  // `policy`: null for the adaptive policy.
  EngineCore(const RankAndSize& info, const Layout& layout, std::vector<Peer> peers,
             PolicyFactory policy = nullptr);

  const Group& group() const { return group_; }
  const FailureRecord& failure() const { return failure_; }

  // Any thread.
  void start(const std::shared_ptr<Collective>& collective, bool caller_waits);
  void start(const std::shared_ptr<Message>& message, bool caller_waits);
  void wait(Ticket& ticket, const Deadline& deadline);  // returns when the ticket is done
  bool poll(Ticket& ticket);  // does what can be done without waiting, and schedules the rest
  void request_progress();    // an operation must finish although no thread waits for it
  // True in a child forked off the process that made the engine. The rank, the thread and perhaps a
  // held lock belong to the parent, so the child must not touch the engine.
  bool inherited() const;

  // Any thread. See Engine::symmetric.
  std::shared_ptr<SymmetricBlock> make_symmetric(std::size_t bytes, const Deadline& deadline);
  void throw_if_broken() const;
  void throw_if_inherited() const;
  // Breaks the engine, and ends what is pending unless the driver does.
  void fail(EngineFailure failure) noexcept;
  // Fails what is pending, informs the peers, joins the thread, and returns when no thread touches
  // an array any more. Nothing may be started after it.
  void close() noexcept;

 private:
  // kOnce and kPoll: a few cheap steps, and with kPoll a look at the deadlines; kUntil: until a
  // ticket is done; kProgress: the engine's own thread, until nothing is left or someone waits.
  enum class Mode { kOnce, kPoll, kUntil, kProgress };
  struct Task {
    Mode mode;
    const Ticket* until = nullptr;
    const Deadline* deadline = nullptr;
  };

  // Any thread, with mutex_ held; drive() releases it for a while.
  void drive(std::unique_lock<std::mutex>& lock, Task task);
  void add(const std::shared_ptr<Collective>& collective);
  void add(const std::shared_ptr<Message>& message) { messages_.add(message); }
  template <typename Operation>
  void start_or_hand_over(const std::shared_ptr<Operation>& operation,
                          std::vector<std::shared_ptr<Operation>>& arriving, bool caller_waits);
  bool peers_can_finish(const Ticket& ticket) const;
  void stop_driving() noexcept;
  void run_thread();
  bool thread_is_due() const { return progress_wanted_ && !driven_ && waiters_.load() == 0; }
  bool driven() const override { return driven_; }
  bool has_waiters() const override { return waiters_.load() > 0; }
  bool has_work() const override { return !queue_.empty() || messages_.pending() > 0; }
  void wake_thread() override;
  bool sleep_thread(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit,
                    const std::function<bool()>& also) override;

  // Driver only.
  void work(const Task& task) noexcept;
  void work_until(const Task& task);
  bool satisfied(const Task& task) const;
  void notify_waiters(const Task& task);
  void take_arrivals();
  void fail_all();
  bool step(bool quick_only);
  bool step_head();
  void pause(const Task& task);
  void sleep(const Task& task);
  void look_when_due(const Task& task);
  void look_after_peers(const Task& task);
  void finish_what_peers_left();
  bool blocked_by(const EngineFailure& trouble) const;
  void check_deadlines(const Task& task);
  void time_out(const Ticket& ticket, const Deadline& deadline);

  Group group_;
  FailureRecord failure_;
  const unsigned forks_;  // the process's fork count at construction
  const std::unique_ptr<ProgressPolicy> policy_;

  std::mutex mutex_;
  std::condition_variable changed_;        // for threads that wait for a ticket or to drive
  std::condition_variable thread_called_;  // for the engine's own thread
  bool driven_ = false;
  bool thread_drives_ = false;    // the engine's own thread does, or runs callbacks
  bool progress_wanted_ = false;  // by that thread
  bool stop_ = false;
  std::thread thread_;
  std::vector<std::shared_ptr<Collective>> new_collectives_;
  std::vector<std::shared_ptr<Message>> new_messages_;
  // Written under mutex_, and read by the driver on its way to sleep.
  std::atomic<int> arrivals_{0};  // new collectives and messages, not yet taken over
  std::atomic<int> waiters_{0};
  std::atomic<bool> stopping_{false};

  // Driver only.
  std::deque<std::shared_ptr<Collective>> queue_;
  Rounds rounds_;  // rounds of the head of the queue
  Messages messages_;
  std::uint64_t sequence_ = 0;  // the last collective put into the queue
  Completions completions_;
  unsigned pauses_ = 0;
  Deadline::Clock::time_point looked_{};  // when the peers were last checked
};

}  // namespace lockstep::shm
