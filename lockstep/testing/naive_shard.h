// NaiveShard: each parameter belongs to one rank, with its gradient and its optimizer's state. The
// definition of right for a Parallelism that divides the model, and the test that nothing above
// that interface knows data parallelism: what a rank does not own is not a number from a step to
// the next forward.
//
//   task.make_parallelism = [](auto module, World world) {
//     return std::make_shared<NaiveShard>(*module, world);
//   };
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/parallelism.h"

namespace lockstep::testing {

class NaiveShard final : public Parallelism {
 public:
  NaiveShard(const torch::nn::Module& module, World world)
      : world_(std::move(world)), buffers_(module.buffers()) {
    const torch::NoGradGuard no_grad;
    for (const auto& [name, tensor] : module.named_parameters().pairs()) {
      const bool tied = owner_of(tensor).has_value();
      if (!tied) all_.push_back({name, tensor, static_cast<int>(all_.size()) % world_.size()});
    }
    for (const Part& part : all_) world_.broadcast(part.tensor, 0).wait();
    for (const at::Tensor& buffer : buffers_) world_.broadcast(buffer, 0).wait();
    forget();
  }

  World& world() override { return world_; }
  std::string text() const override { return "naively sharded"; }
  std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParamGroup> groups,
                                                   bool sharded) override;
  void check_shardable() const override {
    throw UsageError("NaiveShard", "the optimizer's state is divided already.");
  }
  void set_bucket_cap_mb(std::optional<double>) override {
    throw UsageError("NaiveShard", "there are no buckets.");
  }

  void before_forward() override {
    const torch::NoGradGuard no_grad;
    if (std::exchange(whole_, true)) return;
    for (const Part& part : all_) world_.broadcast(part.tensor, part.owner).wait();
  }

  void backward(const at::Tensor& loss, bool last) override {
    loss.backward();
    const torch::NoGradGuard no_grad;
    if (last) reduce_to_owners();
    if (held_.expired()) forget();
  }

  std::shared_ptr<void> gathered() override {
    before_forward();
    std::shared_ptr<void> held = held_.lock();
    if (!held) held_ = held = std::make_shared<int>();
    return held;
  }

  bool owns(const at::Tensor& parameter) const { return owner_of(parameter) == world_.rank(); }
  void clear_gradients() {
    for (const Part& part : all_) part.tensor.mutable_grad() = at::Tensor();
  }
  void forget() {
    whole_ = world_.size() == 1;
    for (const Part& part : all_)
      if (part.owner != world_.rank())
        at::Tensor(part.tensor).fill_(std::numeric_limits<double>::quiet_NaN());
  }

 private:
  struct Part {
    std::string name;
    at::Tensor tensor;
    int owner = 0;
  };

  std::optional<int> owner_of(const at::Tensor& parameter) const {
    for (const Part& part : all_)
      if (part.tensor.is_same(parameter)) return part.owner;
    return std::nullopt;
  }

  void reduce_to_owners() {
    for (const Part& part : all_) {
      if (!part.tensor.requires_grad()) continue;
      at::Tensor& grad = part.tensor.mutable_grad();
      if (!grad.defined()) grad = at::zeros_like(part.tensor);
      world_.reduce(grad, part.owner, ReduceOp::kAvg).wait();
      if (part.owner != world_.rank()) grad = at::Tensor();
    }
    for (const at::Tensor& buffer : buffers_) world_.broadcast(buffer, 0).wait();
  }

  World world_;
  std::vector<at::Tensor> buffers_;
  std::vector<Part> all_;
  bool whole_ = true;
  std::weak_ptr<void> held_;
};

// Steps what this rank owns with a ReplicatedOptimizer that knows of no other ranks.
class NaiveShardOptimizer final : public optim::Optimizer {
 public:
  NaiveShardOptimizer(NaiveShard& parallelism, std::vector<optim::ParamGroup> groups,
                      optim::NamedParameters names)
      : Optimizer(groups), parallelism_(parallelism), names_(std::move(names)) {
    std::erase_if(names_, [&](const auto& named) { return !parallelism.owns(named.second); });
    for (optim::ParamGroup& group : groups)
      std::erase_if(group.params, [&](const at::Tensor& p) { return !parallelism.owns(p); });
    own_ = std::make_unique<optim::ReplicatedOptimizer>(names_, std::move(groups));
  }

  optim::StepResult step(const optim::StepOptions& options = {}) override {
    if (options.scaler != nullptr) throw UsageError("NaiveShard", "losses are not scaled here.");
    const torch::NoGradGuard no_grad;
    double squares = 0;
    for (const auto& [name, param] : names_)
      if (param.grad().defined())
        squares += param.grad().to(at::kDouble).square().sum().item<double>();
    const double norm = std::sqrt(parallelism_.world().sum(squares));
    const bool skipped = options.skip_non_finite && !std::isfinite(norm);
    const double clip = options.max_grad_norm > 0 ? options.max_grad_norm / (norm + 1e-6) : 1;
    for (const auto& [name, param] : names_)
      if (param.grad().defined() && clip < 1) param.mutable_grad().mul_(clip);
    for (std::size_t group = 0; group < groups(); ++group) own_->options(group) = groups_[group];
    if (!skipped) own_->step();
    parallelism_.forget();
    return {.grad_norm = at::scalar_tensor(norm, at::kDouble),
            .skipped = at::full({1}, skipped ? 1.0 : 0.0)};
  }
  void zero_grad() override { parallelism_.clear_gradients(); }

  optim::TensorDict state_dict(const optim::StateDictOptions& options = {}) override {
    c10::Dict<std::string, at::Tensor> mine;
    for (const auto& [name, tensor] : own_->state_dict()) mine.insert(name, tensor);
    const std::vector<char> bytes = torch::pickle_save(mine);
    optim::TensorDict all;
    for (const std::string& part :
         parallelism_.world().all_gather(std::string(bytes.begin(), bytes.end()))) {
      const auto state = torch::pickle_load({part.begin(), part.end()}).toGenericDict();
      for (const auto& entry : state)
        if (options.wanted) all.emplace(entry.key().toStringRef(), entry.value().toTensor());
    }
    return all;
  }
  void load_state_dict(const optim::TensorDict& state) override {
    optim::TensorDict mine;
    for (const auto& [key, tensor] : state)
      for (const auto& [name, param] : names_)
        if (key.substr(0, key.rfind('.')) == name) mine.emplace(key, tensor);
    own_->load_state_dict(mine);
  }

 private:
  NaiveShard& parallelism_;
  optim::NamedParameters names_;  // that this rank owns
  std::unique_ptr<optim::ReplicatedOptimizer> own_;
};

inline std::unique_ptr<optim::Optimizer> NaiveShard::make_optimizer(
    std::vector<optim::ParamGroup> groups, bool) {
  optim::NamedParameters names;
  for (const Part& part : all_) names.emplace_back(part.name, part.tensor);
  return std::make_unique<NaiveShardOptimizer>(*this, std::move(groups), std::move(names));
}

}  // namespace lockstep::testing
