// The implementation of ShardedOptimizer: sharded_optimizer.cpp (construction, a step's order),
// sharded_impl.cpp (moving gradients, norms, the update itself; state in and out; parameters that
// were written outside a step).
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/optim/local_gradients.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/reduce_strategy.h"
#include "lockstep/parallel/reducer.h"
#include "lockstep/parallel/replicas.h"
#include "lockstep/parallel/sharding.h"
#include "lockstep/parallel/step_agreement.h"

namespace lockstep::parallel {

class ShardedImpl final : public ReduceStrategy {
 public:
  static constexpr const char* kComponent = "ShardedOptimizer";

  // The ShardedOptimizer owns the groups with their options, which its user may change.
  ShardedImpl(std::shared_ptr<Reducer> reducer, optim::Optimizer& optimizer);
  // Gives the parameters memory of their own again; backward averages gradients from here on.
  ~ShardedImpl() override;
  ShardedImpl(const ShardedImpl&) = delete;
  ShardedImpl& operator=(const ShardedImpl&) = delete;

  optim::StepResult step(const optim::StepOptions& wanted);
  void zero_grad();
  void reduce_now();
  void sync_from_model();
  optim::TensorDict state_dict(bool wanted);
  void load_state_dict(const optim::TensorDict& state);
  std::int64_t state_bytes() const;

  void on_backward() override;
  void on_backward_end() override;
  void idle_step() override;
  void check_written() const override;

 private:
  // A parameter that is trained.
  struct Member {
    std::string name;
    std::size_t index = 0;  // in the model's order
    at::Tensor tensor;      // the model's
    at::Tensor slot;        // its gradient's place in a bucket, in its shape
    std::size_t bucket = 0;
    std::int64_t offset = 0;  // of both gradient and parameter, in their flat memory
    std::size_t group = 0;
    at::Tensor flat = {};  // the parameter's memory, flat
    std::int64_t first_block = 0;
    double steps = 0;
    bool used = true;  // by any rank, in this step
    // As they must still be at the next step.
    const void* data = nullptr;
    std::uint32_t version = 0;
    std::uint32_t reduced_version = 0;
  };
  // A piece of a parameter that this rank owns, with its optimizer state.
  struct Owned {
    Piece piece;
    std::int64_t place = 0;               // of the piece in this rank's share
    optim::StateTensors state = {};       // in the rule's order; made at the first step
    at::Tensor mine = {};                 // this rank's gradient
    at::Tensor reduced = {};              // of two passes, what the first one left, if it did
    at::Tensor param = {};                // the piece of the parameter
    std::vector<at::Tensor> shared = {};  // every rank's gradient, where memory is shared
    std::uint64_t print = 0;              // of the parameter's bits after a step, in debug mode
  };
  struct Domain {
    c10::ScalarType dtype = c10::kFloat;
    c10::Device device = c10::kCPU;
    optim::Granularity granularity = optim::Granularity::kElements;
    std::vector<std::size_t> members = {};
    std::vector<std::vector<Piece>> shares = {};  // by rank
    std::vector<Owned> owned = {};
    std::vector<at::Tensor> received = {};  // without shared memory: my share's gradients, by rank
    bool whole() const { return granularity == optim::Granularity::kTensors; }
  };
  // An exchange of pieces: `of` gives the data sent for one's own, `put` receives others'.
  struct Pieces {
    c10::Device device;
    c10::ScalarType dtype;
    std::function<std::int64_t(const Piece&)> count;  // of its elements; 0: it has none
    std::function<at::Tensor(const Owned&)> of;
    std::function<void(const Piece&, const at::Tensor&)> put;
  };
  // A refusal in a backward, being announced to the other ranks' step().
  struct Announced {
    std::exception_ptr refusal;
    Work work;
    RefusalTexts refusals;
  };
  struct Norm {
    double value = 0;
    bool finite = true;
  };
  struct Outcome {
    double grad_norm = 0;
    bool skipped = false;
  };

  // sharded_optimizer.cpp
  void check_options() const;
  std::size_t count_listed() const;
  void agree_on_making(const std::exception_ptr& refusal);
  void collect_members();
  void make_domains();
  void bind_parameters();
  void synchronize_ranks();
  void check_gradients() const;
  Outcome take_step(const StepTurn& how);
  void share_settings(int root);
  void agree_on_gradients();
  void announce(const std::exception_ptr& refusal);
  std::exception_ptr find_refusal() const;
  void place_gradients(std::uint8_t* has_gradient);

  // Beside a step (sharded_impl.cpp).
  static at::Tensor place_of(const Member& member);
  void remember_parameters();
  void take_prints();
  const Member* find_written() const;
  void check_parameters() const;
  void check_versions() const;
  void check_prints() const;
  void return_parameters();
  std::vector<optim::StateSpec> state_of(const Member& member) const;
  optim::TensorDict gather_state(bool wanted);

  // In a step (sharded_impl.cpp).
  void bring_gradients(Domain& domain);
  void find_pieces();
  std::vector<at::Tensor> sources_of(const Domain& domain, const Owned& owned) const;
  bool sums_twice(const Domain& domain) const;
  Norm reduce_owned();
  void make_state(const Domain& domain, Owned& owned);
  void update(Domain& domain, Owned& owned, double clip);
  void publish(const Domain& domain);
  void exchange_pieces(const Domain& domain, const Pieces& pieces, const std::vector<bool>& to);

  std::shared_ptr<Reducer> reducer_;
  GradientStore& store_{reducer_->gradients()};
  World world_;
  optim::Optimizer& optimizer_;
  std::size_t listed_ = count_listed();
  StepAgreement agreement_{world_, optimizer_, kComponent};
  StepSettings& settings_{agreement_.settings};
  std::vector<GradientBucket> buckets_;
  bool shared_ = false;       // parameters and gradients lie in memory that all ranks map
  bool reduced_ = false;      // reduce_now() has averaged the gradients
  bool idle_ = false;         // this rank has run out of inputs
  bool debug_ = false;        // LOCKSTEP_DEBUG
  double divisor_ = 1;        // of the sum over ranks, in this step
  std::uint64_t writes_ = 0;  // to shared parameters, past step(), as the last backward found them
  std::optional<Announced> announced_;
  optim::GradientWatch watch_;
  std::vector<Member> members_;
  std::vector<Domain> domains_;
  std::int64_t blocks_ = 0;
};

}  // namespace lockstep::parallel
