// Muon for the matrices of hidden layers (Jordan, 2024): momentum, made orthogonal by a few
// Newton-Schulz iterations in bfloat16, operation by operation as torch.optim.Muon.
//
// Biases, norms, embeddings and the head are not for it. muon_groups() makes the groups of a model:
//
//   ReplicatedOptimizer optimizer{model, muon_groups(*net, {.lr = 3e-4}, {.lr = 3e-4})};
//
// When sharded, every matrix is stepped whole by one rank, with about equal work on each rank.
#pragma once

#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "lockstep/optim/optimizer.h"

namespace lockstep::optim {

struct MuonOptions {
  static constexpr std::string_view kName = "Muon";
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;
  bool nesterov = true;
  double eps = 1e-7;
  std::int64_t ns_steps = 5;
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};
  // Scales steps so that the learning rate and weight decay of AdamW fit (Moonshot, 2025); false:
  // by the square root of rows over columns where a matrix is tall, as in the original.
  bool match_rms_adamw = false;

  void each(const OptionVisitor& option);
};

std::unique_ptr<UpdateRule> make_rule(const MuonOptions& options);

using Muon = OptimizerOf<MuonOptions>;

// Muon for the matrices of `module`, AdamW for the rest in two groups (decay_groups). The rest is
// what is not a matrix, weights of torch::nn::Embedding, and what is named as an embedding or as a
// head: "embed", "wte", "wpe", "lm_head", "head", "classifier" or "score" as a part of the name.
std::vector<ParamGroup> muon_groups(const torch::nn::Module& module, const MuonOptions& muon,
                                    const AdamWOptions& adamw);

}  // namespace lockstep::optim
