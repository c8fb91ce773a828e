// The model alone. That its numbers are those of the same model in Python is checked in
// tests/parity.
#include "lockstep/models/gpt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/models/mlp.h"

namespace lockstep::models {
namespace {

using ::testing::HasSubstr;

const GptConfig kSmall{
    .n_layer = 2, .n_head = 2, .n_embd = 16, .vocab_size = 50, .n_positions = 12};

template <typename Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(Gpt, HasTheNamesOfGpt2) {
  Gpt gpt{kSmall};
  std::vector<std::string> names;
  for (const auto& item : gpt->named_parameters()) {
    if (item.key().find(".h.1.") == std::string::npos) names.push_back(item.key());
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre(
                         "transformer.wte.weight", "transformer.wpe.weight",
                         "transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.bias",
                         "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.bias",
                         "transformer.h.0.attn.c_proj.weight", "transformer.h.0.attn.c_proj.bias",
                         "transformer.h.0.ln_2.weight", "transformer.h.0.ln_2.bias",
                         "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias",
                         "transformer.h.0.mlp.c_proj.weight", "transformer.h.0.mlp.c_proj.bias",
                         "transformer.ln_f.weight", "transformer.ln_f.bias"));
  const auto parameters = gpt->named_parameters();
  EXPECT_EQ(parameters["transformer.h.0.attn.c_attn.weight"].sizes(), (at::IntArrayRef{16, 48}));
  EXPECT_EQ(parameters["transformer.h.1.mlp.c_proj.weight"].sizes(), (at::IntArrayRef{64, 16}));
}

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
  EXPECT_EQ(tensors_of(kSmall), tensors_in(*Gpt{kSmall}));
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

TEST(Gpt, HasTheSizeOfGpt2) {
  Gpt gpt{GptConfig{}};
  EXPECT_EQ(gpt->parameter_count(), 124'439'808);
}

TEST(Gpt, SeesOnlyThePast) {
  torch::manual_seed(1);
  Gpt gpt{kSmall};
  const auto ids = torch::randint(50, {3, 12}, torch::kLong);
  auto changed = ids.clone();
  changed.select(1, 7).add_(1).remainder_(50);
  const torch::NoGradGuard no_grad;
  const auto difference = (gpt(ids) - gpt(changed)).abs().amax({0, 2});
  EXPECT_EQ(difference.slice(0, 0, 7).max().item<float>(), 0);
  EXPECT_GT(difference.slice(0, 7).min().item<float>(), 0);
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

TEST(Gpt, LearnsASequence) {
  torch::manual_seed(3);
  Gpt gpt{kSmall};
  torch::optim::SGD optimizer(gpt->parameters(), 0.5);
  const auto text = torch::arange(13).remainder(5).unsqueeze(0);
  const auto ids = text.slice(1, 0, 12), targets = text.slice(1, 1, 13).contiguous();
  double last = 0;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    auto loss = next_token_loss(gpt(ids), targets);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
  }
  EXPECT_LT(last, 0.5);  // ln 50 = 3.9 at the start
}

TEST(Gpt, RunsBlocksThroughTheRunner) {
  torch::manual_seed(4);
  Gpt gpt{kSmall};
  const auto ids = torch::randint(50, {2, 6}, torch::kLong);
  const auto plain = gpt(ids);
  int calls = 0;
  gpt->run_blocks_with([&](Block block, std::vector<at::Tensor> inputs) {
    ++calls;
    return block(inputs);
  });
  EXPECT_TRUE(torch::equal(gpt(ids), plain));
  EXPECT_EQ(calls, 2);
}

TEST(Gpt, RefusesWhatDoesNotFit) {
  EXPECT_THAT(message_of([] { Gpt gpt{GptConfig{.n_head = 5, .n_embd = 16}}; }),
              HasSubstr("[gpt] n_embd 16 does not divide into 5 heads"));
  EXPECT_THAT(message_of([] { Gpt gpt{GptConfig{.vocab_size = 0}}; }),
              HasSubstr("[gpt] sizes must be positive"));
  Gpt gpt{kSmall};
  EXPECT_THAT(message_of([&] { gpt(torch::zeros({2, 13}, torch::kLong)); }),
              HasSubstr("[gpt] input of shape [2, 13] and type Long"));
  EXPECT_THAT(message_of([&] { gpt(torch::zeros({2, 3})); }), HasSubstr("type Float"));
}

}  // namespace
}  // namespace lockstep::models
