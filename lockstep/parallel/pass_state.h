// PassState: the progress of one backward. Counts gradients, and says which bucket may be sent.
//
// kIdle -> (first gradient) kRunning -> (end of the outermost backward) kIdle. In a synchronised
// pass every bucket counts down the gradients it still waits for; at zero it is ready, and ready
// buckets are launched strictly in plan order, so that all ranks issue the same operations.
//
// JoinSession, below, tracks the ranks that take part in a pass when inputs are uneven.
//
// lock() guards the start of a pass and every launch. arrived() needs none: gradients of different
// parameters may arrive on several threads, and touch their own state and their bucket's counter.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/bucket_set.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/reducer_types.h"

namespace lockstep::parallel {

class PassState {
 public:
  using Clock = std::chrono::steady_clock;
  struct Gradient {
    int fired = 0;
    bool counted = false;  // no longer waited for
    bool used = false;     // by this rank, since the last synchronised pass
    int place = -1;        // in the order in which gradients came
    int expected = 1;      // in one pass
  };
  struct BucketProgress {
    std::atomic<int> pending{0};  // gradients that it waits for
    Reduction reduction;
    Clock::time_point ready, launched;
  };

  PassState(const ModelTensors& model, const BucketSet& buckets, const DdpOptions& options)
      : model_(model), buckets_(buckets), options_(options) {}
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }

  // One gradient of every trained parameter.
  void expect(const std::vector<ParameterForm>& forms);
  void reset();  // idle, with everything to wait for
  void begin(bool synchronised);
  void begin_shadow();  // with nothing to wait for
  void run() { phase_ = Phase::kRunning; }
  void interrupt();  // it ended early; what was sent is remembered
  bool running() const { return phase_ == Phase::kRunning; }
  bool interrupted() const { return phase_ == Phase::kInterrupted; }

  // True when the parameter's bucket has become ready. Throws UsageError for a gradient that comes
  // too late, or that static_graph did not expect.
  bool arrived(std::size_t parameter);
  bool count(std::size_t parameter);         // as arrived(), without its checks
  std::vector<std::size_t> missing() const;  // still waited for
  [[noreturn]] void refuse_missing(int rank, const std::vector<std::size_t>& without) const;
  bool complete() const { return waiting_for_.load() == 0; }
  Gradient& operator[](std::size_t parameter) { return gradients_[parameter]; }
  const Gradient& operator[](std::size_t parameter) const { return gradients_[parameter]; }
  void drop_used();

  // The next bucket in plan order, if it is ready; it counts as launched.
  std::optional<std::size_t> next_ready();
  BucketProgress& bucket(std::size_t index) { return progress_[index]; }
  // Returns the function to call when the bucket's reduction has completed.
  std::function<void()> stamp_completion(std::size_t index) const;
  void wait_for_buckets(bool finish);
  void record_timing();

  // The parameters that any rank used; empty: all of them. Collective, after the last bucket.
  std::vector<bool> used_anywhere(World& world) const;
  // static_graph: how often each parameter gets a gradient, from the first pass. Collective.
  bool learns() const { return options_.static_graph && !learned_; }
  void learn(World& world, int root);
  // `order`, sorted by when this rank's gradients came.
  std::vector<std::size_t> observed(std::vector<std::size_t> order) const;

  bool sync = true;
  bool recorded = false;      // into a CUDA graph: nothing of it runs now
  bool shadow = false;        // a shadow pass: this rank sends zeros
  std::atomic<int> task{-1};  // the backward at whose end the pass ends
  int refused_task = -1;      // a backward that has thrown already
  std::size_t launched = 0;   // buckets
  std::uint64_t step = 0;
  StepTiming timing;

 private:
  enum class Phase { kIdle, kRunning, kInterrupted };

  const ModelTensors& model_;
  const BucketSet& buckets_;
  const DdpOptions& options_;
  std::mutex mutex_;
  std::atomic<Phase> phase_{Phase::kIdle};
  std::vector<Gradient> gradients_;  // by parameter
  std::vector<BucketProgress> progress_;
  std::atomic<int> waiting_for_{0}, observed_{0};
  bool learned_ = false;  // static_graph has seen its first pass
  Clock::time_point start_, last_gradient_;
  std::shared_ptr<std::vector<std::atomic<std::int64_t>>> completed_ns_;
};

// For a join, in which ranks have different numbers of inputs: the ranks that still train, the
// divisor of sums, and the rank whose buffers and order of gradients are used.
//
//   join.begin(options);
//   join.exchange(true);     // before each synchronised pass; false: this rank has run out
//   join.end();
class JoinSession {
 public:
  explicit JoinSession(World& world) : world_(world) {}

  void begin(const JoinOptions& options);  // UsageError inside another one
  void end();
  bool active() const { return options_.has_value(); }

  // False when all ranks have run out. UsageError with throw_on_early_termination. Collective.
  bool exchange(bool has_inputs);

  double divisor() const;  // of a sum over ranks
  bool divides_by_active() const { return active() && !options_->divide_by_initial_world_size; }
  int root() const { return root_; }

 private:
  World& world_;
  std::optional<JoinOptions> options_;
  int training_ = 0;  // ranks, in the pass in progress
  int root_ = 0;
};

}  // namespace lockstep::parallel
