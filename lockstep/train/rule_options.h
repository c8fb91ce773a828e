// The update rule named by a training file, without torch: the Trainer makes its optimizer from it,
// and `lockstep plan` and disk checks count its state by the same declaration.
//
//   const RuleOptions rule = rule_options(arguments);        // optim, adam_beta1, ..., optim_args
//   state_bytes(arguments, plan::trained_tensors(model));    // of one replica
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "lockstep/io/safetensors.h"
#include "lockstep/optim/options.h"
#include "lockstep/train/arguments.h"

namespace lockstep::train {

using RuleOptions =
    std::variant<optim::AdamWOptions, optim::AdamOptions, optim::SGDOptions, optim::LionOptions,
                 optim::AdafactorOptions, optim::MuonOptions, optim::RMSpropOptions>;

// UsageError for optim_args that are not the rule's.
RuleOptions rule_options(const TrainingArguments& arguments);
// The AdamW options for parameters that Muon does not take.
optim::AdamWOptions adamw_options(const TrainingArguments& arguments);

// Bytes of the optimizer's state for these parameters, in float.
std::uint64_t state_bytes(const TrainingArguments& arguments,
                          const std::vector<io::TensorShape>& trained);

}  // namespace lockstep::train
