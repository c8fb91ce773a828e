// The bytes of optimizer state that `lockstep plan` counts for each rule, without torch and without
// a module, beside those that the optimizer of the same training file holds after a step.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/train/rule_options.h"
#include "observe/plan/model_shape.h"

namespace lockstep::plan {
namespace {

Model gpt() {
  const models::GptConfig c{
      .n_layer = 2, .n_head = 2, .n_embd = 32, .vocab_size = 96, .n_positions = 16};
  return {.config = models::CausalLmConfig{.model = c}, .length = 16};
}

Model llama_with_adapters() {
  const models::LlamaConfig c{.vocab_size = 96,
                              .hidden_size = 32,
                              .intermediate_size = 56,
                              .num_hidden_layers = 2,
                              .num_attention_heads = 4,
                              .num_key_value_heads = 2,
                              .max_position_embeddings = 16};
  Model model{.config = models::CausalLmConfig{.model = c}, .length = 16};
  model.lora = models::LoraConfig{.r = 4, .lora_alpha = 8};
  model.lora->target_modules = models::ModuleNames{"q_proj", "v_proj"};
  return model;
}

std::vector<optim::ParamGroup> groups_of(const torch::nn::Module& module,
                                         const TrainingArguments& arguments) {
  const train::RuleOptions rule = train::rule_options(arguments);
  if (const auto* const muon = std::get_if<optim::MuonOptions>(&rule))
    return optim::muon_groups(module, *muon, train::adamw_options(arguments));
  return std::visit([&](const auto& o) { return optim::decay_groups(module, o); }, rule);
}

TEST(PlannedState, OfEveryRuleIsWhatItsOptimizerHolds) {
  for (const Model& model : {gpt(), llama_with_adapters()}) {
    const models::CausalLmPtr net = models::make_causal_lm(*model.causal_lm());
    if (model.lora) models::add_lora(*net, *model.lora);
    for (const auto& [rule, args] :
         std::vector<std::pair<std::string, std::string>>{{"adamw", ""},
                                                          {"adam", ""},
                                                          {"sgd", ""},
                                                          {"sgd", "momentum=0.9"},
                                                          {"lion", ""},
                                                          {"muon", ""},
                                                          {"adafactor", ""},
                                                          {"adafactor", "beta1=0.9"},
                                                          {"rmsprop", ""},
                                                          {"rmsprop", "momentum=0.9"}}) {
      SCOPED_TRACE(rule + " " + args + (model.lora ? ", adapters" : ""));
      TrainingArguments arguments;
      arguments.optim = rule;
      arguments.momentum = 0;
      if (!args.empty()) arguments.optim_args = args;
      optim::Optimizer optimizer{net->named_parameters().pairs(), groups_of(*net, arguments)};
      for (at::Tensor& parameter : net->parameters())
        if (parameter.requires_grad()) parameter.mutable_grad() = at::ones_like(parameter);
      optimizer.step();
      EXPECT_EQ(train::state_bytes(arguments, trained_tensors(model)),
                static_cast<std::uint64_t>(optimizer.state_bytes()));
    }
  }
}

TEST(PlannedState, ArgumentsOfAnotherRuleAreRefused) {
  TrainingArguments arguments;
  arguments.optim = "lion";
  arguments.optim_args = "momentum=0.9";
  try {
    train::state_bytes(arguments, {});
    FAIL() << "nothing was refused";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("'momentum=0.9' is not an option of Lion with a number"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace lockstep::plan
