// Muon for the matrices of hidden layers (Jordan, 2024): momentum, made orthogonal by a few
// Newton-Schulz iterations in bfloat16, operation by operation as torch.optim.Muon.
//
// Biases, norms, embeddings and the head are not for it. muon_groups() makes the groups of a model:
//
//   optim::Optimizer optimizer{model, muon_groups(*net, {.lr = 3e-4}, {.lr = 3e-4})};
//
// When sharded, every matrix is stepped whole by one rank, with about equal work on each rank.
#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "lockstep/optim/optimizer.h"

namespace lockstep::optim {

using Muon = OptimizerOf<MuonOptions>;

// Muon for the matrices of `module`, AdamW for the rest in two groups (decay_groups). The rest is
// what is not a matrix, weights of torch::nn::Embedding, and what is named as an embedding or as a
// head: "embed", "wte", "wpe", "lm_head", "head", "classifier" or "score" as a part of the name.
std::vector<ParamGroup> muon_groups(const torch::nn::Module& module, const MuonOptions& muon,
                                    const AdamWOptions& adamw);

}  // namespace lockstep::optim
