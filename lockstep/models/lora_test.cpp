// Adapters on the bundled models. That they compute, read and write what PEFT does is checked in
// tests/lora.
#include "lockstep/models/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <mutex>
#include <set>
#include <stdexcept>

#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/problems.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/tensor_group.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::models {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const GptConfig kAdapted{
    .n_layer = 2, .n_head = 2, .n_embd = 16, .vocab_size = 50, .n_positions = 12};
const LoraConfig kBasic{.r = 4, .lora_alpha = 8, .target_modules = {"c_attn", "mlp.c_proj"}};

at::Tensor adapted_ids() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  return at::randint(0, 50, {3, 12}, generator, at::kLong);
}

Gpt small_gpt(int seed = 1) {
  torch::manual_seed(seed);
  return Gpt(kAdapted);
}

// Adapters that change the output.
Gpt adapted_gpt(LoraConfig config = kBasic) {
  Gpt gpt = small_gpt();
  config.init_lora_weights = LoraInit::kRandom;
  add_lora(*gpt, config);
  return gpt;
}

std::set<std::string> trained_names(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters())
    if (item.value().requires_grad()) names.insert(item.key());
  return names;
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// ---------------------------------------------------------------- layers

TEST(Linear, ComputesInBothLayouts) {
  torch::manual_seed(3);
  Linear plain(LinearOptions(6, 4));
  Linear turned(LinearOptions(6, 4).layout(WeightLayout::kInOut));
  {
    const torch::NoGradGuard no_grad;
    plain->bias.normal_();
    turned->weight.copy_(plain->weight.t());
    turned->bias.copy_(plain->bias);
  }
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{6}, {5, 6}, {2, 3, 6}, {0, 6}}) {
    const at::Tensor x = torch::randn(shape);
    EXPECT_TRUE(torch::allclose(plain(x), turned(x), 1e-5, 1e-6));
    EXPECT_EQ(turned(x).sizes(), plain(x).sizes());
  }
  EXPECT_EQ(Linear(LinearOptions(6, 4).bias(false))->named_parameters().size(), 1u);
  EXPECT_EQ(Linear(LinearOptions(6, 4).deviation(0))->weight.abs().sum().item<double>(), 0);
  EXPECT_THAT(message_of([] { Linear bad(LinearOptions(0, 4)); }),
              HasSubstr("[linear] a layer of 0 inputs and 4 outputs"));
}

TEST(Linear, AddsWhatTheAdapterComputes) {
  for (const WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
    torch::manual_seed(3);
    Linear linear(LinearOptions(6, 4).layout(layout));
    const at::Tensor x = torch::randn({2, 5, 6});
    const at::Tensor base = linear(x);
    linear->attach_lora({.r = 3, .scaling = 0.5});
    const at::Tensor sum = base + 0.5 * torch::linear(torch::linear(x, linear->lora_A->weight),
                                                      linear->lora_B->weight);
    EXPECT_LT(distance(linear(x), sum), 1e-6);
    EXPECT_EQ(linear(torch::randn({0, 6})).sizes(), (at::IntArrayRef{0, 4}));
  }
}

TEST(Linear, DropsInputsOfTheAdapterWhileItTrains) {
  torch::manual_seed(3);
  Linear linear(LinearOptions(64, 4));
  linear->attach_lora({.r = 3, .scaling = 1, .dropout = 0.5});
  const at::Tensor x = torch::randn({5, 64});
  EXPECT_GT(distance(linear(x), linear(x)), 0);
  linear->eval();
  EXPECT_EQ(distance(linear(x), linear(x)), 0);
}

// One rank of several, alone: the layer sends nothing itself.
class LoneRank final : public nn::TensorGroup {
 public:
  LoneRank(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void sum(const at::Tensor&) override { refuse(); }
  void max(const at::Tensor&) override { refuse(); }
  void all_gather(const at::Tensor&, const at::Tensor&) override { refuse(); }
  void reduce_scatter(const at::Tensor&, const at::Tensor&) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw std::logic_error("a collective of one rank"); }
  int rank_, size_;
};

// A layer without a bias, in double, whose base is frozen. With a group: its slice by inputs.
Linear row_cut(WeightLayout layout, const nn::TensorGroupPtr& group) {
  constexpr std::int64_t kIn = 8;  // which three ranks divide unequally
  torch::manual_seed(3);
  Linear linear(LinearOptions(kIn, 4).layout(layout).bias(false).tensors(at::kDouble));
  linear->weight.set_requires_grad(false).normal_();
  linear->attach_lora({.r = 3, .scaling = 2, .dropout = 0.5});
  const torch::NoGradGuard no_grad;
  linear->lora_A->weight.normal_();
  linear->lora_B->weight.normal_();
  if (!group) return linear;
  const nn::Range mine = group->range(kIn);
  const auto cut = [&](at::Tensor& whole, std::int64_t dimension) {
    whole.set_data(whole.detach().narrow(dimension, mine.begin, mine.length).contiguous());
  };
  cut(linear->weight, layout == WeightLayout::kOutIn ? 1 : 0);
  cut(linear->lora_A->weight, 1);
  return linear;
}

// Ranks draw the mask of the whole input, so that their results add up to those of one process with
// the same seed, by lockstep::nn as by ATen's operations. In double: sums of 8 products and over
// ranks, in another order.
TEST(Linear, ASliceByInputsDropsWhatTheWholeDoes) {
  constexpr double kSums = 1e-13;
  const at::Tensor x = torch::randn({2, 5, 8}, at::kDouble),
                   g = torch::randn({2, 5, 4}, at::kDouble);
  const auto leaf = [](const at::Tensor& t) { return t.clone().set_requires_grad(true); };
  for (const WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
    const Linear one = row_cut(layout, {});
    const at::Tensor x1 = leaf(x);
    torch::manual_seed(4);
    const at::Tensor y1 = Linear(one)->forward(x1);
    (y1 * g).sum().backward();
    for (const bool fused : {false, true})
      for (const int ranks : {2, 3}) {
        at::Tensor y = torch::zeros_like(y1), b = torch::zeros_like(one->lora_B->weight);
        for (int rank = 0; rank < ranks; ++rank) {
          const nn::TensorGroupPtr group = c10::make_intrusive<LoneRank>(rank, ranks);
          Linear part = row_cut(layout, group);
          const nn::Range mine = group->range(8);
          const at::Tensor in = leaf(x.narrow(2, mine.begin, mine.length));
          torch::manual_seed(4);
          const at::Tensor own =
              fused ? part->forward_fused(in, false, group) : part->forward(in, false, group);
          (own * g).sum().backward();
          y = y + own.detach();
          b += part->lora_B->weight.grad() / ranks;  // the average over ranks
          EXPECT_EQ(group->take_partial().size(), 1u);
          EXPECT_LT(distance(in.grad(), x1.grad().narrow(2, mine.begin, mine.length)), kSums);
          EXPECT_LT(distance(part->lora_A->weight.grad(),
                             one->lora_A->weight.grad().narrow(1, mine.begin, mine.length)),
                    kSums);
        }
        EXPECT_LT(distance(y, y1.detach()), kSums) << ranks << (fused ? " fused" : "");
        EXPECT_LT(distance(b, one->lora_B->weight.grad()), kSums) << ranks;
      }
  }
}

TEST(Linear, TrainsAFloatAdapterBesideAWeightInHalfThePrecision) {
  torch::manual_seed(3);
  Linear linear(LinearOptions(16, 8));
  linear->to(at::kBFloat16);
  linear->attach_lora({.r = 3, .scaling = 2});
  EXPECT_EQ(linear->lora_A->weight.scalar_type(), at::kFloat);
  const at::Tensor x = torch::randn({5, 16}).to(at::kBFloat16);
  const at::Tensor y = linear(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  const at::Tensor exact =
      torch::linear(x.to(at::kFloat), linear->weight.to(at::kFloat)) +
      2 * torch::linear(torch::linear(x.to(at::kFloat), linear->lora_A->weight),
                        linear->lora_B->weight);
  EXPECT_LT(distance(y.to(at::kFloat), exact), 0.05);
  y.sum().backward();
  EXPECT_EQ(linear->lora_B->weight.grad().scalar_type(), at::kFloat);
}

// ---------------------------------------------------------------- which layers

TEST(Lora, HasPeftsNamesAndStartsAsTheBase) {
  Gpt gpt = small_gpt();
  const at::Tensor before = gpt(adapted_ids());
  EXPECT_THAT(add_lora(*gpt, kBasic),
              ElementsAre("transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_proj",
                          "transformer.h.1.attn.c_attn", "transformer.h.1.mlp.c_proj"));
  EXPECT_EQ(distance(gpt(adapted_ids()), before), 0);
  const auto parameters = gpt->named_parameters();
  EXPECT_EQ(parameters["transformer.h.0.attn.c_attn.lora_A.weight"].sizes(),
            (at::IntArrayRef{4, 16}));
  EXPECT_EQ(parameters["transformer.h.0.attn.c_attn.lora_B.weight"].sizes(),
            (at::IntArrayRef{48, 4}));
  EXPECT_EQ(parameters["transformer.h.1.mlp.c_proj.lora_A.weight"].sizes(),
            (at::IntArrayRef{4, 64}));
  const double bound = 1 / std::sqrt(16.0);  // kaiming_uniform with a = sqrt(5)
  const auto a = parameters["transformer.h.0.attn.c_attn.lora_A.weight"].abs().max().item<double>();
  EXPECT_LE(a, bound);
  EXPECT_GT(a, bound / 2);
  const std::set<std::string> trained = trained_names(*gpt);
  EXPECT_EQ(trained.size(), 8u);
  for (const std::string& name : trained) EXPECT_THAT(name, HasSubstr(".lora_"));
}

std::vector<std::string> chosen(const LoraConfig& config) {
  return LoraTargets(config).select(linear_layers(FamilyConfig(kAdapted).spec()));
}

TEST(Lora, ScalesByRankAndPattern) {
  const LoraTargets targets({.r = 8,
                             .lora_alpha = 16,
                             .target_modules = "all-linear",
                             .rank_pattern = {{"mlp.c_proj", 4}, {R"(.*\.0\.attn\..*)", 2}},
                             .alpha_pattern = {{"c_fc", 4}}});
  EXPECT_EQ(targets.rank("transformer.h.0.mlp.c_proj"), 4);
  EXPECT_EQ(targets.rank("transformer.h.0.attn.c_proj"), 2);
  EXPECT_EQ(targets.rank("transformer.h.1.attn.c_proj"), 8);
  EXPECT_EQ(targets.scaling("transformer.h.0.mlp.c_proj"), 4);
  EXPECT_EQ(targets.scaling("transformer.h.1.mlp.c_fc"), 0.5);
  const LoraTargets stable({.r = 16, .lora_alpha = 8, .use_rslora = true});
  EXPECT_EQ(stable.scaling("x"), 2);
}

TEST(Lora, ChoosesLayersAsPeftDoes) {
  EXPECT_EQ(chosen({.target_modules = "all-linear"}).size(), 8u);
  EXPECT_THAT(chosen({.target_modules = R"(.*\.1\.attn\.c_(attn|proj))"}),
              ElementsAre("transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_proj"));
  EXPECT_THAT(chosen({.target_modules = {"c_proj"}, .exclude_modules = {"mlp.c_proj"}}),
              ElementsAre("transformer.h.0.attn.c_proj", "transformer.h.1.attn.c_proj"));
  EXPECT_THAT(chosen({.target_modules = {"c_proj"}, .exclude_modules = R"(.*\.0\..*)"}).size(), 2u);
  EXPECT_THAT(chosen({.target_modules = {"c_attn"}, .layers_to_transform = {1}}),
              ElementsAre("transformer.h.1.attn.c_attn"));
  EXPECT_THAT(
      chosen({.target_modules = {"c_attn"}, .layers_to_transform = {0}, .layers_pattern = {"h"}}),
      ElementsAre("transformer.h.0.attn.c_attn"));
  EXPECT_THAT(chosen({.target_modules = {"transformer.h.0.mlp.c_fc", "attn.c_attn"}}).size(), 3u);
  EXPECT_FALSE(LoraTargets({.target_modules = "all-linear"}).matches("lm_head"));
  EXPECT_TRUE(LoraTargets({.target_modules = {"lm_head"}}).matches("lm_head"));
}

TEST(Lora, CountsTheBytesOfItsFile) {
  for (const LoraBias bias : {LoraBias::kNone, LoraBias::kAll, LoraBias::kLoraOnly}) {
    LoraConfig config = kBasic;
    config.bias = bias;
    config.modules_to_save = {"wpe"};
    Gpt gpt = small_gpt();
    add_lora(*gpt, config);
    std::uint64_t bytes = 0;
    for (const auto& [name, tensor] : lora_tensors(*gpt, config)) bytes += tensor.nbytes();
    EXPECT_EQ(adapter_bytes(config, FamilyConfig(kAdapted).spec()), bytes);
  }
}

TEST(Lora, SaysWhatItCannotDo) {
  Gpt gpt = small_gpt();
  const auto adding = [&](const LoraConfig& config) {
    return message_of([&] { add_lora(*gpt, config); });
  };
  EXPECT_THAT(adding({.target_modules = {"q_proj", "v_proj"}}),
              AllOf(HasSubstr("[lora] target_modules [\"q_proj\",\"v_proj\"] matches no linear"),
                    HasSubstr("transformer.h.*.attn.c_attn, transformer.h.*.attn.c_proj")));
  EXPECT_THAT(adding({}), HasSubstr("target_modules is not set"));
  EXPECT_THAT(adding({.target_modules = {"c_attn", "wte"}}),
              HasSubstr("matches transformer.wte, which is not a linear layer"));
  EXPECT_THAT(adding({.target_modules = "(?P<x>c_attn)"}),
              HasSubstr("target_modules: '(?P<x>c_attn)' is not a regular expression"));
  EXPECT_THAT(adding({.r = 0, .target_modules = {"c_attn"}}), HasSubstr("r is 0"));
  EXPECT_THAT(adding({.lora_dropout = 1, .target_modules = {"c_attn"}}),
              HasSubstr("lora_dropout 1 must be"));
  EXPECT_THAT(adding({.target_modules = {"c_attn"}, .modules_to_save = {"score"}}),
              HasSubstr("modules_to_save names 'score'"));
  EXPECT_THAT(adding({.target_modules = {"c_attn"}, .modules_to_save = {"wte"}}),
              HasSubstr("modules_to_save names transformer.wte, whose weight is the output"));
  EXPECT_THAT(adding({.target_modules = ".*c_attn", .layers_to_transform = {1}}),
              HasSubstr("layers_to_transform is for target_modules by name"));
  EXPECT_TRUE(trained_names(*gpt).contains("transformer.wte.weight"));  // nothing has changed yet
  add_lora(*gpt, kBasic);
  EXPECT_THAT(adding(kBasic), HasSubstr("transformer.h.0.attn.c_attn has an adapter already"));
  EXPECT_THAT(message_of([&] { save_adapter(*small_gpt(), kBasic, "nowhere"); }),
              HasSubstr("no adapter to save"));
}

// ---------------------------------------------------------------- merging

TEST(Lora, MergesAndRestoresTheBaseToTheBit) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    Gpt gpt = adapted_gpt();
    convert_frozen_weights(*gpt, type);
    gpt->eval();
    std::map<std::string, at::Tensor> before;
    for (const auto& item : gpt->named_parameters())
      before[item.key()] = item.value().detach().clone();
    const at::Tensor plain = gpt(adapted_ids());
    merge_lora(*gpt);
    merge_lora(*gpt);  // once
    EXPECT_LT(distance(gpt(adapted_ids()), plain), type == at::kFloat ? 1e-6 : 0.02);
    EXPECT_FALSE(torch::equal(gpt->named_parameters()["transformer.h.0.attn.c_attn.weight"],
                              before["transformer.h.0.attn.c_attn.weight"]));
    unmerge_lora(*gpt);
    for (const auto& item : gpt->named_parameters())
      EXPECT_TRUE(torch::equal(item.value(), before[item.key()])) << item.key();
    EXPECT_TRUE(torch::equal(gpt(adapted_ids()), plain));
  }
}

TEST(Lora, LeavesABaseIn4BitsAsItIs) {
  torch::manual_seed(1);
  const CausalLmPtr model = make_causal_lm(CausalLmConfig{.model = kAdapted}, {.nf4 = true});
  LoraConfig saving = kBasic;
  saving.modules_to_save = {"mlp.c_fc"};
  EXPECT_THAT(message_of([&] { add_lora(*model, saving); }),
              HasSubstr("modules_to_save names transformer.h.0.mlp.c_fc, whose weight is stored in "
                        "4 bits"));
  add_lora(*model, kBasic);
  const auto parameters = model->named_parameters();
  const at::Tensor& weight = parameters["transformer.h.0.attn.c_attn.weight"];
  EXPECT_EQ(weight.scalar_type(), at::kByte);
  const at::Tensor before = weight.clone();
  convert_frozen_weights(*model, at::kBFloat16);
  model->to(at::kDouble);
  model->to(at::kCPU, at::kFloat);
  EXPECT_TRUE(torch::equal(weight, before));
  EXPECT_EQ(parameters["transformer.wte.weight"].scalar_type(), at::kFloat);  // and the head
  EXPECT_THAT(message_of([&] { merge_lora(*model); }),
              HasSubstr("[lora] an adapter is not merged into a weight in 4 bits"));
  EXPECT_THAT(message_of([&] { save_pretrained(*model, "nowhere"); }),
              HasSubstr("attn.c_attn.weight' is stored in 4 bits, and is not saved as a model"));
}

TEST(Lora, UnloadsToAPlainModel) {
  Gpt gpt = adapted_gpt();
  const at::Tensor adapted = gpt(adapted_ids());
  unload_lora(*gpt);
  EXPECT_LT(distance(gpt(adapted_ids()), adapted), 1e-6);
  EXPECT_EQ(gpt->named_parameters().keys(), small_gpt()->named_parameters().keys());
  EXPECT_EQ(add_lora(*gpt, kBasic).size(), 4u);
}

// ---------------------------------------------------------------- training

TEST(Lora, HoldsTheBaseInHalfTheMemoryWithTheSameBits) {
  std::vector<at::Tensor> losses, gradients;
  for (const bool half : {false, true}) {
    Gpt gpt = adapted_gpt();
    if (half) convert_frozen_weights(*gpt, at::kBFloat16);
    at::Tensor loss;
    {
      const optim::Autocast autocast(at::kCPU, at::kBFloat16);
      loss = next_token_loss(gpt(adapted_ids()), adapted_ids());
    }
    loss.backward();
    losses.push_back(loss);
    gradients.push_back(
        gpt->named_parameters()["transformer.h.0.attn.c_attn.lora_A.weight"].grad());
  }
  EXPECT_TRUE(torch::equal(losses[0], losses[1]));
  EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
}

TEST(Lora, LearnsThroughCheckpointedBlocks) {
  Gpt plain = adapted_gpt(), again = adapted_gpt();
  again->run_blocks_with(lockstep::checkpoint);
  for (Gpt gpt : {plain, again})
    next_token_loss(gpt->forward(adapted_ids()), adapted_ids()).backward();
  for (const auto& item : plain->named_parameters()) {
    const at::Tensor other = again->named_parameters()[item.key()].grad();
    EXPECT_EQ(item.value().grad().defined(), item.value().requires_grad());
    if (!item.value().requires_grad()) continue;
    EXPECT_TRUE(torch::equal(item.value().grad(), other));
  }
}

std::mutex lora_build_mutex;  // modules draw from one global generator

TEST(Lora, SynchronisesAdaptersAlone) {
  lockstep::testing::run_threads(2, [](World& world) {
    Gpt gpt{nullptr};
    {
      const std::lock_guard<std::mutex> lock(lora_build_mutex);
      gpt = adapted_gpt();
    }
    std::int64_t trained = 0;
    for (const auto& parameter : gpt->parameters())
      if (parameter.requires_grad()) trained += static_cast<std::int64_t>(parameter.nbytes());
    DistributedDataParallel model{gpt, world};
    optim::AdamW optimizer{model.parameters(), {.lr = 0.1}};
    const at::Tensor base =
        gpt->named_parameters()["transformer.h.0.attn.c_attn.weight"].detach().clone();
    for (int step = 0; step < 3; ++step) {
      const at::Tensor ids = (adapted_ids() + world.rank()).remainder(50);
      next_token_loss(model(ids), ids).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    std::int64_t sent = 0;
    for (const BucketTiming& bucket : model.last_timing().buckets) sent += bucket.bytes;
    EXPECT_EQ(sent, trained);
    model.verify_replicas();
    EXPECT_TRUE(torch::equal(gpt->named_parameters()["transformer.h.0.attn.c_attn.weight"], base));
    optimizer.name_parameters(gpt->named_parameters().pairs());
    const auto state = optimizer.state_dict();
    for (const auto& [name, tensor] : state) EXPECT_THAT(name, HasSubstr(".lora_"));
    EXPECT_GE(state.size(), 16u);  // two moments of eight matrices
  });
}

// ---------------------------------------------------------------- files

TEST(Lora, WritesAndReadsAnAdapter) {
  const io::TemporaryDirectory temporary;
  const std::string folder = temporary.path() + "/adapter";
  LoraConfig config = kBasic;
  config.rank_pattern = {{"c_proj", 2}};
  config.bias = LoraBias::kLoraOnly;
  config.lora_dropout = 0.25;
  Gpt gpt = adapted_gpt(config);
  gpt->eval();
  {
    const torch::NoGradGuard no_grad;
    gpt->named_parameters()["transformer.h.1.mlp.c_proj.bias"].fill_(0.5);
  }
  save_adapter(*gpt, config, folder);
  save_adapter(*gpt, config, folder);  // takes the place of the first
  Gpt other = small_gpt();
  const LoraConfig read = load_adapter(*other, folder);
  EXPECT_EQ(read.lora_dropout, 0.25);
  EXPECT_EQ(read.rank_pattern, config.rank_pattern);
  EXPECT_EQ(read.target_modules.suffixes, config.target_modules.suffixes);
  other->eval();
  EXPECT_TRUE(torch::equal(other(adapted_ids()), gpt(adapted_ids())));
  load_adapter(*other, folder);  // over those that are there
  std::ofstream(folder + "/tokenizer.json") << "{}";
  EXPECT_THAT(message_of([&] { save_adapter(*gpt, config, folder); }), HasSubstr("adapter"));

  Gpt larger{GptConfig{.n_layer = 2, .n_head = 2, .n_embd = 32, .vocab_size = 50}};
  EXPECT_THAT(message_of([&] { load_adapter(*larger, folder); }),
              HasSubstr("The adapter belongs to another model"));
  Gpt deeper{GptConfig{.n_layer = 3, .n_head = 2, .n_embd = 16, .vocab_size = 50}};
  EXPECT_THAT(message_of([&] { load_adapter(*deeper, folder); }),
              HasSubstr("6 of its tensors are missing"));
  EXPECT_THAT(message_of([&] { load_adapter(*gpt, temporary.path()); }),
              HasSubstr("is not a folder with an adapter"));
}

TEST(LoraConfig, RefusesByName) {
  const auto reading = [](const std::string& fields) {
    return message_of([&] {
      parse_adapter_config(R"({"peft_type": "LORA", "target_modules": ["a"], )" + fields + "}",
                           "a.json");
    });
  };
  EXPECT_THAT(reading(R"("use_dora": true)"),
              HasSubstr("a.json:1:48: adapter_config.use_dora is not supported"));
  EXPECT_THAT(reading(R"("lora_bias": true)"), HasSubstr("adapter_config.lora_bias"));
  EXPECT_THAT(reading(R"("init_lora_weights": "pissa")"), HasSubstr("init_lora_weights"));
  EXPECT_THAT(reading(R"("trainable_token_indices": [1])"), HasSubstr("trainable_token_indices"));
  EXPECT_THAT(reading(R"("bias": "some")"), HasSubstr("none, all or lora_only"));
  EXPECT_THAT(reading(R"("a_field_of_tomorrow": 3)"), HasSubstr("a_field_of_tomorrow"));
  EXPECT_EQ(reading(R"("use_dora": false, "eva_config": null, "loftq_config": {}, )"
                    R"("peft_version": "0.21.2", "megatron_core": "megatron.core")"),
            "(nothing thrown)");
  EXPECT_THAT(message_of([] { parse_adapter_config(R"({"peft_type": "IA3"})", "a.json"); }),
              HasSubstr("peft_type is IA3, and only LORA"));
  Problems problems;
  read_lora_config(parse_yaml("{rank: 3, lora_alfa: 3, r: many, alpha: 3, dropout: 0}", "t.yaml"),
                   "lora", problems);
  ASSERT_EQ(problems.size(), 5u);  // all of them at once
  EXPECT_THAT(problems.texts()[0],
              HasSubstr("t.yaml:1:2: lora.rank is not supported. Did you mean r?"));
  EXPECT_THAT(problems.texts()[1], HasSubstr("Did you mean lora_alpha?"));
  EXPECT_THAT(problems.texts()[2], HasSubstr("lora.r"));
  EXPECT_THAT(problems.texts()[3], HasSubstr("Did you mean lora_alpha?"));
  EXPECT_THAT(problems.texts()[4], HasSubstr("Did you mean lora_dropout?"));
}

TEST(LoraConfig, SurvivesItsFile) {
  const LoraConfig config{.r = 3,
                          .lora_alpha = 1.5,
                          .lora_dropout = 0.1,
                          .target_modules = R"(.*\.q"_proj)",
                          .exclude_modules = {"x", "y"},
                          .rank_pattern = {{"b", 2}, {"a", 1}},
                          .alpha_pattern = {{"c", 0.25}},
                          .bias = LoraBias::kAll,
                          .use_rslora = true,
                          .init_lora_weights = LoraInit::kGaussian,
                          .modules_to_save = {"norm"},
                          .base_model_name_or_path = "somewhere"};
  const std::string text = adapter_config_text(config, true);
  const LoraConfig read = parse_adapter_config(text, "a.json");
  EXPECT_EQ(adapter_config_text(read, true), text);
  EXPECT_THAT(text, AllOf(HasSubstr(R"("fan_in_fan_out":true)"), HasSubstr(R"("r":3)")));
  EXPECT_EQ(read.target_modules.regex, config.target_modules.regex);
}

}  // namespace
}  // namespace lockstep::models
