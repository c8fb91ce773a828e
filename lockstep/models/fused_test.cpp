// Models by lockstep::nn beside the same models by ATen's operations, on the CPU and, with
// LOCKSTEP_DEVICE=cuda, with the kernels.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>

#include "lockstep/models/gpt.h"
#include "lockstep/models/llama.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/nn/weight_copy.h"
#include "lockstep/optim/autocast.h"

namespace lockstep::models {
namespace {

struct Family {
  const char* name;
  CausalLmConfig config;
};

std::vector<Family> families() {
  const GptConfig gpt{
      .n_layer = 2, .n_head = 4, .n_embd = 32, .vocab_size = 101, .n_positions = 64};
  GptConfig untied = gpt;
  untied.tie_word_embeddings = false;
  untied.activation_function = Activation::kGelu;
  const LlamaConfig llama{.vocab_size = 104,
                          .hidden_size = 64,
                          .intermediate_size = 96,
                          .num_hidden_layers = 2,
                          .num_attention_heads = 4,
                          .num_key_value_heads = 2};
  LlamaConfig phi = llama;
  phi.fused_projections = true;
  phi.num_key_value_heads = 4;
  return {{"GPT-2", {.model = gpt}},
          {"GPT-2, untied, exact GELU", {.model = untied}},
          {"Llama", {.model = llama}},
          {"Phi-3", {.model = phi}}};
}

struct Result {
  at::Tensor loss, hidden;
  std::map<std::string, at::Tensor> gradients;
};

Result run(CausalLm& model, bool fused, const at::Tensor& ids, const at::Tensor& targets) {
  model.use_fused(fused);
  model.zero_grad();
  Result result;
  result.hidden = model.hidden_states(ids).detach();
  result.loss = model.loss(ids, targets);
  result.loss.backward();
  for (const auto& item : model.named_parameters())
    if (item.value().grad().defined()) result.gradients[item.key()] = item.value().grad().clone();
  return result;
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / (b.norm() + 1e-12)).item<double>();
}

// float32 on both sides: they differ by the order of sums (on CUDA by TF32, which is off here).
void expect_same(const Result& fused, const Result& plain, const std::string& what) {
  constexpr double kTolerance = 1e-5;
  EXPECT_LT(relative(fused.hidden, plain.hidden), kTolerance) << what;
  EXPECT_NEAR(fused.loss.item<double>(), plain.loss.item<double>(), 1e-5) << what;
  ASSERT_EQ(fused.gradients.size(), plain.gradients.size()) << what;
  for (const auto& [name, gradient] : plain.gradients)
    EXPECT_LT(relative(fused.gradients.at(name), gradient), kTolerance) << what << ": " << name;
}

std::pair<at::Tensor, at::Tensor> sample() {
  const auto options = at::TensorOptions(nn::test_device()).dtype(at::kLong);
  at::Tensor ids = torch::randint(0, 100, {3, 24}, options);
  at::Tensor targets = torch::randint(0, 100, {3, 24}, options);
  targets[1].slice(0, 4, 9).fill_(-100);
  return {ids, targets};
}

TEST(FusedModels, LossHiddenStatesAndGradientsAreThoseOfPlainOnes) {
  for (const Family& family : families()) {
    torch::manual_seed(1);
    const CausalLmPtr model = make_causal_lm(family.config);
    model->to(nn::test_device());
    const auto [ids, targets] = sample();
    expect_same(run(*model, true, ids, targets), run(*model, false, ids, targets), family.name);
  }
}

TEST(FusedModels, ABlockRunnerSeesWholeBlocks) {
  for (const Family& family : families()) {
    torch::manual_seed(2);
    const CausalLmPtr model = make_causal_lm(family.config);
    model->to(nn::test_device());
    const auto [ids, targets] = sample();
    const Result plain = run(*model, false, ids, targets);
    int calls = 0;
    model->run_blocks_with([&](Block block, std::vector<at::Tensor> inputs) {
      ++calls;
      return block(inputs);
    });
    expect_same(run(*model, true, ids, targets), plain, family.name);
    EXPECT_EQ(calls, 4) << family.name;  // two blocks, for hidden states and for the loss
  }
}

TEST(FusedModels, AdaptersTrainBesideAFrozenBase) {
  for (const Family& family : families()) {
    torch::manual_seed(3);
    const CausalLmPtr model = make_causal_lm(family.config);
    const bool gpt = family.config.gpt() != nullptr;
    LoraConfig lora;
    lora.r = 4;
    lora.lora_alpha = 8;
    lora.target_modules = gpt ? std::vector<std::string>{"c_attn", "c_fc"}
                              : std::vector<std::string>{"o_proj", "down_proj"};
    add_lora(*model, lora);
    for (const auto& item : model->named_parameters())
      if (item.key().ends_with("lora_B.weight")) item.value().data().normal_(0, 0.1);
    model->to(nn::test_device());
    const auto [ids, targets] = sample();
    const Result fused = run(*model, true, ids, targets);
    EXPECT_EQ(fused.gradients.size(), 8u) << family.name;
    expect_same(fused, run(*model, false, ids, targets), family.name);
    // And with a base that is trained too.
    for (auto& parameter : model->parameters()) parameter.set_requires_grad(true);
    expect_same(run(*model, true, ids, targets), run(*model, false, ids, targets), family.name);
  }
}

// In bfloat16 both sides round, at other places: ours may not be farther from float32 than ATen's.
TEST(FusedModels, InBfloat16GradientsAreAsCloseToFloatAsAutocasts) {
  const c10::Device device = nn::test_device();
  std::vector<Family> all = families();
  std::int64_t length = 24;
  if (device.is_cuda()) {  // the sizes at which other kernels and more chunks are chosen
    length = 1024;
    const GptConfig gpt{.n_layer = 12, .n_head = 12, .n_embd = 768, .vocab_size = 50304};
    all = {{"GPT-2 124M", {.model = gpt}}};
  }
  for (const Family& family : all) {
    torch::manual_seed(7);
    const CausalLmPtr model = make_causal_lm(family.config);
    model->to(device);
    const auto options = at::TensorOptions(device).dtype(at::kLong);
    const at::Tensor ids = torch::randint(0, 100, {8, length}, options);
    const at::Tensor targets = torch::randint(0, 100, {8, length}, options);
    const Result exact = run(*model, false, ids, targets);
    const auto in_half = [&](bool fused) {
      const optim::Autocast autocast(device, at::kBFloat16);
      return run(*model, fused, ids, targets);
    };
    const Result ours = in_half(true), plain = in_half(false);
    double our_sum = 0, plain_sum = 0, worst = 0;
    for (const auto& [name, gradient] : exact.gradients) {
      const double ours_off = relative(ours.gradients.at(name), gradient);
      const double plain_off = relative(plain.gradients.at(name), gradient);
      our_sum += ours_off * ours_off;
      plain_sum += plain_off * plain_off;
      worst = std::max(worst, ours_off / plain_off);
      // A sum over few elements may be rounded luckily on one side.
      EXPECT_LT(ours_off, 2 * plain_off + 1e-3) << family.name << ": " << name;
    }
    std::printf("%s: gradients off by %.4f (autocast %.4f), largest ratio of a tensor %.2f\n",
                family.name, std::sqrt(our_sum / exact.gradients.size()),
                std::sqrt(plain_sum / exact.gradients.size()), worst);
    EXPECT_LT(our_sum, 1.5 * plain_sum) << family.name;
  }
}

TEST(FusedModels, LengthsComeInAnyOrderAndTargetsFromAnyDevice) {
  for (const Family& family : families()) {
    torch::manual_seed(5);
    const CausalLmPtr model = make_causal_lm(family.config);
    model->to(nn::test_device());
    const auto [ids, targets] = sample();
    for (const std::int64_t time : {24, 7, 24, 16}) {
      const auto part = [&](const at::Tensor& t) { return t.slice(1, 0, time).contiguous(); };
      expect_same(run(*model, true, part(ids), part(targets)),
                  run(*model, false, part(ids), part(targets)), family.name);
    }
    model->use_fused(true);
    EXPECT_NO_THROW(model->loss(ids, targets.cpu())) << family.name;
  }
}

TEST(WeightCopy, FollowsTheParameterAndIsWrittenInPlace) {
  const at::Tensor parameter = torch::randn({8, 8}).to(nn::test_device()).set_requires_grad(true);
  const at::Tensor copy = nn::weight_copy(parameter, at::kBFloat16);
  EXPECT_TRUE(copy.equal(parameter.detach().to(at::kBFloat16)));
  {
    const torch::NoGradGuard no_grad;
    parameter.add_(1);
  }
  EXPECT_FALSE(copy.equal(parameter.detach().to(at::kBFloat16)));
  const at::Tensor again = nn::weight_copy(parameter, at::kBFloat16);
  EXPECT_EQ(again.const_data_ptr(), copy.const_data_ptr());
  EXPECT_TRUE(again.equal(parameter.detach().to(at::kBFloat16)));
  parameter.set_data(torch::ones({8, 8}).to(nn::test_device()));
  EXPECT_TRUE(nn::weight_copy(parameter, at::kBFloat16).to(at::kFloat).eq(1).all().item<bool>());
  EXPECT_EQ(nn::weight_copy(parameter, at::kFloat).const_data_ptr(), parameter.const_data_ptr());
  EXPECT_FALSE(nn::find_weight_copy(torch::ones({2})).defined());
}

}  // namespace
}  // namespace lockstep::models
