// The models alone. That their numbers are those of the same models in Python is checked in
// tests/parity and tests/models.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <set>

#include "lockstep/core/helpers_for_test.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/models/resnet.h"

namespace lockstep::models {
namespace {

using ::testing::HasSubstr;

const GptConfig kSmall{
    .n_layer = 2, .n_head = 2, .n_embd = 16, .vocab_size = 50, .n_positions = 12};

const LlamaConfig kLlama{.vocab_size = 50,
                         .hidden_size = 16,
                         .intermediate_size = 24,
                         .num_hidden_layers = 2,
                         .num_attention_heads = 4,
                         .num_key_value_heads = 2};

// What a module has, as shapes.h should have said it.
std::vector<io::TensorShape> tensors_in(const torch::nn::Module& module) {
  std::vector<io::TensorShape> all;
  for (const auto& item : module.named_parameters())
    all.push_back({.name = item.key(), .shape = item.value().sizes().vec()});
  for (const auto& item : module.named_buffers()) {
    const bool whole = item.value().scalar_type() == at::kLong;
    all.push_back({.name = item.key(),
                   .dtype = whole ? io::DType::kI64 : io::DType::kF32,
                   .shape = item.value().sizes().vec()});
  }
  return all;
}

TEST(Shapes, AreThoseOfTheModules) {
  constexpr std::int64_t kTwo = 2;
  EXPECT_EQ(tensors_of(kSmall), tensors_in(*Gpt{kSmall}));
  GptConfig untied = kSmall;
  untied.tie_word_embeddings = false;
  untied.n_inner = 20;
  EXPECT_EQ(tensors_of(untied), tensors_in(*Gpt{untied}));
  for (const bool fused : {false, true}) {
    for (const bool bias : {false, true}) {
      LlamaConfig config = kLlama;
      config.fused_projections = fused;
      config.attention_bias = config.mlp_bias = config.tie_word_embeddings = bias;
      config.head_dim = bias ? 6 : 0;
      EXPECT_EQ(tensors_of(config), tensors_in(*Llama{config}));
    }
  }
  for (const Family* family : known_families()) {
    Options options = family->defaults();
    for (const char* layers : {"n_layer", "num_hidden_layers"}) options.set(layers, kTwo);
    for (const char* width : {"n_embd", "hidden_size", "intermediate_size"})
      options.set(width, std::int64_t{64});
    options.set("vocab_size", std::int64_t{50});
    for (const char* heads : {"n_head", "num_attention_heads", "num_key_value_heads"})
      options.set(heads, kTwo);
    const CausalLmConfig config{.model = FamilyConfig(*family, options)};
    EXPECT_EQ(tensors_of(config), tensors_in(*make_causal_lm(config))) << family->type;
    // What is written is read as the same model.
    const CausalLmConfig back = parse_config(config_json(config), "config.json");
    EXPECT_EQ(back.model.family().type, family->type);
    EXPECT_EQ(tensors_of(back), tensors_of(config)) << family->type;
    EXPECT_EQ(back.spec().windows, config.spec().windows) << family->type;
    std::vector<std::string> linear;
    std::vector<std::string> others;
    for (const auto& item : make_causal_lm(config)->named_modules("", /*include_self=*/false))
      if (const auto* layer = item.value()->as<LinearImpl>())
        (layer->options.adaptable() ? linear : others).push_back(item.key());
    EXPECT_EQ(linear_layers(config.spec()), linear) << family->type;
    EXPECT_EQ(routers_and_experts(config.spec()), others) << family->type;
  }
  for (const std::int64_t layers : {0, 1, 3}) {
    for (const bool batch_norm : {false, true}) {
      for (const double dropout : {0.0, 0.5}) {
        const MlpConfig config{.inputs = 5,
                               .hidden = 7,
                               .layers = layers,
                               .outputs = 3,
                               .dropout = dropout,
                               .batch_norm = batch_norm};
        EXPECT_EQ(tensors_of(config), tensors_in(*Mlp{config}));
      }
    }
  }
}

TEST(Shapes, AreThoseOfResNets) {
  for (const std::int64_t depth : {18, 34, 50}) {
    const ResNetConfig config{.depth = depth, .num_classes = 7};
    EXPECT_EQ(tensors_of(config), tensors_in(*ResNet{config})) << depth;
  }
  EXPECT_THAT(message_of([] { ResNet net{ResNetConfig{.depth = 20}}; }),
              HasSubstr("[resnet] depth 20 with 1000 classes"));
  ResNet net{ResNetConfig{.depth = 18}};
  EXPECT_THAT(message_of([&] { net(torch::zeros({2, 1, 32, 32})); }), HasSubstr("[resnet] input"));
}

TEST(Gpt, StartsWithoutAnOpinion) {
  torch::manual_seed(2);
  Gpt gpt{
      GptConfig{.n_layer = 4, .n_head = 4, .n_embd = 64, .vocab_size = 1000, .n_positions = 32}};
  const auto ids = torch::randint(1000, {8, 32}, torch::kLong);
  const auto targets = torch::randint(1000, {8, 32}, torch::kLong);
  const auto logits = gpt(ids);
  EXPECT_EQ(logits.sizes(), (at::IntArrayRef{8, 32, 1000}));
  EXPECT_NEAR(next_token_loss(logits, targets).item<double>(), std::log(1000), 0.1);
}

TEST(CausalLm, DropsInTrainingAlone) {
  torch::manual_seed(5);
  GptConfig config = kSmall;
  const auto ids = torch::randint(50, {2, 6}, torch::kLong);
  for (double* dropout : {&config.embd_pdrop, &config.attn_pdrop, &config.resid_pdrop}) {
    config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0;
    *dropout = 0.5;
    Gpt gpt{config};
    EXPECT_FALSE(torch::equal(gpt(ids), gpt(ids)));
    gpt->eval();
    EXPECT_TRUE(torch::equal(gpt(ids), gpt(ids)));
  }
  LlamaConfig other = kLlama;
  other.attention_dropout = 0.5;
  Llama llama{other};
  EXPECT_FALSE(torch::equal(llama(ids), llama(ids)));
  llama->eval();
  EXPECT_TRUE(torch::equal(llama(ids), llama(ids)));
}

TEST(CausalLm, IsTheSameOnEveryWayToMakeIt) {
  const CausalLmConfig config{.model = kLlama};
  torch::manual_seed(6);
  Llama direct{kLlama};
  torch::manual_seed(6);
  const auto made = make_causal_lm(config);
  torch::manual_seed(6);
  const auto half = make_causal_lm(config, {.dtype = torch::kBFloat16});
  const auto names = direct->named_parameters();
  const auto same = made->named_parameters(), rounded = half->named_parameters();
  for (const auto& item : names) {
    EXPECT_TRUE(torch::equal(item.value(), same[item.key()])) << item.key();
    EXPECT_TRUE(torch::equal(item.value().to(torch::kBFloat16), rounded[item.key()]));
  }
}

TEST(CausalLm, WritesAConfigThatItReads) {
  GptConfig gpt = kSmall;
  gpt.n_inner = 24;
  gpt.attn_pdrop = 0.25;
  gpt.activation_function = Activation::kRelu;
  const CausalLmConfig back =
      parse_config(config_json({.model = gpt, .eos_token_ids = {4, 5}}), "config.json");
  EXPECT_EQ(tensors_of(back), tensors_of(gpt));
  EXPECT_EQ(back.spec().block.attention.dropout, 0.25);
  EXPECT_EQ(back.spec().block.mlp.activation, Activation::kRelu);
  EXPECT_EQ(back.eos_token_ids, (std::vector<std::int64_t>{4, 5}));
  LlamaConfig phi = kLlama;
  phi.fused_projections = true;
  phi.sliding_window = 9;
  phi.rope = {.type = "longrope",
              .original_max_position_embeddings = 8,
              .attention_factor = 1.5,
              .short_factor = {1, 2},
              .long_factor = {3, 4}};
  const CausalLmConfig read = parse_config(config_json({.model = phi}), "config.json");
  EXPECT_EQ(tensors_of(read), tensors_of(phi));
  EXPECT_EQ(read.spec().windows, (std::vector<std::int64_t>{9, 9}));
  const RopeConfig& rope = read.spec().rotary->scaling;
  EXPECT_EQ(rope.long_factor, phi.rope.long_factor);
  EXPECT_EQ(rope.attention_factor, 1.5);
  EXPECT_EQ(rope.original_max_position_embeddings, 8);
  // What nothing here uses stays.
  EXPECT_THAT(config_json(parse_config(
                  R"({"model_type": "gpt2", "n_head": 2, "n_embd": 8, "task": {"a": 1}})", "c")),
              HasSubstr(R"("task":{"a":1})"));
}

TEST(Generate, SamplesBySeedAndTopP) {
  torch::manual_seed(7);
  Llama llama{kLlama};
  const std::vector<std::int64_t> ids{1, 2, 3};
  const auto likeliest = generate(*llama, ids, {.max_new_tokens = 30});
  EXPECT_TRUE(llama->is_training());
  const GenerateOptions warm{.max_new_tokens = 30, .temperature = 1.5, .seed = 1};
  const auto first = generate(*llama, ids, warm);
  EXPECT_EQ(generate(*llama, ids, warm), first);
  EXPECT_NE(first, likeliest);
  GenerateOptions other = warm;
  other.seed = 2;
  EXPECT_NE(generate(*llama, ids, other), first);
  other.top_p = 1e-9;  // the first token alone
  EXPECT_EQ(generate(*llama, ids, other), likeliest);
  EXPECT_THAT(message_of([&] { generate(*llama, {}); }), HasSubstr("[generate] there is no token"));
  EXPECT_THAT(message_of([&] { generate(*llama, {50}); }), HasSubstr("the token 50 is outside"));
  EXPECT_THAT(message_of([&] { generate(*llama, {1}, {.top_p = 0}); }), HasSubstr("top_p 0"));
  EXPECT_THAT(message_of([&] { generate(*llama, {1}, {.top_k = -1}); }), HasSubstr("top_k -1"));
  EXPECT_THAT(message_of([&] { generate(*llama, {1}, {.repetition_penalty = 0}); }),
              HasSubstr("repetition_penalty 0 above 0"));
  Gpt gpt{kSmall};
  EXPECT_EQ(generate(*gpt, ids, {.max_new_tokens = 10}).size(), 10u);  // the last is not read again
  EXPECT_THAT(message_of([&] { generate(*gpt, ids, {.max_new_tokens = 11}); }),
              HasSubstr("3 tokens and 11 new ones are more than the model's n_positions 12"));
}

TEST(Generate, DrawsAmongTheLikeliest) {
  torch::manual_seed(11);
  const CausalLmPtr model = make_causal_lm({.model = kLlama});
  const std::vector<std::int64_t> ids{3, 1, 4};
  const at::Tensor logits = [&] {
    const torch::NoGradGuard no_grad;
    return model->forward(torch::tensor(ids).unsqueeze(0)).slice(1, -1).flatten();
  }();
  const at::Tensor order = logits.argsort(-1, /*descending=*/true);
  const auto drawn = [&](GenerateOptions options) {
    std::set<std::int64_t> all;
    options.max_new_tokens = 1;
    options.temperature = 100;  // nearly uniform
    for (options.seed = 0; options.seed < 200; ++options.seed)
      all.insert(generate(*model, ids, options)[0]);
    return all;
  };
  const auto likeliest = [&](std::int64_t count) {
    std::set<std::int64_t> all;
    for (std::int64_t i = 0; i < count; ++i) all.insert(order[i].item<std::int64_t>());
    return all;
  };
  EXPECT_EQ(drawn({.top_k = 1}), likeliest(1));
  EXPECT_EQ(drawn({.top_k = 4}), likeliest(4));
  // top_p is a share of what top_k has left.
  EXPECT_EQ(drawn({.top_k = 4, .top_p = 0.6}), likeliest(3));
  EXPECT_GT(drawn({.top_k = 50}).size(), 30u);
}

TEST(Gpt, RefusesWhatDoesNotFit) {
  EXPECT_THAT(message_of([] { Gpt gpt{GptConfig{.n_head = 5, .n_embd = 16}}; }),
              HasSubstr("[gpt2] n_embd 16 does not divide into 5 heads"));
  EXPECT_THAT(message_of([] { Gpt gpt{GptConfig{.vocab_size = 0}}; }),
              HasSubstr("[gpt2] sizes must be positive"));
  Gpt gpt{kSmall};
  EXPECT_THAT(message_of([&] { gpt(torch::zeros({2, 13}, torch::kLong)); }),
              HasSubstr("[gpt2] input of shape [2, 13] and type Long"));
  EXPECT_THAT(message_of([&] { gpt(torch::zeros({2, 3})); }), HasSubstr("type Float"));
}

}  // namespace
}  // namespace lockstep::models
