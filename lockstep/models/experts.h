// A mixture of experts: perceptrons, a few of which a router chooses for each token. Internal.
//
//   Experts experts(spec.block.mlp, parameters);
//   const at::Tensor y = experts.forward(x, pass, &router_logits);
//
// Tokens are sorted by expert, and each expert computes its rows together (nn::grouped_linear).
// Every expert is part of the graph, also with no rows, so every parameter has a gradient in every
// step. One thread at a time.
#pragma once

#include <vector>

#include "lockstep/models/pass.h"

namespace lockstep::models::detail {

class Experts : public torch::nn::Module {
 public:
  Experts(const MlpSpec& spec, const ParameterOptions& parameters);

  // x: [..., width]. The router's logits [..., experts] are stored in `router_logits`, unless that
  // is null. With slices (pass.tensor) every rank routes all tokens, x has been through
  // nn::enter(), and the result goes through nn::leave().
  at::Tensor forward(const at::Tensor& x, const Pass& pass, at::Tensor* router_logits);

 private:
  struct Routed {
    at::Tensor scores;  // float [tokens, experts of a token]; they add up to 1
    at::Tensor order;   // of [tokens * experts of a token], sorted by expert
    at::Tensor ends;    // where each expert's rows end then
  };
  at::Tensor router_logits_of(const at::Tensor& x, const Pass& pass) const;
  Routed route(const at::Tensor& logits) const;
  // The experts' results for rows that are sorted by expert.
  at::Tensor compute(const at::Tensor& rows, const at::Tensor& ends, bool owns_memory) const;

  MlpSpec spec_;
  Linear router_{nullptr};
  std::vector<std::vector<at::Tensor>> in_;  // weights: of each projection, of each expert
  std::vector<at::Tensor> out_;
};

// transformers' load_balancing_loss_func: minimal when all experts get equally many tokens, and
// then 1 for each expert of a token. `router_logits` has one tensor for each block.
at::Tensor load_balancing_loss(const std::vector<at::Tensor>& router_logits,
                               const ExpertsSpec& spec);

}  // namespace lockstep::models::detail
