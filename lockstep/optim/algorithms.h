// The optimizers: AdamW, Adam, SGD, Lion, Muon, Adafactor and RMSprop.
//
//   lockstep::optim::AdamW optimizer{model, {.lr = 3e-4}};   // or model.parameters()
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// AdamW, Adam and SGD are one pass over memory, with the bits of Python's fused=True (the stock C++
// AdamW rounds differently from both of Python's variants, so a run could not be compared with one
// in Python). The others use ATen's operations. options.h has their options; optimizer.h explains
// groups, state, archives and mixing of rules.
#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim {

// Weight decay shrinks the parameter (AdamW), or is added to the gradient, so that it passes
// through the moments (Adam).
using AdamW = OptimizerOf<AdamWOptions>;
using Adam = OptimizerOf<AdamOptions>;

// Parameters of 16 bits on a CPU are stepped by plain operations, in the order of Python's
// foreach=False: ATen's fused kernel leaves elements of them out (LibTorch 2.11). A parameter whose
// first gradient comes later than the others' starts its momentum then; Python's fused SGD fails
// there.
using SGD = OptimizerOf<SGDOptions>;

// Lion (Chen et al., 2023) moves every weight by lr, against the sign of an average of gradients.
// One tensor of state for each parameter, half of AdamW's. The usual learning rate is a third to a
// tenth of AdamW's, and weight decay is larger by the same factor.
using Lion = OptimizerOf<LionOptions>;

// Muon for the matrices of hidden layers (Jordan, 2024): momentum, orthogonalised by a few
// Newton-Schulz iterations in bfloat16, operation by operation as torch.optim.Muon. Not for biases,
// norms, embeddings and the head. When sharded, one rank steps a whole matrix, and ranks get about
// equal work.
using Muon = OptimizerOf<MuonOptions>;

// Muon for the matrices of `module`, AdamW for the rest in two groups (decay_groups). The rest is
// every parameter that is not a matrix, weights of torch::nn::Embedding, and embeddings and heads
// by name: "embed", "wte", "wpe", "lm_head", "head", "classifier" or "score" as a part of it.
//
//   optim::Optimizer optimizer{model, muon_groups(*net, {.lr = 3e-4}, {.lr = 3e-4})};
std::vector<ParamGroup> muon_groups(const torch::nn::Module& module, const MuonOptions& muon,
                                    const AdamWOptions& adamw);

// Adafactor (Shazeer and Stern, 2018) as transformers.Adafactor has it: only the means of the
// second moments over rows and over columns are stored, so a matrix has almost no state. As in
// Hugging Face's Trainer, with an explicit learning rate: relative steps and scaling by the
// parameter are off unless asked for. Half types are computed in float.
using Adafactor = OptimizerOf<AdafactorOptions>;

// RMSprop (Hinton, 2012) divides every gradient by the root of an average of its squares. Bit for
// bit what Python's torch.optim.RMSprop does without `centered`. One tensor of state for each
// parameter, and one more with momentum.
using RMSprop = OptimizerOf<RMSpropOptions>;

}  // namespace lockstep::optim
