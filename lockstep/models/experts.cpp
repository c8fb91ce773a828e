#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/models/decoder.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/tensor_group.h"

namespace lockstep::models::detail {
namespace {

// Moves frozen weights into one tensor, which a grouped product uses without a copy.
at::Tensor product(const at::Tensor& rows, const std::vector<at::Tensor>& weights,
                   const at::Tensor& ends, bool owns_memory) {
  const bool frozen = std::ranges::none_of(weights, &at::Tensor::requires_grad);
  if (owns_memory && rows.is_cuda() && weights.front().scalar_type() == at::kBFloat16 && frozen)
    nn::place_together(weights);
  return nn::grouped_linear(rows, weights, ends);
}

struct Choice {
  at::Tensor probabilities;     // float [tokens, experts]
  at::Tensor largest, experts;  // [tokens, experts of a token]
};

Choice choose(const at::Tensor& logits, const ExpertsSpec& spec) {
  Choice choice;
  choice.probabilities = torch::softmax(logits.reshape({-1, spec.count()}), -1, at::kFloat);
  std::tie(choice.largest, choice.experts) =
      torch::topk(choice.probabilities, spec.per_token, /*dim=*/-1);
  return choice;
}

// For a loss that every rank computes from all logits: its gradient is divided by the number of
// ranks, because gradients are summed over them.
at::Tensor for_each_rank(const at::Tensor& logits, const nn::TensorGroupPtr& group) {
  if (!group) return logits;
  const at::Tensor value = logits.detach();
  return value + (logits - value) / static_cast<double>(group->size());
}

}  // namespace

Experts::Experts(const MlpSpec& spec, const ParameterOptions& parameters)
    : spec_(spec), in_(spec.in.size()) {
  const auto layer = [&](const Projection& one) {
    LOCKSTEP_ASSERT(!one.bias && one.layout == WeightLayout::kOutIn);
    return make_linear(one, parameters, /*adaptable=*/false);
  };
  router_ = register_module(spec.experts->router.name, layer(spec.experts->router));
  auto list = register_module(spec.experts->list, torch::nn::ModuleList());
  for (std::int64_t i = 0; i < spec.experts->count(); ++i) {
    const auto expert = std::make_shared<torch::nn::Module>();
    for (std::size_t part = 0; part < spec.in.size(); ++part) {
      LOCKSTEP_ASSERT(spec.in[part].parts.size() == 1);
      const Linear one = expert->register_module(spec.in[part].name, layer(spec.in[part]));
      in_[part].push_back(one->weight);
    }
    out_.push_back(expert->register_module(spec.out.name, layer(spec.out))->weight);
    list->push_back(expert);
  }
}

Experts::Routed Experts::route(const at::Tensor& logits) const {
  const Choice choice = choose(logits, *spec_.experts);
  Routed routed;
  routed.scores = choice.largest / choice.largest.sum(-1, /*keepdim=*/true);
  at::Tensor sorted;
  std::tie(sorted, routed.order) =
      torch::sort(choice.experts.reshape({-1}), /*stable=*/std::optional<bool>(true));
  // Stays on the device, so that the host does not wait for a number.
  const at::Tensor next = torch::arange(1, spec_.experts->count() + 1, sorted.options());
  routed.ends = torch::searchsorted(sorted, next, /*out_int32=*/true);
  return routed;
}

// A rank's gradient of the scores covers its slices of the experts only, so the router's gradients
// are sums over ranks, too.
at::Tensor Experts::router_logits_of(const at::Tensor& x, const Pass& pass) const {
  const at::Tensor weight = nn::enter_weight(router_->weight, pass.tensor);
  if (pass.fused) return nn::linear(x, weight, {});
  return torch::linear(x.to(weight.scalar_type()), weight);
}

at::Tensor Experts::compute(const at::Tensor& rows, const at::Tensor& ends,
                            bool owns_memory) const {
  at::Tensor y = activate(spec_.activation, product(rows, in_.front(), ends, owns_memory));
  if (spec_.gated()) y = y * product(rows, in_.back(), ends, owns_memory);
  return product(y, out_, ends, owns_memory);
}

at::Tensor Experts::forward(const at::Tensor& given, const Pass& pass, at::Tensor* router_logits) {
  const std::int64_t width = given.size(-1), per_token = spec_.experts->per_token;
  const double jitter = is_training() ? spec_.experts->jitter : 0;
  at::Tensor x = given;
  if (jitter > 0) x = x * torch::empty_like(x).uniform_(1 - jitter, 1 + jitter);
  const at::Tensor logits = router_logits_of(x, pass);
  if (router_logits != nullptr) *router_logits = for_each_rank(logits, pass.tensor);
  const Routed routed = route(logits);
  // One row for each expert of a token, then sorted by expert. The gradient sums rows in the same
  // order in every run.
  const at::ScalarType type =
      pass.fused ? x.scalar_type() : compute_type(x.device(), out_.front().scalar_type());
  const at::Tensor copies =
      x.to(type).reshape({-1, 1, width}).expand({-1, per_token, width}).reshape({-1, width});
  const at::Tensor y = compute(copies.index_select(0, routed.order), routed.ends, pass.owns_memory);
  const at::Tensor places = torch::arange(routed.order.size(0), routed.order.options());
  const at::Tensor back = torch::empty_like(routed.order).scatter_(0, routed.order, places);
  const at::Tensor weighted =
      y.index_select(0, back).view({-1, per_token, width}) * routed.scores.unsqueeze(-1);
  return weighted.sum(1).to(given.scalar_type()).view(given.sizes());
}

at::Tensor load_balancing_loss(const std::vector<at::Tensor>& router_logits,
                               const ExpertsSpec& spec) {
  at::Tensor tokens, probabilities;  // of each expert, summed over tokens and blocks
  std::int64_t rows = 0;
  for (const at::Tensor& logits : router_logits) {
    const Choice choice = choose(logits.to(router_logits.front().device()), spec);
    const at::Tensor chosen =
        torch::zeros_like(choice.probabilities).scatter_(1, choice.experts, 1).sum(0);
    const at::Tensor sum = choice.probabilities.sum(0);
    tokens = tokens.defined() ? tokens + chosen : chosen;
    probabilities = probabilities.defined() ? probabilities + sum : sum;
    rows += choice.probabilities.size(0);
  }
  const auto count = static_cast<double>(rows);
  return (tokens / count * (probabilities / count)).sum() * static_cast<double>(spec.count());
}

}  // namespace lockstep::models::detail
