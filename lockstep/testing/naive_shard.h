// NaiveShard: each parameter belongs to one rank, with its gradient and its optimizer's state. The
// definition of right for a Parallelism that divides the model: what a rank does not own is not a
// number from a step to the next forward.
//
//   task.make_parallelism = [](auto module, Mesh mesh) {
//     return std::make_shared<NaiveShard>(*module, mesh);
//   };
//   Trainer trainer(Mesh(world, {{"shard", -1}}), task, arguments);
//
// Owners are the ranks along all axes but "data". Those along "pipeline" and "tensor" each compute
// the whole model, on the same samples.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/parallelism.h"

namespace lockstep::testing {

class NaiveShard final : public Parallelism {
 public:
  NaiveShard(const torch::nn::Module& module, Mesh mesh)
      : mesh_(std::move(mesh)),
        owners_(mesh_.flatten({"shard", "pipeline", "tensor"})),
        buffers_(module.buffers()) {
    const torch::NoGradGuard no_grad;
    for (const auto& [name, tensor] : module.named_parameters().pairs())
      if (!owner_of(tensor))  // a tied one has an owner
        all_.push_back({name, tensor, static_cast<int>(all_.size()) % owners_.size()});
    for (const Part& part : all_) mesh_.world().broadcast(part.tensor, 0).wait();
    share_buffers();
    forget();
  }

  const Mesh& mesh() const override { return mesh_; }
  World& owners() { return owners_; }
  std::string text() const override { return "naively sharded"; }
  std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParamGroup> groups) override;

  void before_forward() override {
    const torch::NoGradGuard no_grad;
    if (std::exchange(whole_, true)) return;
    for (const Part& part : all_) owners_.broadcast(part.tensor, part.owner).wait();
  }

  void backward(const at::Tensor& loss, bool last) override {
    loss.backward();
    const torch::NoGradGuard no_grad;
    if (last) average();
    if (held_.expired()) forget();
    count_passes(1, last);
  }

  std::shared_ptr<void> gathered() override {
    before_forward();
    std::shared_ptr<void> held = held_.lock();
    if (!held) held_ = held = std::make_shared<int>();
    return held;
  }

  void verify_parameters() override {
    for (const Part& part : all_)
      for (const at::Tensor& other : mesh_["data"].all_gather(part.tensor.detach()))
        if (part.owner == owners_.rank() && !other.equal(part.tensor))
          throw CommError("NaiveShard", part.name + " differs over ranks.");
  }

  bool owns(const at::Tensor& parameter) const { return owner_of(parameter) == owners_.rank(); }
  void clear_gradients() {
    for (const Part& part : all_) part.tensor.mutable_grad() = at::Tensor();
  }
  void forget() {
    whole_ = owners_.size() == 1;
    for (const Part& part : all_)
      if (part.owner != owners_.rank())
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

  // Over the ranks that saw different samples.
  void average() {
    for (const Part& part : all_) {
      if (!part.tensor.requires_grad()) continue;
      at::Tensor& grad = part.tensor.mutable_grad();
      if (!any_rank(mesh_.world(), grad.defined())) continue;  // none of them used it
      if (!grad.defined()) grad = at::zeros_like(part.tensor);
      mesh_.batch().all_reduce(grad, ReduceOp::kAvg).wait();
      if (part.owner != owners_.rank()) grad = at::Tensor();
    }
    share_buffers();
  }
  void share_buffers() {
    for (const at::Tensor& buffer : buffers_) mesh_.world().broadcast(buffer, 0).wait();
  }

  Mesh mesh_;
  World& owners_;
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
    const double norm = std::sqrt(all_reduce(parallelism_.owners(), squares));
    const bool skipped = options.skip_non_finite && !std::isfinite(norm);
    const double clip = options.max_grad_norm > 0 ? options.max_grad_norm / (norm + 1e-6) : 1;
    for (const auto& [name, param] : names_)
      if (param.grad().defined() && clip < 1) param.mutable_grad().mul_(clip);
    for (std::size_t g = 0; g < groups(); ++g) own_->options(g) = Optimizer::options(g);
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
         all_gather_bytes(parallelism_.owners(), std::string(bytes.begin(), bytes.end()))) {
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
  std::int64_t state_bytes() const override { return own_->state_bytes(); }

 private:
  NaiveShard& parallelism_;
  optim::NamedParameters names_;  // that this rank owns
  std::unique_ptr<optim::ReplicatedOptimizer> own_;
};

inline std::unique_ptr<optim::Optimizer> NaiveShard::make_optimizer(
    std::vector<optim::ParamGroup> groups) {
  optim::NamedParameters names;
  for (const Part& part : all_) names.emplace_back(part.name, part.tensor);
  return std::make_unique<NaiveShardOptimizer>(*this, std::move(groups), std::move(names));
}

}  // namespace lockstep::testing
