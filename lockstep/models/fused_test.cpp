// Models by lockstep::nn beside the same models by ATen's operations, on the CPU and, with
// LOCKSTEP_DEVICE=cuda, with the kernels.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pass.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/nn/nf4.h"
#include "lockstep/optim/amp.h"
#include "lockstep/parallel/activation_checkpoint.h"

namespace lockstep::models {
namespace {

struct Case {
  const char* name;
  CausalLmConfig config;
};

// With windows that cut, and heads of another width than hidden_size says.
// Each token goes to all experts, because rounding must not choose others.
CausalLmConfig small_model(std::string_view type, const std::map<std::string, bool>& flags = {}) {
  const Family& family = *find_family(type);
  Options options = family.defaults();
  for (const auto& [key, value] : std::map<std::string, std::int64_t>{{"vocab_size", 104},
                                                                      {"hidden_size", 64},
                                                                      {"intermediate_size", 96},
                                                                      {"num_hidden_layers", 2},
                                                                      {"num_attention_heads", 4},
                                                                      {"num_key_value_heads", 2},
                                                                      {"head_dim", 24},
                                                                      {"sliding_window", 7},
                                                                      {"max_window_layers", 1},
                                                                      {"num_local_experts", 3},
                                                                      {"num_experts_per_tok", 3}})
    options.set(key, value);
  options.set("use_sliding_window", true);
  options.set("output_router_logits", true);
  for (const auto& [key, value] : flags) options.set(key, value);
  return {.model = FamilyConfig(family, options)};
}

std::vector<Case> cases() {
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
          {"Phi-3", {.model = phi}},
          {"Qwen2", small_model("qwen2")},
          {"Qwen3", small_model("qwen3")},
          {"Mistral", small_model("mistral")},
          {"Gemma 2", small_model("gemma2")},
          {"Mixtral", small_model("mixtral")},
          {"Starcoder2", small_model("starcoder2")},
          {"Starcoder2 without biases", small_model("starcoder2", {{"use_bias", false}})}};
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
  for (const Case& family : cases()) {
    torch::manual_seed(1);
    const CausalLmPtr model = make_causal_lm(family.config);
    model->to(nn::test_device());
    const auto [ids, targets] = sample();
    expect_same(run(*model, true, ids, targets), run(*model, false, ids, targets), family.name);
  }
}

TEST(FusedModels, ABlockRunnerSeesWholeBlocks) {
  for (const Case& family : cases()) {
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
  for (const Case& family : cases()) {
    torch::manual_seed(3);
    const CausalLmPtr model = make_causal_lm(family.config);
    const BlockSpec& block = family.config.spec().block;
    const bool gpt = family.config.spec().family == "gpt2";
    LoraConfig lora;
    lora.r = 4;
    lora.lora_alpha = 8;
    lora.target_modules = gpt ? std::vector<std::string>{"c_attn", "c_fc"}
                          : block.mlp.experts
                              ? std::vector<std::string>{"o_proj", "q_proj"}
                              : std::vector<std::string>{"o_proj", block.mlp.out.name};
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
  std::vector<Case> all = cases();
  std::int64_t length = 24;
  if (device.is_cuda()) {  // the sizes at which other kernels and more chunks are chosen
    length = 1024;
    const GptConfig gpt{.n_layer = 12, .n_head = 12, .n_embd = 768, .vocab_size = 50304};
    all = {{"GPT-2 124M", {.model = gpt}}, {"Mixtral", small_model("mixtral")}};
  }
  for (const Case& family : all) {
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
    // Of squares. Ours also rounds the residual stream; what products round differs by processor.
    EXPECT_LT(our_sum, 2 * plain_sum) << family.name;
  }
}

TEST(FusedModels, LengthsComeInAnyOrderAndTargetsFromAnyDevice) {
  for (const Case& family : cases()) {
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

// LibTorch's own writers skip the version counter: torch::optim's optimizers write through data(),
// and so do programs that load weights.
TEST(FusedModels, UseTheWeightsThatAreThereHoweverTheyWereWritten) {
  const auto device = nn::test_device();
  for (const Case& family : cases()) {
    torch::manual_seed(11);
    const CausalLmPtr model = make_causal_lm(family.config), other = make_causal_lm(family.config);
    model->to(device);
    other->to(device);
    model->use_fused(true);
    other->use_fused(true);
    const auto [ids, targets] = sample();
    const optim::Autocast autocast(device, at::kBFloat16);
    const double before = model->loss(ids, targets).item<double>();
    const auto from = other->parameters();
    auto to = model->parameters();
    for (std::size_t i = 0; i < to.size(); ++i) to[i].data().copy_(from[i].data());
    const double after = model->loss(ids, targets).item<double>();
    EXPECT_EQ(after, other->loss(ids, targets).item<double>()) << family.name;
    EXPECT_NE(after, before) << family.name;
  }
}

// Beyond the largest number of float16, in the sum of token and position embeddings.
TEST(FusedModels, AResidualStreamThatLeavesTheRangeOfFloat16IsFloat) {
  const auto device = nn::test_device();
  for (const Case& family : cases()) {
    torch::manual_seed(15);
    const CausalLmPtr model = make_causal_lm(family.config);
    model->to(device);
    const bool gpt = family.config.spec().family == "gpt2";
    const auto parameters = model->named_parameters();
    parameters[gpt ? "transformer.wte.weight" : "model.embed_tokens.weight"].data().mul_(1e7);
    const auto [ids, targets] = sample();
    const Result exact = run(*model, false, ids, targets);
    ASSERT_GT(1e7 * 0.02, 65504);
    const optim::Autocast autocast(device, at::kHalf);
    model->use_fused(true);
    const at::Tensor hidden = model->hidden_states(ids);
    EXPECT_LT(relative(hidden.to(at::kFloat), exact.hidden), 0.01) << family.name;
  }
}

// The stream of bfloat16 rounds what PyTorch's autocast does not; one key has it in float.
TEST(FusedModels, AFloatResidualStreamIsCloserToFloat) {
  const auto device = nn::test_device();
  for (const Case& family : cases()) {
    torch::manual_seed(16);
    const CausalLmPtr model = make_causal_lm(family.config);
    model->to(device);
    const auto [ids, targets] = sample();
    const Result exact = run(*model, false, ids, targets);
    const auto distance = [&](bool wide) {
      model->use_fp32_residual(wide);
      const optim::Autocast autocast(device, at::kBFloat16);
      const Result result = run(*model, true, ids, targets);
      EXPECT_EQ(result.hidden.scalar_type(), at::kBFloat16);
      double sum = 0;
      for (const auto& [name, gradient] : exact.gradients)
        sum += std::pow(relative(result.gradients.at(name), gradient), 2);
      return sum;
    };
    EXPECT_LT(distance(true), distance(false)) << family.name;
  }
}

TEST(FusedModels, LearnUnderBfloat16WithAnOptimizerOfLibTorch) {
  const auto device = nn::test_device();
  for (const Case& family : cases()) {
    const auto losses = [&](bool fused) {
      torch::manual_seed(12);
      const CausalLmPtr model = make_causal_lm(family.config);
      model->to(device);
      model->use_fused(fused);
      const auto [ids, targets] = sample();
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
      std::vector<double> all;
      for (int step = 0; step < 6; ++step) {  // later ones oscillate, and rounding decides
        const optim::Autocast autocast(device, at::kBFloat16);
        const at::Tensor loss = model->loss(ids, targets);
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        all.push_back(loss.item<double>());
      }
      return all;
    };
    const auto ours = losses(true), plain = losses(false);
    const double learned = plain.front() - plain.back();
    EXPECT_GT(learned, 0.1) << family.name;
    // Rounding differs, learning does not.
    EXPECT_NEAR(ours.front() - ours.back(), learned, 0.05 * learned) << family.name;
  }
}

std::map<std::string, at::Tensor> gradients_of(CausalLm& model) {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : model.named_parameters())
    if (item.value().grad().defined()) all[item.key()] = item.value().grad().clone();
  model.zero_grad();
  return all;
}

// ---------------------------------------------------------------- parts computed again

constexpr BlockParts kEachParts[] = {{.swiglu = true, .norm = true},
                                     {.norm = true, .mlp = true},
                                     {.attention = true},
                                     {true, true, true, true}};

// With dropout everywhere, and adapters with dropout where `adapted`.
CausalLmPtr dropping_model(const Case& family, bool adapted) {
  torch::manual_seed(31);
  const CausalLmPtr model = make_causal_lm(family.config);
  if (adapted) {
    LoraConfig lora;
    lora.r = 4;
    lora.lora_alpha = 8;
    lora.lora_dropout = 0.1;
    lora.target_modules.regex = kAllLinear;
    add_lora(*model, lora);
    for (const auto& item : model->named_parameters())
      if (item.key().ends_with("lora_B.weight")) item.value().data().normal_(0, 0.1);
  }
  model->to(nn::test_device());
  model->train();
  return model;
}

using Values = std::map<std::string, at::Tensor>;

// The loss and all gradients; the same random numbers in every call. Precision: float, bfloat16,
// fp8 by tensor and by row.
Values values_of(CausalLm& model, int precision) {
  const auto [ids, targets] = sample();
  torch::manual_seed(32);
  const optim::Autocast autocast(ids.device(), precision > 0 ? at::kBFloat16 : at::kFloat);
  const nn::Fp8Autocast fp8(precision < 2    ? std::nullopt
                            : precision == 2 ? std::optional(nn::Fp8Recipe::kTensorwise)
                                             : std::optional(nn::Fp8Recipe::kRowwise));
  const at::Tensor loss = model.loss(ids, targets);
  loss.backward();
  Values all = gradients_of(model);
  all["loss"] = loss.detach();
  return all;
}

void expect_parts_change_no_bit(const Case& family, CausalLm& model, int precision) {
  const MlpSpec& mlp = family.config.spec().block.mlp;
  const bool silu = mlp.gated() && mlp.activation == Activation::kSilu;
  model.run_blocks_with(nullptr);
  torch::manual_seed(33);
  const Values plain = values_of(model, precision);
  for (BlockParts parts : kEachParts) {
    parts.swiglu &= silu && !mlp.experts;
    parts.mlp &= !mlp.experts;
    model.run_blocks_with(lockstep::checkpoint, parts);
    torch::manual_seed(33);
    const Values again = values_of(model, precision);
    ASSERT_EQ(again.size(), plain.size());
    for (const auto& [name, value] : plain)
      EXPECT_TRUE(torch::equal(again.at(name), value))
          << family.name << ", " << names_of(parts) << ", precision " << precision << ": " << name;
  }
}

TEST(RecomputedParts, ChangeNoBit) {
  std::vector<Case> families = cases();
  families[0].config = {.model = GptConfig{.n_layer = 2,
                                           .n_head = 4,
                                           .n_embd = 32,
                                           .vocab_size = 101,
                                           .n_positions = 64,
                                           .embd_pdrop = 0.1,
                                           .attn_pdrop = 0.1,
                                           .resid_pdrop = 0.1}};
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  for (const Case& family : families) {
    const std::string name = family.name;
    const bool first = name == "GPT-2" || name == "Llama" || name == "Phi-3";
    for (const bool adapted : {false, true}) {
      if (adapted && family.config.spec().block.mlp.experts) continue;
      const CausalLmPtr model = dropping_model(family, adapted);
      model->use_fused(true);
      for (const int precision : {0, 1, 2, 3})
        if (precision == 1 || first) expect_parts_change_no_bit(family, *model, precision);
      model->use_fused(false);
      if (first) expect_parts_change_no_bit(family, *model, /*precision=*/1);
    }
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
}

// A graph that is kept goes backward a second time with the same gradients.
TEST(RecomputedParts, AreThereForASecondBackward) {
  const CausalLmPtr model = dropping_model(cases()[2], false);
  model->use_fused(true);
  model->run_blocks_with(lockstep::checkpoint, {.swiglu = true, .norm = true});
  const at::Tensor ids = sample().first;
  const at::Tensor loss = next_token_loss(model->forward(ids), ids);
  loss.backward({}, /*retain_graph=*/true);
  std::vector<at::Tensor> first;
  for (const at::Tensor& p : model->parameters()) first.push_back(p.grad().clone());
  model->zero_grad();
  loss.backward();
  for (std::size_t i = 0; i < first.size(); ++i)
    EXPECT_TRUE(torch::equal(model->parameters()[i].grad(), first[i]));
}

TEST(RecomputedParts, OfAnotherFamilyAreRefused) {
  const auto refused = [](const CausalLmConfig& config, const BlockParts& parts) {
    try {
      make_causal_lm(config)->run_blocks_with(lockstep::checkpoint, parts);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(refused(cases()[0].config, {.swiglu = true}).find("another activation. Write mlp"),
            std::string::npos);
  EXPECT_NE(refused(small_model("mixtral"), {.mlp = true}).find("has experts"), std::string::npos);
}

// ---------------------------------------------------------------- fp8

at::Tensor fp8_loss(CausalLm& model, const at::Tensor& ids, const at::Tensor& targets,
                    std::optional<nn::Fp8Recipe> recipe) {
  const optim::Autocast autocast(ids.device(), at::kBFloat16);
  const nn::Fp8Autocast fp8(recipe);
  return model.loss(ids, targets);
}

// A value of e4m3 is 2^-4 from what was cast at most and 3.6 % on average, one of e5m2 twice that;
// a gradient has been through two casts for each of a few layers.
TEST(Fp8Models, EveryFamilyIsNearBfloat16FusedAndPlain) {
  constexpr double kGradient = 0.3, kLoss = 0.02;
  for (const Case& family : cases())
    for (const auto recipe : {nn::Fp8Recipe::kTensorwise, nn::Fp8Recipe::kRowwise})
      for (const bool fused : {false, true}) {
        torch::manual_seed(21);
        const CausalLmPtr model = make_causal_lm(family.config);
        model->to(nn::test_device());
        model->use_fused(fused);
        const auto [ids, targets] = sample();
        const at::Tensor bf16 = fp8_loss(*model, ids, targets, std::nullopt);
        bf16.backward();
        const auto plain = gradients_of(*model);
        const at::Tensor loss = fp8_loss(*model, ids, targets, recipe);
        loss.backward();
        const auto gradients = gradients_of(*model);
        EXPECT_NEAR(loss.item<double>(), bf16.item<double>(), kLoss * bf16.item<double>());
        ASSERT_EQ(gradients.size(), plain.size()) << family.name;
        int differ = 0;
        for (const auto& [name, gradient] : plain) {
          EXPECT_LT(relative(gradients.at(name), gradient), kGradient) << family.name << name;
          differ += !torch::equal(gradients.at(name), gradient);
        }
        EXPECT_GT(differ, 0) << family.name;  // fp8 was there
      }
}

// What computes a block again in backward has what the forward had, whatever the thread has then.
TEST(Fp8Models, ABlockIsInFp8WhereverItIsRun) {
  torch::manual_seed(22);
  const CausalLmPtr model = make_causal_lm(cases()[2].config);
  model->to(nn::test_device());
  const auto [ids, targets] = sample();
  const double want = fp8_loss(*model, ids, targets, nn::Fp8Recipe::kTensorwise).item<double>();
  model->run_blocks_with([](Block block, std::vector<at::Tensor> inputs) {
    const nn::Fp8Autocast off(std::nullopt);
    return block(inputs);
  });
  EXPECT_EQ(fp8_loss(*model, ids, targets, nn::Fp8Recipe::kTensorwise).item<double>(), want);
}

LoraConfig all_linear() {
  LoraConfig lora;
  lora.r = 8;
  lora.lora_alpha = 16;
  lora.target_modules.regex = kAllLinear;
  return lora;
}

TEST(Fp8Models, AFrozenBaseIsCastOnceWithTheSameResults) {
  for (const Case& family : {cases()[0], cases()[2], cases()[3]})
    for (const auto recipe : {nn::Fp8Recipe::kTensorwise, nn::Fp8Recipe::kRowwise}) {
      torch::manual_seed(23);
      const CausalLmPtr model = make_causal_lm(family.config);
      add_lora(*model, all_linear());
      convert_frozen_weights(*model, at::kBFloat16);
      model->to(nn::test_device());
      const auto [ids, targets] = sample();
      const auto run_once = [&] {
        const at::Tensor loss = fp8_loss(*model, ids, targets, recipe);
        loss.backward();
        return std::pair(loss.item<double>(), gradients_of(*model));
      };
      const auto [before, gradients] = run_once();
      store_frozen_fp8(*model, recipe);
      const auto [after, again] = run_once();
      EXPECT_EQ(after, before) << family.name;
      for (const auto& [name, gradient] : gradients)
        EXPECT_TRUE(torch::equal(gradient, again.at(name))) << family.name << name;
      // Without fp8, and merged: what fp8 has kept of the base.
      const double plain = fp8_loss(*model, ids, targets, std::nullopt).item<double>();
      EXPECT_NEAR(plain, before, 0.02 * before) << family.name;
      merge_lora(*model);
      const double merged = fp8_loss(*model, ids, targets, std::nullopt).item<double>();
      EXPECT_NEAR(merged, plain, 2e-3 * plain) << family.name;
    }
}

TEST(Nf4Models, ComputeAsTheBaseThatTheirBytesAreDecodedTo) {
  for (const Case& family : {cases()[0], cases()[2], cases()[3], cases()[4]}) {
    const auto make = [&](bool nf4) {
      torch::manual_seed(31);
      const CausalLmPtr model = make_causal_lm(family.config, {.nf4 = nf4});
      LoraConfig lora = all_linear();
      lora.init_lora_weights = LoraInit::kRandom;
      add_lora(*model, lora);
      return model;
    };
    const CausalLmPtr packed = make(true), plain = make(false);
    auto plain_modules = plain->named_modules();
    std::size_t decoded = 0;
    for (const auto& item : packed->named_modules()) {
      const auto* const from = item.value()->as<LinearImpl>();
      if (from == nullptr || !from->options.nf4()) continue;
      const auto& to = *plain_modules[item.key()]->as<LinearImpl>();
      const at::Tensor weight = nn::from_nf4(from->weight, to.options.in_features(), at::kFloat);
      at::Tensor(to.weight.detach())
          .copy_(to.options.layout() == WeightLayout::kInOut ? weight.t() : weight);
      ++decoded;
    }
    EXPECT_EQ(decoded, linear_layers(family.config.spec()).size() - (family.config.tied() ? 0 : 1));
    EXPECT_EQ(packed->parameter_count(), plain->parameter_count()) << family.name;
    packed->to(nn::test_device());
    plain->to(nn::test_device());
    const auto [ids, targets] = sample();
    for (const bool fused : {false, true}) {
      const Result want = run(*plain, fused, ids, targets);
      expect_same(run(*packed, fused, ids, targets), want, family.name);
      packed->run_blocks_with(lockstep::checkpoint);
      expect_same(run(*packed, fused, ids, targets), want, family.name);
      packed->run_blocks_with({});
      const optim::Autocast autocast(nn::test_device(), at::kBFloat16);
      const double loss = run(*plain, fused, ids, targets).loss.item<double>();
      EXPECT_NEAR(run(*packed, fused, ids, targets).loss.item<double>(), loss, 1e-3 * loss)
          << family.name;
    }
  }
}

// A model of one block, composed of the operations that it consists of. None hands over the largest
// magnitude of its result: fp8 reads every input for it.
class ComposedLlama {
 public:
  ComposedLlama(CausalLm& model, const LlamaConfig& config, bool lora)
      : parameters_(model.named_parameters()), config_(config), lora_(lora) {}

  at::Tensor hidden_states(const at::Tensor& ids) const {
    const LlamaConfig& c = config_;
    const at::Tensor x =
        nn::embedding(ids, parameters_["model.embed_tokens.weight"], {}, {.dtype = at::kBFloat16});
    const at::Tensor in = nn::rms_norm(x, own("input_layernorm.weight"), c.rms_norm_eps);
    const at::Tensor y = linear(attention(in), {"self_attn.o_proj"});
    const auto [sum, normed] =
        nn::add_rms_norm(x, y, {}, own("post_attention_layernorm.weight"), c.rms_norm_eps);
    const at::Tensor last = linear(activated(normed), {"mlp.down_proj"});
    return nn::add_rms_norm(sum, last, {}, parameters_["model.norm.weight"], c.rms_norm_eps).normed;
  }

 private:
  at::Tensor own(const std::string& name) const { return parameters_["model.layers.0." + name]; }

  at::Tensor linear(const at::Tensor& x, const std::vector<std::string>& names) const {
    std::vector<at::Tensor> weights, parts;
    for (const std::string& name : names) weights.push_back(own(name + ".weight"));
    if (!lora_) return nn::fp8_linear(x, weights, {});
    for (std::size_t i = 0; i < names.size(); ++i)
      parts.push_back(nn::fp8_lora_linear(
          x, nn::to_fp8({weights[i]}, at::kFloat8_e4m3fn, nn::Fp8Recipe::kTensorwise), {},
          own(names[i] + ".lora_A.weight"), own(names[i] + ".lora_B.weight"), {.scaling = 2}));
    return parts.size() == 1 ? parts.front() : torch::cat(parts, -1);
  }

  at::Tensor attention(const at::Tensor& x) const {
    const LlamaConfig& c = config_;
    const std::int64_t width = c.head_width(), q = c.num_attention_heads, k = c.key_value_heads();
    const at::Tensor all =
        c.fused_projections
            ? linear(x, {"self_attn.qkv_proj"})
            : linear(x, {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"});
    const auto parts = all.view({x.size(0), x.size(1), q + 2 * k, width})
                           .transpose(1, 2)
                           .split_with_sizes({q, k, k}, 1);
    detail::RotaryAngles angles(Rotary{.width = width});
    const auto [cos, sin] =
        angles.find({.time = x.size(1), .like = x.options().dtype(at::kFloat), .halves = true});
    const auto [queries, keys] = nn::rope(parts[0], parts[1], cos, sin);
    return nn::attention(queries, keys, parts[2])
        .transpose(1, 2)
        .reshape({x.size(0), x.size(1), q * width});
  }

  at::Tensor activated(const at::Tensor& x) const {
    if (config_.fused_projections) return nn::swiglu(linear(x, {"mlp.gate_up_proj"}));
    return nn::swiglu(linear(x, {"mlp.gate_proj", "mlp.up_proj"}));
  }

  torch::OrderedDict<std::string, at::Tensor> parameters_;
  LlamaConfig config_;
  bool lora_;
};

// The backward of a GPU's attention may add in another order every time.
bool is_behind_attention(const std::string& name) {
  for (const char* part : {"q_proj", "k_proj", "v_proj", "qkv_proj", "input_layernorm", "embed"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}

TEST(Fp8Models, LargestMagnitudesThatAreHandedOverChangeNoBit) {
  for (const bool phi : {false, true})
    for (const bool lora : {false, true}) {
      torch::manual_seed(24);
      const LlamaConfig config{.vocab_size = 104,
                               .hidden_size = 64,
                               .intermediate_size = 96,
                               .num_hidden_layers = 1,
                               .num_attention_heads = 4,
                               .num_key_value_heads = phi ? 4 : 2,
                               .fused_projections = phi};
      const CausalLmPtr model = make_causal_lm({.model = config});
      if (lora) add_lora(*model, all_linear());
      model->to(nn::test_device());
      model->use_fused(true);
      for (auto& item : model->named_parameters())
        if (item.key().ends_with("lora_B.weight")) item.value().data().normal_(0, 0.1);
      const at::Tensor ids = sample().first;
      const at::Tensor dy = torch::randn({ids.size(0), ids.size(1), config.hidden_size})
                                .to(ids.device(), at::kBFloat16);
      const auto run_once = [&](bool composed) {
        const optim::Autocast autocast(ids.device(), at::kBFloat16);
        const nn::Fp8Autocast fp8(nn::Fp8Recipe::kTensorwise);
        const at::Tensor hidden = composed ? ComposedLlama(*model, config, lora).hidden_states(ids)
                                           : model->hidden_states(ids);
        hidden.backward(dy);
        return std::pair(hidden.detach(), gradients_of(*model));
      };
      const auto [want, gradients] = run_once(true);
      const auto [got, handed_over] = run_once(false);
      EXPECT_TRUE(torch::equal(got, want)) << phi << lora;
      ASSERT_EQ(handed_over.size(), gradients.size());
      for (const auto& [name, gradient] : gradients)
        if (!ids.is_cuda() || !is_behind_attention(name)) {
          EXPECT_TRUE(torch::equal(handed_over.at(name), gradient)) << name;
        }
    }
}

TEST(Fp8Models, AStoredWeightThatWasReplacedIsAnError) {
  const CausalLmPtr model = make_causal_lm(cases()[2].config);
  add_lora(*model, all_linear());
  store_frozen_fp8(*model, nn::Fp8Recipe::kTensorwise);
  const auto [ids, targets] = sample();
  for (auto& item : model->named_parameters())
    if (item.key().ends_with("q_proj.weight")) item.value().set_data(item.value().data().clone());
  EXPECT_THROW(model->forward(ids.cpu()), UsageError);
}

// The last losses of bfloat16 differ between seeds; fp8's are inside of that, with the same seeds.
TEST(Fp8Models, LearnAsBfloat16DoesWithinTheSpreadOfSeeds) {
  constexpr int kSeeds = 5, kSteps = 40;
  for (const Case& family : {cases()[0], cases()[2]}) {
    const auto last = [&](int seed, std::optional<nn::Fp8Recipe> recipe) {
      torch::manual_seed(static_cast<std::uint64_t>(seed));
      const CausalLmPtr model = make_causal_lm(family.config);
      model->to(nn::test_device());
      torch::manual_seed(31);
      const at::Tensor ids = sample().first;
      const at::Tensor targets = ids.roll(-1, 1);
      torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
      double sum = 0;
      for (int step = 0; step < kSteps; ++step) {
        const at::Tensor loss = fp8_loss(*model, ids, targets, recipe);
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        if (step >= kSteps - 5) sum += loss.item<double>() / 5;
      }
      return sum;
    };
    std::vector<double> bf16, fp8;
    for (int seed = 0; seed < kSeeds; ++seed) {
      bf16.push_back(last(seed, std::nullopt));
      fp8.push_back(last(seed, nn::Fp8Recipe::kTensorwise));
    }
    const auto [low, high] = std::ranges::minmax(bf16);
    const double mean = std::accumulate(fp8.begin(), fp8.end(), 0.0) / kSeeds;
    EXPECT_LT(high, 3.5) << family.name;  // from ln 104 = 4.6: there is something to compare
    EXPECT_GE(mean, low - (high - low)) << family.name;
    EXPECT_LE(mean, high + (high - low)) << family.name;
    std::printf("%s: bf16 %.4f to %.4f, mean of fp8 %.4f\n", family.name, low, high, mean);
  }
}

// A CUDA graph reads the tables that it was recorded with, whatever comes between its replays.
TEST(RotaryAngles, TablesStayWhenOtherPositionsAreAskedFor) {
  detail::RotaryAngles angles(Rotary{.width = 16});
  const auto options = at::TensorOptions(nn::test_device()).dtype(at::kFloat);
  for (const bool halves : {false, true}) {
    at::Tensor was;
    const void* place = nullptr;
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
    {
      const auto [cos, sin] = angles.find({.time = 12, .like = options, .halves = halves});
      EXPECT_EQ(cos.size(1), halves ? 8 : 16);
      was = cos.clone();
      place = cos.const_data_ptr();
      for (const at::Tensor& table : {cos, sin})
        memory.push_back(table.storage().getWeakStorageImpl());
    }
    angles.find({.time = 500, .like = options, .halves = halves});
    angles.find({.past = 40, .time = 1, .like = options, .halves = halves});
    angles.find({.time = 12, .like = options.dtype(at::kBFloat16), .halves = halves});
    for (const auto& table : memory) EXPECT_FALSE(table.expired()) << halves;
    const auto [again, sin] = angles.find({.time = 12, .like = options, .halves = halves});
    EXPECT_EQ(again.const_data_ptr(), place) << halves;
    EXPECT_TRUE(again.equal(was)) << halves;
    // A part of a longer table has the same angles.
    const auto [later, unused] =
        angles.find({.past = 7, .time = 30, .like = options, .halves = halves});
    EXPECT_TRUE(later.slice(0, 0, 5).equal(was.slice(0, 7))) << halves;
  }
}

}  // namespace
}  // namespace lockstep::models
