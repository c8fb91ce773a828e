// Mixtures of experts: the sum that they define, tokens that no expert or only one gets, ranks with
// other experts in use, gradient checkpointing, and what is refused. tests/models compares whole
// models with transformers. With LOCKSTEP_DEVICE=cuda on CUDA tensors (tests/gpu).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/models/decoder.h"
#include "lockstep/models/device_map.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/optim/amp.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::models {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kExperts = 5;

CausalLmConfig small_model(const std::map<std::string, OptionValue>& own = {}) {
  const Family& family = *find_family("mixtral");
  Options options = family.defaults();
  for (const auto& [key, value] : std::map<std::string, std::int64_t>{{"vocab_size", 61},
                                                                      {"hidden_size", 16},
                                                                      {"intermediate_size", 24},
                                                                      {"num_hidden_layers", 2},
                                                                      {"num_attention_heads", 2},
                                                                      {"num_key_value_heads", 1},
                                                                      {"num_local_experts", 5}})
    options.set(key, value);
  options.set("initializer_range", 0.2);
  for (const auto& [key, value] : own) options.set(key, value);
  return {.model = FamilyConfig(family, options)};
}

CausalLmPtr made(const CausalLmConfig& config, int seed = 3) {
  torch::manual_seed(seed);
  const CausalLmPtr model = make_causal_lm(config);
  model->to(nn::test_device());
  return model;
}

at::Tensor some_ids(std::int64_t time = 9) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  return at::randint(0, 60, {3, time}, generator, at::kLong).to(nn::test_device());
}

using Gradients = std::map<std::string, at::Tensor>;

Gradients gradients_of(const torch::nn::Module& module) {
  Gradients all;
  for (const auto& item : module.named_parameters()) {
    EXPECT_TRUE(item.value().grad().defined()) << item.key();
    all[item.key()] = item.value().grad().clone();
  }
  return all;
}

void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  // Sums of a few dozen numbers of about one in float32, in another order.
  EXPECT_LT((got - want).abs().max().item<double>(), 1e-5) << what;
}

// ---------------------------------------------------------------- what is computed

// Every expert computes every token, and those that are not chosen count nothing.
at::Tensor densely(torch::nn::Module& experts, const at::Tensor& x) {
  const auto w = experts.named_parameters();
  const at::Tensor shares = torch::softmax(torch::linear(x, w["gate.weight"]), -1);
  auto [largest, chosen] = torch::topk(shares, 2, -1);
  largest = largest / largest.sum(-1, true);
  const at::Tensor factors = torch::zeros_like(shares).scatter(-1, chosen, largest);
  at::Tensor sum = torch::zeros_like(x);
  for (std::int64_t i = 0; i < kExperts; ++i) {
    const std::string name = "experts." + std::to_string(i) + ".";
    const at::Tensor inner = torch::silu(torch::linear(x, w[name + "w1.weight"])) *
                             torch::linear(x, w[name + "w3.weight"]);
    sum = sum + torch::linear(inner, w[name + "w2.weight"]) * factors.select(-1, i).unsqueeze(-1);
  }
  return sum;
}

TEST(Experts, AddUpWhatThoseOfATokenCompute) {
  torch::manual_seed(1);
  detail::Experts experts(small_model().spec().block.mlp, {});
  experts.to(nn::test_device());
  {
    const torch::NoGradGuard no_grad;  // nobody goes to the second one, and everybody to the last
    experts.named_parameters()["gate.weight"].select(0, 1).fill_(-9);
    experts.named_parameters()["gate.weight"].select(0, 4).fill_(9);
  }
  const at::Tensor x = torch::rand({2, 7, 16}).to(nn::test_device()).set_requires_grad(true);
  const at::Tensor dy = torch::randn({2, 7, 16}).to(nn::test_device());
  at::Tensor logits;
  const at::Tensor y = experts.forward(x, {}, &logits);
  EXPECT_EQ(logits.sizes(), (at::IntArrayRef{2, 7, kExperts}));
  y.backward(dy);
  const Gradients ours = gradients_of(experts);
  const at::Tensor dx = x.grad().clone();
  x.mutable_grad().zero_();
  experts.zero_grad();
  const at::Tensor want = densely(experts, x);
  want.backward(dy);
  expect_near(y, want, "result");
  expect_near(dx, x.grad(), "gradient of the input");
  for (const auto& [name, gradient] : gradients_of(experts))
    expect_near(ours.at(name), gradient, name);
  for (const char* part : {"w1", "w2", "w3"}) {
    EXPECT_EQ(ours.at(std::string("experts.1.") + part + ".weight").abs().max().item<double>(), 0);
    EXPECT_GT(ours.at(std::string("experts.4.") + part + ".weight").abs().max().item<double>(), 0);
  }
}

TEST(Experts, ShareTheGradientsOfOneToken) {
  const CausalLmPtr model = made(small_model());
  const at::Tensor one = some_ids(1).slice(0, 0, 1);
  model->loss(one, one).backward();
  std::map<std::string, int> in_use;  // by block
  for (const auto& [name, gradient] : gradients_of(*model))
    if (name.ends_with("w1.weight"))
      in_use[name.substr(0, name.find(".experts."))] += gradient.abs().max().item<double>() > 0;
  EXPECT_THAT(in_use, ::testing::ElementsAre(::testing::Pair(HasSubstr("layers.0"), 2),
                                             ::testing::Pair(HasSubstr("layers.1"), 2)));
}

// ---------------------------------------------------------------- the load balancing loss

// A router without an opinion gives every expert the same probability, and then the sum over
// experts of share of tokens times probability is per_token / count.
TEST(LoadBalancing, IsTheNumberOfExpertsOfATokenForAnEvenRouter) {
  const CausalLmConfig plain = small_model();
  const CausalLmConfig with =
      small_model({{"output_router_logits", true}, {"router_aux_loss_coef", 0.25}});
  const CausalLmPtr without_it = made(plain), model = made(with);
  const at::Tensor ids = some_ids();
  for (const auto& one : {without_it, model}) {
    const torch::NoGradGuard no_grad;
    for (const auto& item : one->named_parameters())
      if (item.key().ends_with("gate.weight")) item.value().zero_();
  }
  const double base = without_it->loss(ids, ids).item<double>();
  EXPECT_NEAR(model->loss(ids, ids).item<double>(), base + 0.25 * 2, 1e-5);
  EXPECT_NEAR(next_token_loss(model->forward(ids), ids).item<double>(), base, 1e-6);
  at::Tensor logits;  // which an evaluation wants too
  EXPECT_NEAR(model->loss(ids, ids, &logits).item<double>(), base + 0.25 * 2, 1e-5);
  expect_near(logits, model->forward(ids), "logits");
}

struct Trained {
  at::Tensor loss;
  Gradients gradients;
};

Trained train(CausalLm& model) {
  model.zero_grad();
  torch::manual_seed(21);
  const at::Tensor loss = model.loss(some_ids(), some_ids().roll(-1, 1));
  loss.backward();
  return {loss.detach(), gradients_of(model)};
}

TEST(LoadBalancing, IsTheSameWithCheckpointedBlocksJitterIncluded) {
  const CausalLmConfig config = small_model({{"output_router_logits", true},
                                             {"router_aux_loss_coef", 0.3},
                                             {"router_jitter_noise", 0.2}});
  for (const bool fused : {false, true}) {
    const CausalLmPtr model = made(config);
    model->use_fused(fused);
    model->train();
    const Trained plain = train(*model);
    model->run_blocks_with(lockstep::checkpoint);
    const Trained again = train(*model);
    expect_near(again.loss, plain.loss, "loss");
    for (const auto& [name, gradient] : plain.gradients)
      expect_near(again.gradients.at(name), gradient, name);
    model->eval();  // without jitter
    EXPECT_GT((train(*model).loss - plain.loss).abs().item<double>(), 1e-4) << fused;
  }
}

TEST(LoadBalancing, ReachesARouterOfAnotherStage) {
  const CausalLmConfig config =
      small_model({{"output_router_logits", true}, {"router_aux_loss_coef", 0.3}});
  const bool gpu = nn::test_device().is_cuda();
  torch::manual_seed(3);
  const CausalLmPtr whole = make_causal_lm(config);
  torch::manual_seed(3);
  const CausalLmPtr parted = make_causal_lm(config);
  place(*parted, balanced_device_map(config, {gpu ? "cuda:0" : "cpu:0", gpu ? "cpu" : "cpu:1"}));
  const at::Tensor ids = some_ids().cpu();
  const at::Tensor want = whole->loss(ids, ids), got = parted->loss(ids, ids);
  want.backward();
  got.backward();
  expect_near(got.cpu(), want, "loss");
  const auto parameters = parted->named_parameters();
  for (const auto& item : whole->named_parameters())
    expect_near(parameters[item.key()].grad().cpu(), item.value().grad(), item.key());
}

// ---------------------------------------------------------------- several ranks

// Experts of the first block that a text goes to.
std::set<std::int64_t> used_by(std::int64_t token) {
  torch::manual_seed(3);
  const CausalLmPtr model = make_causal_lm(small_model());
  const at::Tensor ids = torch::full({1, 1}, token, at::kLong);
  model->loss(ids, ids).backward();
  std::set<std::int64_t> used;
  for (std::int64_t i = 0; i < kExperts; ++i) {
    const std::string name =
        "model.layers.0.block_sparse_moe.experts." + std::to_string(i) + ".w1.weight";
    if (model->named_parameters()[name].grad().abs().max().item<double>() > 0) used.insert(i);
  }
  return used;
}

std::mutex build_mutex;  // modules draw from one global generator

// Without find_unused_parameters.
TEST(Experts, ThatOneRankOrNoRankUsesAreAveragedLikeOthers) {
  std::int64_t second = 1;
  const std::set<std::int64_t> first_uses = used_by(0);
  while (used_by(second) == first_uses) ++second;
  ASSERT_LT(second, 61);  // other experts; and with two of them each, one of five has no token
  std::vector<Gradients> local;
  for (const std::int64_t token : {std::int64_t{0}, second}) {
    torch::manual_seed(3);
    const CausalLmPtr model = make_causal_lm(small_model());
    const at::Tensor ids = torch::full({1, 1}, token, at::kLong);
    model->loss(ids, ids).backward();
    local.push_back(gradients_of(*model));
  }
  lockstep::testing::run_threads(2, [&](World& world) {
    CausalLmPtr model;
    {
      const std::lock_guard<std::mutex> lock(build_mutex);
      torch::manual_seed(3);
      model = make_causal_lm(small_model());
    }
    DistributedDataParallel parallel{model, world};
    const at::Tensor ids = torch::full({1, 1}, world.rank() == 0 ? 0 : second, at::kLong);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->loss(ids, ids).backward();
      for (const auto& [name, gradient] : gradients_of(*model))
        EXPECT_TRUE(gradient.equal((local[0].at(name) + local[1].at(name)) / 2)) << name;
    }
  });
}

// ---------------------------------------------------------------- adapters

TEST(Experts, HaveNoAdaptersOfTheirOwn) {
  const auto refusal = [](const LoraConfig& config) {
    const std::string torch_free =
        testing::message_of<UsageError>([&] { LoraTargets(config).select(small_model().spec()); });
    EXPECT_EQ(testing::message_of<UsageError>([&] { add_lora(*made(small_model()), config); }),
              torch_free);
    return torch_free;
  };
  EXPECT_THAT(
      refusal({.target_modules = "all-linear"}),
      HasSubstr("target_modules matches model.layers.0.block_sparse_moe.gate, which belongs "
                "to a mixture of experts."));
  EXPECT_THAT(refusal({.target_modules = {"q_proj", "w1"}}),
              HasSubstr("model.layers.0.block_sparse_moe.experts.0.w1"));
  EXPECT_THAT(refusal({.target_modules = {"q_proj"}, .modules_to_save = {"gate"}}),
              HasSubstr("modules_to_save matches model.layers.0.block_sparse_moe.gate"));
}

TEST(Experts, AreFrozenInHalfTheBytesBesideAdaptersOfAttention) {
  const CausalLmPtr model = made(small_model());
  const LoraConfig config{.r = 2, .target_modules = {"q_proj", "v_proj"}};
  EXPECT_EQ(add_lora(*model, config).size(), 4u);
  convert_frozen_weights(*model, at::kBFloat16);
  const auto parameters = model->named_parameters();
  EXPECT_EQ(parameters["model.layers.1.block_sparse_moe.experts.3.w2.weight"].scalar_type(),
            at::kBFloat16);
  const optim::Autocast autocast(nn::test_device(), at::kBFloat16);
  model->loss(some_ids(), some_ids()).backward();
  for (const auto& item : parameters)
    EXPECT_EQ(item.value().grad().defined(), item.key().find(".lora_") != item.key().npos)
        << item.key();
}

// ---------------------------------------------------------------- configurations

TEST(Experts, AreRefusedWhereATokenCannotGoToSoMany) {
  EXPECT_THAT(testing::message_of<UsageError>([] {
                parse_config(R"({"model_type": "mixtral", "num_local_experts": 2,
                                 "num_experts_per_tok": 3})",
                             "config.json");
              }),
              HasSubstr("num_experts_per_tok 3 with num_local_experts 2"));
  EXPECT_THAT(testing::message_of<UsageError>([] {
                parse_config(R"({"model_type": "mixtral", "router_jitter_noise": 1.5})",
                             "config.json");
              }),
              HasSubstr("config.router_jitter_noise must be from 0 to 1"));
  // The name that transformers has for it as well.
  EXPECT_EQ(parse_config(R"({"model_type": "mixtral", "num_experts": 4})", "config.json")
                .spec()
                .block.mlp.experts->count(),
            4);
}

}  // namespace
}  // namespace lockstep::models
