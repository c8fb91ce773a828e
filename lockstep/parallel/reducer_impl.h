// The state machine behind Reducer. Internal: include reducer.h.
//
// A pass is one backward. kIdle -> (first hook) kRunning -> (end of the outermost backward) kIdle.
// Within a synchronised pass every bucket counts down the gradients it still waits for; at zero it
// is ready, and ready buckets are launched strictly in plan order, so that all ranks issue the same
// operations. Files: reducer.cpp (planning, hooks, launching), finalize.cpp (the end of a pass),
// change.cpp (a changed model), join.cpp (uneven inputs), replicas.cpp (equal replicas, proved).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/bucket_plan.h"
#include "lockstep/parallel/gradient_block.h"
#include "lockstep/parallel/reducer.h"
#include "lockstep/parallel/reducer_state.h"
#include "lockstep/parallel/replicas.h"

namespace lockstep::parallel {

class ReducerImpl : public std::enable_shared_from_this<ReducerImpl> {
 public:
  ReducerImpl(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, World world,
              DdpOptions options);
  ~ReducerImpl();

  void start();  // communicates; separate from the constructor because hooks need a weak_ptr
  at::Tensor watch(at::Tensor output);
  void on_watched_backward();
  void hold_sync(bool hold) { no_sync_depth_ += hold ? 1 : -1; }
  void join(const std::function<void()>& body, const JoinOptions& options);
  void register_comm_hook(CommHook hook);
  void verify_replicas();
  DeferredGradients defer(DeferredOwner owner);
  void resume();
  DeferredStep begin_deferred_step(bool has_inputs);
  void end_deferred_step();
  bool joining() const { return joining_.has_value(); }
  void check_deferrable() const;
  bool scale_deferred(double factor);
  void check_unchanged() const;
  void check_own_memory() const;

  const StepTiming& last_timing() const { return timing_; }
  std::size_t bucket_count() const { return buckets_.size(); }
  World& world() { return world_; }

 private:
  using Form = ParameterForm;
  using Parameter = ParameterState;
  // Ends the pass if its callback is destroyed unrun, which is what happens when backward throws.
  struct PassToken;
  struct OuterHook;
  struct OuterNode {
    std::weak_ptr<torch::autograd::Node> node;
    const OuterHook* hook = nullptr;  // on the node, unless somebody has removed it
    std::weak_ptr<PassToken> token;
  };
  struct Sentinel;
  struct Zeros;
  enum class Phase { kIdle, kRunning, kInterrupted };

  // reducer.cpp
  void take(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers);
  Form form_of(const Parameter& parameter) const;
  void choose_overlap();
  void plan(const std::vector<std::size_t>& order);
  void make_room(const std::vector<BucketPlan>& layouts, const std::vector<std::int64_t>& offsets);
  void bind_slot(const Slot& place, const BucketState& bucket);
  std::vector<std::size_t> dense_parameters() const;
  void install_hooks();
  void remove_hooks();
  void on_gradient(std::size_t index, const at::Tensor& arrived = {});
  bool begin_pass();
  void start_pass();
  void queue_end_of(int task);
  bool leave_end_to(const torch::autograd::Node& outer);
  void end_with_current_task();
  void forget_outer();
  void mark_unused_in_graph();
  at::Tensor free_slot(std::size_t index);
  bool runs_blocks_again();
  void claim(const Parameter& parameter, const at::Tensor& arrived) const;
  void store_gradient(Parameter& parameter, const at::Tensor& arrived);
  void mark_ready(std::size_t index);
  bool count_down(Parameter& parameter);
  void count_as_unused(Parameter& parameter);
  void launch_ready();
  void launch(std::size_t index);
  bool complete() const { return waiting_for_.load() == 0; }
  void interrupted();

  // finalize.cpp
  void on_task_end(int task);
  void refuse_missing_gradients() const;
  void finalize();
  void wait_for_buckets();
  std::vector<bool> globally_used();
  void publish_gradients(const std::vector<bool>& used);
  void reduce_sparse(const std::vector<bool>& used);
  void learn_static_graph();
  void rebuild_from_observed_order();
  void close_pass();
  void record_timing();

  // change.cpp
  void post_sentinels();
  void withdraw_sentinels();
  void on_sentinel(std::size_t index);
  bool has_no_other_hook(const Parameter& parameter) const;
  bool changed() const;
  void plan_anew_together();
  void announce_change();
  bool flag_in_bucket() const;
  void send_change_flag();
  at::Tensor received_change_flag();
  void refuse_change_of_another();

  // deferred.cpp
  void check_forms(const char* since) const;

  // join.cpp
  std::vector<int> exchange_active(bool active);
  double divisor() const;
  void shadow_pass();

  // replicas.cpp
  void check_same_model();
  std::string describe() const;
  void broadcast_model(int root);
  void broadcast_buffers(int root);
  std::vector<at::Tensor> buffer_tensors() const;

  World world_;
  DdpOptions options_;
  std::exception_ptr refusal_;  // of what was given; told when all ranks are there
  bool passive_ = false;        // a world of one: nothing to reduce
  bool deferred_ = false;       // a ShardedOptimizer reduces, in its step
  DeferredOwner owner_;         // that optimizer
  std::vector<Parameter> parameters_;
  std::vector<BufferState> buffers_;
  std::vector<NamedTensor> ignored_;
  BucketLimits limits_;
  bool overlap_ = true;  // buckets are sent while backward runs
  GradientBlock block_;  // where the buckets of CPU gradients lie
  std::vector<std::unique_ptr<BucketState>> buckets_;
  CommHook hook_;
  int no_sync_depth_ = 0;
  bool rebuilt_ = false;
  bool learned_ = false;  // static_graph has seen its first pass
  std::atomic<bool> hooks_lost_{false};

  // The pass in progress. mutex_ guards its start and every launch; hooks only touch their own
  // parameter and their bucket's counter.
  std::mutex mutex_;
  std::atomic<Phase> phase_{Phase::kIdle};
  std::atomic<int> queued_task_{-1};
  bool sync_ = true, shadow_ = false;
  bool stale_ = false;     // the model is not the planned one
  int refused_task_ = -1;  // a backward that has thrown already
  // Nodes whose run shows that an outer backward continues after a nested one, and how many times
  // that is still to be seen.
  std::vector<OuterNode> outer_nodes_;
  std::atomic<int> unseen_outers_{0};
  std::pair<int, bool> blocks_again_{-1, false};  // of this task: whether it has checkpoints
  at::Tensor change_flag_;                        // where it cannot ride in the first bucket
  Work change_flag_work_;
  std::atomic<int> waiting_for_{0};
  std::size_t next_launch_ = 0;
  std::atomic<int> observed_{0};
  std::uint64_t step_ = 0;
  Clock::time_point pass_start_, last_gradient_;
  std::shared_ptr<std::vector<std::atomic<std::int64_t>>> completed_ns_;
  StepTiming timing_;

  std::optional<JoinOptions> joining_;
  std::vector<int> active_;  // ranks that still train, in the pass in progress
  int root_ = 0;             // whose buffers and order count
};

// Lends every bucket zeros while it lives: a rank that takes part for the others' sake keeps its
// gradients where they are.
struct ReducerImpl::Zeros {
  explicit Zeros(ReducerImpl& borrower);
  ~Zeros();
  Zeros(const Zeros&) = delete;
  ReducerImpl& reducer;
  std::vector<std::pair<at::Tensor, at::Tensor>> live;  // wire and flat
  const BucketState* first = nullptr;
};

}  // namespace lockstep::parallel
