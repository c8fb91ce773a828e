// Mixtral: Mistral with several perceptrons in a block, of which a router chooses two for a token.
#include "lockstep/core/error.h"
#include "lockstep/models/families/shared.h"

namespace lockstep::models::families {
namespace {

DecoderSpec describe_mixtral(const Options& o) {
  const std::int64_t experts = o.integer("num_local_experts");
  const std::int64_t chosen = o.integer("num_experts_per_tok");
  if (experts < 1 || chosen < 1 || chosen > experts)
    throw UsageError(
        "mixtral",
        "num_experts_per_tok {} with num_local_experts {}. A token goes to between one "
        "and all of the experts; check both fields.",
        chosen, experts);
  constexpr std::int64_t kMostInAll = 100'000;  // ten times those of the largest models
  if (experts * o.integer("num_hidden_layers") > kMostInAll)
    throw UsageError("mixtral",
                     "num_local_experts {} in each of num_hidden_layers {} are more than {} "
                     "experts. Check both fields.",
                     experts, o.integer("num_hidden_layers"), kMostInAll);
  DecoderSpec s = rms_decoder("mixtral", o);
  MlpSpec& mlp = s.block.mlp;
  mlp.name = "block_sparse_moe";
  mlp.in[0].name = "w1";
  mlp.in[1].name = "w3";
  mlp.out.name = "w2";
  mlp.experts = ExpertsSpec{
      .router = {.name = "gate",
                 .in = s.width,
                 .parts = {experts},
                 .deviation = o.real("initializer_range")},
      .per_token = chosen,
      // As in transformers, the loss has this part only where the logits are returned.
      .load_balancing = o.flag("output_router_logits") ? o.real("router_aux_loss_coef") : 0,
      .jitter = o.real("router_jitter_noise"),
  };
  return s;
}

}  // namespace

const Family& mixtral() {
  static const Family family{
      .type = "mixtral",
      .classes = {"MixtralForCausalLM", "MixtralModel"},
      .options = rms_options({{"intermediate_size", std::int64_t{14336}, 1},
                              count_option("num_key_value_heads", 8),
                              {"max_position_embeddings", std::int64_t{131072}, 1},
                              {"rms_norm_eps", 1e-5, 0, 1},
                              window_option(0),
                              {"num_experts_per_tok", std::int64_t{2}, 1},
                              {.key = "num_local_experts",
                               .fallback = std::int64_t{8},
                               .least = 1,
                               .most = kMostExperts,
                               .other_name = "num_experts"},
                              {"output_router_logits", false},
                              {"router_aux_loss_coef", 0.001},
                              {"router_jitter_noise", 0.0, 0, 1}}),
      .describe = describe_mixtral,
      .rope = RopeRules{.theta = 1e6},
  };
  return family;
}

}  // namespace lockstep::models::families
