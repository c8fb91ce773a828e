// Device maps, and models that are split by one. On the CPU the stages are two parts of its memory,
// and the results have the bits of the whole model; with LOCKSTEP_DEVICE=cuda they are a GPU and
// the CPU.
#include "lockstep/models/device_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "lockstep/models/causal_lm.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const GptConfig kGpt{.n_layer = 4, .n_head = 2, .n_embd = 16, .vocab_size = 50, .n_positions = 12};
const LlamaConfig kPlacedLlama{.vocab_size = 50,
                               .hidden_size = 16,
                               .intermediate_size = 24,
                               .num_hidden_layers = 4,
                               .num_attention_heads = 4,
                               .num_key_value_heads = 2};

DeviceMap read(const std::string& yaml, const CausalLmConfig& config,
               const std::vector<std::string>& devices = {"cuda:0", "cuda:1"}) {
  return read_device_map(parse_yaml(yaml, "t.yaml").at("m"), config, devices);
}

std::vector<std::string> devices_in(const DeviceMap& map) {
  std::vector<std::string> all;
  for (const auto& part : map.parts) all.push_back(part.device);
  return all;
}

// ---------------------------------------------------------------- the map

TEST(DeviceMap, HasHuggingFacesNames) {
  const auto gpt =
      read("m: {'': 0, transformer.h.2: cuda:1, transformer.h.3: cpu}", {.model = kGpt});
  std::vector<std::string> names;
  for (const auto& part : gpt.parts) names.push_back(part.name);
  EXPECT_THAT(
      names, ElementsAre("transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1",
                         "transformer.h.2", "transformer.h.3", "transformer.ln_f", "lm_head"));
  EXPECT_THAT(devices_in(gpt), ElementsAre("cuda:0", "cuda:0", "cuda:0", "cuda:0", "cuda:1", "cpu",
                                           "cuda:0", "cuda:0"));
  EXPECT_THAT(gpt.devices(), ElementsAre("cuda:0", "cuda:1", "cpu"));
  // As transformers writes it, and blocks as a range.
  const auto llama = read(
      "m: {model.embed_tokens: 0, model.rotary_emb: 0, model.layers.0-2: 0, model.layers.3: 1,"
      " model.norm: 1, lm_head: cuda}",
      {.model = kPlacedLlama});
  EXPECT_EQ(llama.parts[0].name, "model.embed_tokens");
  EXPECT_EQ(llama.parts[5].name, "model.norm");
  EXPECT_THAT(devices_in(llama),
              ElementsAre("cuda:0", "cuda:0", "cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:0"));
  // The longest name decides, wherever it is written.
  EXPECT_THAT(
      devices_in(read("m: {model.layers.1: 1, model: 0, lm_head: 0}", {.model = kPlacedLlama})),
      ElementsAre("cuda:0", "cuda:0", "cuda:1", "cuda:0", "cuda:0", "cuda:0", "cuda:0"));
  // A tied head is where the embedding is, and need not be named.
  EXPECT_EQ(read("m: {transformer: cpu}", {.model = kGpt}).parts.back().device, "cpu");
}

TEST(DeviceMap, BalancesBytes) {
  LlamaConfig large = kPlacedLlama;
  large.num_hidden_layers = 8;
  for (const char* kind : {"m: auto", "m: balanced"}) {
    const auto map = read(kind, {.model = large}, {"cuda:0", "cuda:1"});
    EXPECT_THAT(devices_in(map),
                ElementsAre("cuda:0", "cuda:0", "cuda:0", "cuda:0", "cuda:0", "cuda:1", "cuda:1",
                            "cuda:1", "cuda:1", "cuda:1", "cuda:1"));
  }
  for (std::size_t devices = 1; devices < 8; ++devices) {
    std::vector<std::string> all;
    for (std::size_t i = 0; i < devices; ++i) all.push_back("cpu:" + std::to_string(i));
    for (const CausalLmConfig& config :
         {CausalLmConfig{.model = large}, CausalLmConfig{.model = kGpt}}) {
      const auto map = balanced_device_map(config, all);
      // Each device has one run of parts; the tied head comes back to the embedding.
      std::vector<std::string> runs;
      for (const auto& part : map.parts)
        if (runs.empty() || runs.back() != part.device) runs.push_back(part.device);
      if (config.tied()) {
        EXPECT_EQ(map.parts.back().device, map.parts.front().device);
        if (runs.size() > 1) runs.pop_back();
      }
      EXPECT_EQ(std::set<std::string>(runs.begin(), runs.end()).size(), runs.size());
      EXPECT_LE(runs.size(), devices);
    }
  }
  EXPECT_THAT(message_of([] { balanced_device_map({.model = kGpt}, {}); }),
              HasSubstr("names no device"));
}

TEST(DeviceMap, RefusesWhatIsNone) {
  const auto refused = [](const std::string& map, const CausalLmConfig& config) {
    return message_of([&] { read(map, config); });
  };
  EXPECT_THAT(refused("m: {model.layrs.0: 0}", {.model = kPlacedLlama}),
              HasSubstr("t.yaml:1:5: device_map: the model has no part 'model.layrs.0'. Did you "
                        "mean model.layers.0?"));
  EXPECT_THAT(refused("m: {'': 0, model.layers.2-4: 1}", {.model = kPlacedLlama}),
              HasSubstr("no part 'model.layers.4'"));
  EXPECT_THAT(refused("m: {'': 0, model.layers.3-2: 1}", {.model = kPlacedLlama}),
              HasSubstr("'model.layers.3-2' is not a range"));
  EXPECT_THAT(
      refused("m: {'': 0, model.layers.2: 0, model.layers.1-2: 1}", {.model = kPlacedLlama}),
      HasSubstr("device_map names model.layers.2 twice"));
  EXPECT_THAT(refused("m: {'': 0, model.layers.1.mlp: 1}", {.model = kPlacedLlama}),
              HasSubstr("model.layers.1.mlp is inside of model.layers.1, which stays whole"));
  EXPECT_THAT(refused("m: {model.embed_tokens: 0, model.norm: 0}", {.model = kPlacedLlama}),
              HasSubstr("no device for 5 of the model's 7 parts: model.layers.0, model.layers.1, "
                        "model.layers.2, ..."));
  EXPECT_THAT(refused("m: {'': disk}", {.model = kPlacedLlama}),
              HasSubstr("device_map. must be a device, and 'disk' is"));
  for (const char* device : {"cuda:x", "cuda:-1", "-1", "cpu:", "mps", "1.5", "128"})
    EXPECT_THAT(refused(std::string("m: {'': '") + device + "'}", {.model = kPlacedLlama}),
                HasSubstr("must be a device"))
        << device;
  EXPECT_THAT(refused("m: sequential", {.model = kPlacedLlama}),
              HasSubstr("device_map must be auto, balanced or a map of names to devices"));
  EXPECT_THAT(refused("m: {'': 0, lm_head: 1}", {.model = kGpt}),
              HasSubstr("lm_head is on cuda:1, and its weight is transformer.wte's, on cuda:0"));
  EXPECT_THAT(refused("m: {'': 0, transformer.wpe: 1}", {.model = kGpt}),
              HasSubstr("transformer.wpe is on cuda:1 and transformer.wte on cuda:0"));
}

// ---------------------------------------------------------------- models

bool on_gpu() {
  return nn::test_device().is_cuda();
}

// "first" and "second" in a map stand for the two devices of the test.
DeviceMap stages(std::string yaml, const CausalLmConfig& config) {
  const auto put = [&](const std::string& name, const std::string& device) {
    for (std::size_t at = yaml.find(name); at != yaml.npos; at = yaml.find(name, at))
      yaml.replace(at, name.size(), device);
  };
  put("first", on_gpu() ? "cuda:0" : "cpu:0");
  put("second", on_gpu() ? "cpu" : "cpu:1");
  return read("m: " + yaml, config);
}

void expect_equal(const at::Tensor& wanted, const at::Tensor& got, const std::string& what) {
  const bool same =
      on_gpu() ? torch::allclose(wanted, got.cpu(), 1e-3, 1e-5) : torch::equal(wanted, got);
  EXPECT_TRUE(same) << what;
}

// Copies between devices that backward will make, too.
int copies_in_graph(const at::Tensor& loss) {
  std::set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> pending{loss.grad_fn().get()};
  int copies = 0;
  while (!pending.empty()) {
    torch::autograd::Node* const node = pending.back();
    pending.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    copies += node->name() == "ToCopyBackward0";
    for (const auto& edge : node->next_edges()) pending.push_back(edge.function.get());
  }
  return copies;
}

struct Split {
  const char* name;
  CausalLmConfig config;
  const char* map;
  int copies;
};

std::vector<Split> splits() {
  GptConfig untied = kGpt;
  untied.tie_word_embeddings = false;
  LlamaConfig phi = kPlacedLlama;
  phi.fused_projections = true;
  phi.sliding_window = 5;  // a mask, which the stages share
  return {
      {"gpt2", {.model = kGpt}, "{'': first, transformer.h.2-3: second}", 2},
      {"gpt2 untied",
       {.model = untied},
       "{transformer: first, transformer.h.1: second, transformer.ln_f: second, lm_head: first}",
       4},
      {"gpt2 embeddings apart",
       {.model = kGpt},
       "{'': second, transformer.wte: first, transformer.wpe: first, lm_head: first}",
       2},
      {"llama",
       {.model = kPlacedLlama},
       "{model.embed_tokens: first, model.layers.0-1: first, model.layers.2-3: second, "
       "model.norm: second, lm_head: second}",
       1},
      {"phi3", {.model = phi}, "{'': first, model.layers.1: second, lm_head: second}", 3},
      {"one stage", {.model = kPlacedLlama}, "{'': first}", 0},
  };
}

CausalLmPtr model_of(const CausalLmConfig& config, int seed = 1) {
  torch::manual_seed(seed);
  return make_causal_lm(config);
}

at::Tensor placed_ids(std::int64_t time = 9) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  return at::randint(0, 50, {3, time}, generator, at::kLong);
}

TEST(Place, SplitModelsComputeWhatWholeOnesDo) {
  for (const Split& split : splits()) {
    for (const bool checkpointed : {false, true}) {
      const auto whole = model_of(split.config), parted = model_of(split.config);
      place(*parted, stages(split.map, split.config));
      if (checkpointed)
        for (const auto& model : {whole, parted}) model->run_blocks_with(lockstep::checkpoint);
      const auto ids = placed_ids(), targets = placed_ids().roll(-1, 1);
      const auto wanted = next_token_loss(whole->forward(ids), targets);
      const auto got = next_token_loss(parted->forward(ids), targets);
      expect_equal(wanted, got, split.name);
      if (!checkpointed) {
        EXPECT_EQ(copies_in_graph(got), split.copies) << split.name;
      }
      wanted.backward();
      got.backward();
      const auto parameters = whole->named_parameters(), same = parted->named_parameters();
      EXPECT_EQ(parameters.keys(), same.keys());
      for (const auto& item : parameters)
        expect_equal(item.value().grad(), same[item.key()].grad(), split.name + item.key());
    }
  }
}

TEST(Place, DropsTheSameWithGradientCheckpointing) {
  LlamaConfig config = kPlacedLlama;
  config.attention_dropout = 0.5;
  const auto loss_and_gradient = [&](bool checkpointed) {
    const auto model = model_of({.model = config});
    place(*model, stages("{'': first, model.layers.1-2: second}", {.model = config}));
    if (checkpointed) model->run_blocks_with(lockstep::checkpoint);
    torch::manual_seed(3);
    const auto loss = next_token_loss(model->forward(placed_ids()), placed_ids());
    loss.backward();
    return std::pair(loss, model->named_parameters()["model.layers.2.mlp.up_proj.weight"].grad());
  };
  const auto plain = loss_and_gradient(false), again = loss_and_gradient(true);
  EXPECT_TRUE(torch::equal(plain.first, again.first));
  EXPECT_TRUE(torch::equal(plain.second, again.second));
}

TEST(Place, GeneratesWithACache) {
  for (const Split& split : splits()) {
    const auto whole = model_of(split.config, 2), parted = model_of(split.config, 2);
    place(*parted, stages(split.map, split.config));
    const GenerateOptions options{.max_new_tokens = 8};
    EXPECT_EQ(generate(*parted, {1, 2, 3}, options), generate(*whole, {1, 2, 3}, options))
        << split.name;
  }
}

TEST(Place, AdaptersAreWhereTheirLayersAre) {
  const LoraConfig lora{.r = 4, .target_modules = {"q_proj", "down_proj"}};
  const CausalLmConfig config{.model = kPlacedLlama};
  const auto map = stages("{'': first, model.layers.2-3: second}", config);
  for (const bool before : {false, true}) {
    const auto whole = model_of(config), parted = model_of(config);
    if (!before) place(*parted, map);
    for (const auto& model : {whole, parted}) {
      torch::manual_seed(4);
      LoraConfig random = lora;
      random.init_lora_weights = LoraInit::kRandom;
      add_lora(*model, random);
    }
    if (before) place(*parted, map);
    for (const auto& item : parted->named_parameters()) {
      const bool second = item.key().find("layers.2") != std::string::npos ||
                          item.key().find("layers.3") != std::string::npos;
      EXPECT_EQ(item.value().device(), device_of(map.parts[second ? 3 : 0].device)) << item.key();
    }
    const auto wanted = next_token_loss(whole->forward(placed_ids()), placed_ids());
    const auto got = next_token_loss(parted->forward(placed_ids()), placed_ids());
    expect_equal(wanted, got, "loss");
    wanted.backward();
    got.backward();
    const auto parameters = whole->named_parameters(), same = parted->named_parameters();
    for (const auto& item : parameters)
      if (item.value().requires_grad())
        expect_equal(item.value().grad(), same[item.key()].grad(), item.key());
  }
}

TEST(Place, StaysWhereItIs) {
  const CausalLmConfig config{.model = kPlacedLlama};
  const auto map = stages("{'': first, model.layers.2-3: second}", config);
  const auto model = model_of(config);
  place(*model, map);
  model->to(nn::test_device());
  EXPECT_EQ(model->named_parameters()["model.layers.3.mlp.up_proj.weight"].device(),
            device_of(map.parts[4].device));
  model->to(c10::Device(c10::kCPU), torch::kDouble);
  EXPECT_EQ(model->named_parameters()["model.embed_tokens.weight"].device(),
            device_of(map.parts[0].device));
  EXPECT_EQ(model->forward(placed_ids()).scalar_type(), torch::kDouble);
  // Another map replaces the first.
  model->to(torch::kFloat);
  place(*model, stages("{'': first}", config));
  const auto loss = next_token_loss(model->forward(placed_ids()), placed_ids());
  EXPECT_EQ(copies_in_graph(loss), 0);
}

TEST(Place, RefusesAnotherModelsMap) {
  const auto model = model_of({.model = kPlacedLlama});
  LlamaConfig smaller = kPlacedLlama;
  smaller.num_hidden_layers = 3;
  const auto fewer = balanced_device_map({.model = smaller}, {"cpu"});
  EXPECT_THAT(message_of([&] { place(*model, fewer); }),
              HasSubstr("the device map has 3 blocks, and the model 4"));
  const auto other = balanced_device_map({.model = kGpt}, {"cpu"});
  EXPECT_THAT(message_of([&] { place(*model, other); }),
              HasSubstr("names transformer.wte, which the model does not have"));
  const auto far = balanced_device_map({.model = kPlacedLlama}, {"cuda:99"});
  EXPECT_THAT(message_of([&] { place(*model, far); }),
              HasSubstr("the device map names cuda:99, and this process sees"));
}

}  // namespace
}  // namespace lockstep::models
