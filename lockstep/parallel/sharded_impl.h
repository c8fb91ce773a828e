// The inside of ShardedOptimizer. Files: sharded_optimizer.cpp (construction, the order of a step),
// sharded_step.cpp (moving gradients, norms, the update itself), sharded_state.cpp (state in and
// out, parameters that others wrote).
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/replicas.h"
#include "lockstep/parallel/sharded_layout.h"
#include "lockstep/parallel/sharded_optimizer.h"

namespace lockstep::parallel {

class ShardedImpl {
 public:
  static constexpr const char* kComponent = "ShardedOptimizer";

  ShardedImpl(std::shared_ptr<Reducer> reducer, std::vector<ShardedGroup> groups,
              ShardedOptions wanted);
  // Gives the parameters memory of their own again; backward averages gradients from here on.
  ~ShardedImpl();
  ShardedImpl(const ShardedImpl&) = delete;
  ShardedImpl& operator=(const ShardedImpl&) = delete;

  StepOutcome step();
  void idle_step();  // of a rank that has run out of inputs, in a join
  void zero_grad();
  void reduce_now();
  void sync_from_model();
  std::map<std::string, at::Tensor> state_dict();
  void load_state_dict(const std::map<std::string, at::Tensor>& state);
  std::int64_t state_bytes() const;
  OptimizerRule& rule(std::size_t group);

  ShardedOptions options;
  std::vector<OptimizerRule> rules;  // by group

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
  // A piece that this rank owns, with its optimizer state.
  struct Owned {
    Piece piece;
    std::int64_t place = 0;               // of the piece in this rank's share
    at::Tensor first = {};                // exp_avg or momentum
    at::Tensor second = {};               // exp_avg_sq
    at::Tensor mine = {};                 // this rank's gradient
    at::Tensor reduced = {};              // of two passes, what the first one left, if it did
    at::Tensor param = {};                // the piece of the parameter
    std::vector<at::Tensor> shared = {};  // every rank's gradient, where memory is shared
    std::uint64_t print = 0;              // of the parameter's bits after a step, in debug mode
  };
  struct Domain {
    c10::ScalarType dtype = c10::kFloat;
    c10::Device device = c10::kCPU;
    std::vector<std::size_t> members = {};
    std::vector<std::vector<Piece>> shares = {};  // by rank
    std::vector<Owned> owned = {};
    std::vector<at::Tensor> received = {};  // without shared memory: my share's gradients, by rank
  };
  // What a backward has refused, on its way to the others' step().
  struct Announced {
    std::exception_ptr refusal;
    Work work;
    RefusalTexts refusals;
  };
  struct Norm {
    double value = 0;
    bool finite = true;
  };

  // sharded_optimizer.cpp
  std::vector<at::Tensor> tensors() const;
  void check_options() const;
  void agree_on_making(const std::exception_ptr& refusal);
  void collect_members(const std::vector<ShardedGroup>& groups);
  void make_domains();
  void bind_parameters();
  void synchronize_ranks();
  void check_gradients() const;
  StepOutcome take_step(const DeferredStep& how);
  template <typename Body>
  void each_setting(const Body& body);
  std::vector<double> settings();
  void share_settings(int root);
  void agree_on_gradients();
  at::Tensor no_refusal() const;
  void announce(const std::exception_ptr& refusal);
  std::exception_ptr find_refusal() const;
  [[noreturn]] void refuse_different_settings();
  void place_gradients(std::uint8_t* has_gradient);

  // sharded_state.cpp
  static at::Tensor place_of(const Member& member);
  void remember_parameters();
  void take_prints();
  const Member* find_written() const;
  void check_parameters() const;
  void check_written() const;
  void check_prints() const;
  void on_backward();
  void return_parameters();
  std::vector<std::string> state_names_of(const Member& member) const;
  void check_state(const std::map<std::string, at::Tensor>& state) const;

  // sharded_step.cpp
  static std::vector<std::string> state_names(const OptimizerRule& rule);
  void bring_gradients(Domain& domain);
  void find_pieces();
  std::vector<at::Tensor> sources_of(const Domain& domain, const Owned& owned) const;
  bool sums_twice(const Domain& domain) const;
  Norm reduce_owned();
  void make_state(const Domain& domain, Owned& owned);
  void update(Domain& domain, Owned& owned, bool two_passes, double clip);
  void publish(Domain& domain);

  std::shared_ptr<Reducer> reducer_;
  World world_;
  DeferredGradients deferred_;
  bool shared_ = false;       // parameters and gradients lie in memory that all ranks map
  bool reduced_ = false;      // reduce_now() has averaged the gradients
  bool idle_ = false;         // this rank has run out of inputs
  bool debug_ = false;        // LOCKSTEP_DEBUG
  double divisor_ = 1;        // of the sum over ranks, in this step
  std::uint64_t writes_ = 0;  // to shared parameters, past step(), as the last backward found them
  std::optional<Announced> announced_;
  std::vector<Member> members_;
  std::vector<Domain> domains_;
  std::int64_t blocks_ = 0;
};

}  // namespace lockstep::parallel
