// The order of events behind Reducer. Internal: include reducer.h.
//
// Each part has one job and owns its state; this class calls them in order. From backward() on:
//   HookSet          reports a gradient                             on_gradient
//   PassState        a pass begins with the first one               begin_pass, start_pass
//   JoinSession      which ranks take part                          start_pass
//   ChangeDetector   is the model what the buckets are for          start_pass, refuse_change
//   BucketSet        the gradient goes to its slot                  on_gradient
//   PassState        its bucket may be ready                        launch_ready, launch
//   PassEnd          the outermost backward has ended               on_backward_end
//   ModelTensors     buffers are copied                             finalize
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/core/ledger.h"
#include "lockstep/parallel/bucket_set.h"
#include "lockstep/parallel/change_detector.h"
#include "lockstep/parallel/hook_set.h"
#include "lockstep/parallel/join_session.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/pass_end.h"
#include "lockstep/parallel/pass_state.h"
#include "lockstep/parallel/reduce_strategy.h"
#include "lockstep/parallel/reducer.h"

namespace lockstep::parallel {

class ReducerImpl final : public BackwardListener,
                          public GradientStore,
                          public std::enable_shared_from_this<ReducerImpl> {
 public:
  ReducerImpl(World world, DdpOptions options)
      : world_(std::move(world)), options_(std::move(options)) {}
  // Communicates; separate from the constructor because hooks need a weak_ptr.
  void start(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers);

  void on_gradient(std::size_t parameter, const at::Tensor& arrived) override;
  at::Tensor free_slot(std::size_t parameter) override;
  bool gradients_are_local() const override { return strategy_ != nullptr; }
  void on_watched_backward() override;
  void on_backward_end() override;
  void on_backward_abandoned() override;
  void on_outer_backward() override;
  // In a world of one, where no gradient is hooked: `output` says when backward begins.
  void watch_alone(const at::Tensor& output);

  std::vector<GradientBucket> hand_over(ReduceStrategy& strategy) override;
  void check_hand_over() const override;
  void take_back() override;
  StepTurn begin_step(bool has_inputs) override;
  void end_step(bool has_inputs) override;
  bool joining() const override { return join_.active(); }
  void check_unchanged() const override { change_.check_unchanged("the optimizer was made"); }
  void check_all_used() const override;
  void check_own_memory() const override { model_.check_own_memory(); }

 private:
  friend class lockstep::Reducer;  // the handle of this one
  void choose_overlap();
  std::vector<std::size_t> reverse_dense_order() const;
  BucketLimits limits_as_set() const;
  void plan(const std::vector<std::size_t>& order);
  void plan_first();
  bool begin_pass();
  void start_pass();
  void check_recordable();
  void close_pass();
  void leave_phase();
  void reset_pass();
  void count_as_unused(std::size_t parameter);
  void launch_ready();
  void launch(std::size_t index);
  void finalize();
  void count_pass() const;
  void count_buckets() const;
  void count_update();
  void reduce_sparse(const std::vector<bool>& used);
  void rebuild_from_observed_order();
  [[noreturn]] void refuse_change();
  bool flag_in_bucket() const;
  const at::Tensor& received_flag();
  [[noreturn]] void refuse_change_of_another();
  void shadow_pass();

  World world_;
  const DdpOptions options_;
  ModelTensors model_;
  ChangeDetector change_{world_, model_, options_};
  BucketSet buckets_{world_, model_, options_.gradient_as_bucket_view};
  PassState pass_{model_, buckets_, options_};
  PassEnd end_;
  JoinSession join_{world_};
  HookSet hooks_{model_, options_.gradient_as_bucket_view};

  bool passive_ = false;      // a world of one: nothing to reduce
  bool overlap_ = true;       // buckets are sent while backward runs
  bool rebuilt_ = false;      // the plan follows the observed order
  bool may_record_ = false;   // set_recording
  std::uint64_t layout_ = 0;  // plans made
  int no_sync_depth_ = 0;
  std::int64_t versions_before_ = -1;          // of the parameters, summed, at the last pass
  std::optional<ledger::Phase> phase_before_;  // the pass that runs
  BucketLimits limits_;
  CommHook hook_;
  ReduceStrategy* strategy_ = nullptr;  // null: buckets are reduced in backward
};

}  // namespace lockstep::parallel
