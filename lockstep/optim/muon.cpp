#include "lockstep/optim/muon.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/optim/parameter_names.h"

namespace lockstep::optim {
namespace {

class MuonRule final : public RuleOf<MuonOptions> {
 public:
  using RuleOf::RuleOf;

  Granularity granularity() const override { return Granularity::kTensors; }
  bool counts_steps() const override { return false; }
  double cost(at::IntArrayRef sizes) const override {
    if (sizes.size() != 2) return 0;
    return static_cast<double>(sizes[0]) * static_cast<double>(sizes[1]) *
           static_cast<double>(std::min(sizes[0], sizes[1]));
  }
  std::vector<StateSpec> state(at::IntArrayRef sizes) const override {
    if (sizes.size() != 2)
      throw UsageError(MuonOptions::kName,
                       "a parameter of shape [{}] is not a matrix. Put it into a group of AdamW's; "
                       "muon_groups() makes both.",
                       fmt::join(sizes, ", "));
    return options.state(sizes);
  }

  void update(const std::vector<StepItem>& items, const at::Tensor&) const override {
    for (const StepItem& item : items) {
      const at::Tensor& momentum = item.state[0];
      momentum.lerp_(item.grad, 1 - options.momentum);
      const at::Tensor direction =
          orthogonal(options.nesterov ? item.grad.lerp(momentum, options.momentum) : momentum);
      item.param.mul_(1 - options.lr * options.weight_decay)
          .add_(direction, -options.lr * scale(item.param));
    }
  }

 private:
  double scale(const at::Tensor& param) const {
    const auto rows = static_cast<double>(param.size(0));
    const auto columns = static_cast<double>(param.size(1));
    if (options.match_rms_adamw) return 0.2 * std::sqrt(std::max(rows, columns));
    return std::sqrt(std::max(1.0, rows / columns));
  }

  // Brings all singular values near one. The polynomial is steep at zero, so small ones grow fast.
  at::Tensor orthogonal(const at::Tensor& matrix) const {
    const auto [a, b, c] = options.ns_coefficients;
    const bool tall = matrix.size(0) > matrix.size(1);
    at::Tensor x = matrix.to(at::kBFloat16);
    if (tall) x = x.t();
    x = x.div(x.norm().clamp_min(options.eps));
    for (std::int64_t i = 0; i < options.ns_steps; ++i) {
      const at::Tensor gram = x.mm(x.t());
      x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
    }
    return tall ? x.t() : x;
  }
};

}  // namespace

std::unique_ptr<UpdateRule> make_rule(const MuonOptions& options) {
  return std::make_unique<MuonRule>(options);
}

std::vector<ParamGroup> muon_groups(const torch::nn::Module& module, const MuonOptions& muon,
                                    const AdamWOptions& adamw) {
  std::unordered_set<at::TensorImpl*> ends;
  const auto add_embedding = [&](const torch::nn::Module& part) {
    if (const auto* embedding = part.as<torch::nn::EmbeddingImpl>())
      ends.insert(embedding->weight.unsafeGetTensorImpl());
    if (const auto* bag = part.as<torch::nn::EmbeddingBagImpl>())
      ends.insert(bag->weight.unsafeGetTensorImpl());
  };
  add_embedding(module);  // modules() lists itself only where a shared pointer holds it
  for (const auto& part : module.modules(/*include_self=*/false)) add_embedding(*part);
  for (const auto& item : module.named_parameters())
    if (is_named_as_end(item.key())) ends.insert(item.value().unsafeGetTensorImpl());
  ParamGroup matrices{{}, muon};
  std::vector<ParamGroup> groups;
  AdamWOptions marked = adamw;
  marked.weight_decay = 1;  // marks the group that has norms and biases
  for (ParamGroup group : decay_groups(module, marked)) {
    auto& options = group.options.as<AdamWOptions>();
    const bool decays = options.weight_decay != 0;
    if (decays) options.weight_decay = adamw.weight_decay;
    std::erase_if(group.params, [&](const at::Tensor& param) {
      const bool end = ends.contains(param.unsafeGetTensorImpl());
      if (!decays || end || param.dim() != 2) return false;
      matrices.params.push_back(param);
      return true;
    });
    if (!group.params.empty()) groups.push_back(std::move(group));
  }
  if (!matrices.params.empty()) groups.insert(groups.begin(), std::move(matrices));
  return groups;
}

}  // namespace lockstep::optim
