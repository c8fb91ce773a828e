// TensorParallel: every family computes what one process does, with slices that are cut by heads;
// and what a user would get wrong. Losses, norms and states are in tensor_mesh_test.cpp and
// tests/conformance/parallelism_test.cpp, the Trainer's side in tests/train/tensor_test.py.
#include "lockstep/parallel/tensor_parallel.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world_impl.h"
#include "lockstep/core/error.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/device_map.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/nn/tensor_group.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/language_model_for_test.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using models::CausalLm;
using models::CausalLmConfig;
using models::CausalLmPtr;
using ::testing::AllOf;
using testing::flat;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;

// ---------------------------------------------------------------- families

// Two layers; a vocabulary and a perceptron that ranks divide unequally. Norms and biases are not
// what they begin with, or a wrong one would not show.
struct Sample {
  std::string name;
  std::string json;
};
const std::vector<Sample>& samples() {
  const auto like_llama = [](const std::string& type, const std::string& more) {
    return fmt::format(
        R"({{"model_type": "{}", "vocab_size": 37, "hidden_size": 32, "intermediate_size": 45,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 16, {}}})",
        type, more);
  };
  static const std::vector<Sample> all{
      {"gpt2", R"({"model_type": "gpt2", "vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4,
                   "n_inner": 45, "n_positions": 16, "embd_pdrop": 0, "resid_pdrop": 0,
                   "attn_pdrop": 0})"},
      {"llama", like_llama("llama", R"("tie_word_embeddings": false)")},
      {"llama_with_biases", like_llama("llama", R"("tie_word_embeddings": true,
                             "attention_bias": true, "mlp_bias": true)")},
      {"phi3", like_llama("phi3", R"("pad_token_id": 5, "resid_pdrop": 0)")},
      {"qwen2", like_llama("qwen2", R"("tie_word_embeddings": true)")},
      {"qwen3", like_llama("qwen3", R"("head_dim": 8, "tie_word_embeddings": false)")},
      {"mistral", like_llama("mistral", R"("sliding_window": 4)")},
      {"gemma2", like_llama("gemma2", R"("head_dim": 8, "query_pre_attn_scalar": 8,
                             "sliding_window": 4)")},
      {"starcoder2", like_llama("starcoder2", R"("residual_dropout": 0, "embedding_dropout": 0)")},
      {"mixtral", like_llama("mixtral", R"("num_local_experts": 3, "num_experts_per_tok": 2,
                              "output_router_logits": true, "router_aux_loss_coef": 0.3)")}};
  return all;
}

CausalLmConfig config_of(const std::string& name) {
  for (const Sample& sample : samples())
    if (sample.name == name) return models::parse_config(sample.json, name);
  throw std::logic_error(name);
}

// The same weights on every thread, from a generator of its own.
CausalLmPtr make(const CausalLmConfig& config, std::uint64_t seed = 1) {
  const auto model = models::make_causal_lm(config, {.draw = false});
  const torch::NoGradGuard no_grad;
  auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (const auto& item : model->named_parameters()) {
    const at::Tensor noise = at::randn(item.value().sizes(), random) * 0.2;
    const bool is_norm =
        item.key().find("norm") != std::string::npos || item.key().find("ln_") != std::string::npos;
    item.value().copy_(is_norm && item.key().ends_with("weight") ? noise + 1 : noise);
  }
  return model;
}

struct Batch {
  at::Tensor ids, targets;
};
Batch shorter(const Batch& batch, std::int64_t time) {
  return {batch.ids.slice(1, 0, time).contiguous(), batch.targets.slice(1, 0, time).contiguous()};
}
Batch batch_of(int number, std::int64_t vocabulary = 37) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(50 + number));
  const at::Tensor all = at::randint(vocabulary, {3, 9}, random, at::kLong);
  Batch batch{all.slice(1, 0, 8).contiguous(), all.slice(1, 1, 9).contiguous()};
  batch.targets[0][number % 8] = -100;
  return batch;
}

Mesh tensor_mesh(World& world) {
  return Mesh(world, {{"tensor", -1}});
}

// A model and how it is trained.
struct Trained {
  Trained(CausalLmPtr model, std::shared_ptr<Parallelism> how, const optim::Rule& rule)
      : net(std::move(model)),
        parallelism(std::move(how)),
        optimizer(parallelism->make_optimizer({{net->parameters(), rule}})) {}

  void backward(const Batch& batch, bool last = true) {
    parallelism->before_forward();
    const at::Tensor loss_now = parallelism->watch(net->loss(batch.ids, batch.targets));
    loss = loss_now.item<double>();
    parallelism->backward(loss_now, last);
  }
  optim::StepResult step(const Batch& batch, const optim::StepOptions& options = {}) {
    backward(batch);
    const optim::StepResult result = optimizer->step(options);
    optimizer->zero_grad();
    return result;
  }
  at::Tensor weights() {
    const std::shared_ptr<void> whole = parallelism->gathered();
    return flat(*net).clone();
  }

  CausalLmPtr net;
  std::shared_ptr<Parallelism> parallelism;
  std::unique_ptr<optim::Optimizer> optimizer;
  double loss = 0;
};

using Change = std::function<void(CausalLm&)>;

Trained sliced(const CausalLmConfig& config, const Mesh& mesh, const optim::Rule& rule,
               const Change& change = {}) {
  auto net = make(config, 1 + static_cast<std::uint64_t>(mesh.world().rank()));
  if (change) change(*net);
  auto how = std::make_shared<TensorParallel>(*net, mesh);
  return {net, how, rule};
}

Trained whole(const CausalLmConfig& config, const optim::Rule& rule, const Change& change = {}) {
  auto net = make(config);
  if (change) change(*net);
  auto how = std::make_shared<DataParallel>(*net, Mesh());
  return {net, how, rule};
}

// Sums of at most 64 products, in another order, are wrong by 64 * 2^-24 of their terms at most;
// three layers and the loss are such sums one after the other, and a weight's gradient is one over
// the 24 tokens. The terms are below 8 here.
constexpr double kSums = 4 * 64 * 8 / 16777216.0;

using Case = std::tuple<int, std::string, bool, bool>;
class Families : public ::testing::TestWithParam<Case> {};

// A step of SGD with a rate of 1 changes the weights by their gradients.
TEST_P(Families, ComputeWhatOneProcessDoes) {
  const auto& [ranks, name, fused, sequence] = GetParam();
  const CausalLmConfig config = config_of(name);
  run_threads(ranks, [&, fused = fused, sequence = sequence](World& world) {
    const Change path = [&](CausalLm& model) {
      model.use_fused(fused);
      model.use_sequence_parallel(sequence);
    };
    const Batch batch = sequence ? shorter(batch_of(0), 7) : batch_of(0);  // unequal parts
    const optim::SGDOptions sgd{.lr = 1};
    Trained one = whole(config, sgd, path), run = sliced(config, tensor_mesh(world), sgd, path);
    EXPECT_LT(flat(*run.net).numel(), flat(*one.net).numel());
    one.step(batch);
    run.step(batch);
    EXPECT_NEAR(run.loss, one.loss, kSums);
    EXPECT_TENSOR_NEAR(run.weights(), one.weights(), kSums);
    EXPECT_GT((one.weights() - flat(*make(config))).abs().max().item<double>(), 0.01);
    run.parallelism->verify_parameters();
    run.parallelism->verify_buffers();
  });
}

std::string show(const ::testing::TestParamInfo<Case>& info) {
  const auto& [ranks, name, fused, sequence] = info.param;
  return fmt::format("{}_on_{}{}{}", name, ranks, fused ? "_fused" : "",
                     sequence ? "_sequence" : "");
}

std::vector<std::string> sample_names() {
  std::vector<std::string> names;
  for (const Sample& sample : samples()) names.push_back(sample.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, Families,
                         ::testing::Combine(::testing::Values(2, 4),
                                            ::testing::ValuesIn(sample_names()), ::testing::Bool(),
                                            ::testing::Bool()),
                         show);

class Adapters : public ::testing::TestWithParam<Case> {};

// Adapters of layers that are cut by outputs, by inputs and of the head; both factors of each have
// a gradient. What is not trained stays as it is.
TEST_P(Adapters, ComputeWhatOneProcessDoes) {
  const auto& [ranks, name, fused, sequence] = GetParam();
  const CausalLmConfig config = config_of(name);
  const models::LoraConfig lora{.r = 3,
                                .lora_alpha = 6,
                                .target_modules = ".*(c_attn|c_fc|_proj|lm_head)",
                                .bias = models::LoraBias::kAll};
  const auto adapted = [&, fused = fused, sequence = sequence](CausalLm& model) {
    model.use_fused(fused);
    model.use_sequence_parallel(sequence);
    models::add_lora(model, lora);
    const torch::NoGradGuard no_grad;
    auto random = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{9});
    for (const auto& item : model.named_parameters())
      if (item.key().find("lora_") != std::string::npos)
        item.value().copy_(at::randn(item.value().sizes(), random) * 0.2);
  };
  std::mutex drawing;  // add_lora draws from the process's one generator
  run_threads(ranks, [&](World& world) {
    const Change change = [&](CausalLm& model) {
      const std::lock_guard lock(drawing);
      adapted(model);
    };
    const optim::SGDOptions sgd{.lr = 1};
    Trained one = whole(config, sgd, change), run = sliced(config, tensor_mesh(world), sgd, change);
    const at::Tensor before = one.weights();
    one.step(batch_of(0));
    run.step(batch_of(0));
    EXPECT_NEAR(run.loss, one.loss, kSums);
    EXPECT_TENSOR_NEAR(run.weights(), one.weights(), kSums);
    EXPECT_GT((one.weights() - before).abs().max().item<double>(), 0.01);
    run.parallelism->verify_parameters();
  });
}

INSTANTIATE_TEST_SUITE_P(All, Adapters,
                         ::testing::Combine(::testing::Values(2, 4),
                                            ::testing::Values("gpt2", "llama", "phi3"),
                                            ::testing::Bool(), ::testing::Bool()),
                         show);

TEST(TensorParallel, LogitsAndTextsAreThoseOfOneProcess) {
  const CausalLmConfig config = config_of("llama");
  run_threads(2, [&](World& world) {
    Trained one = whole(config, optim::SGDOptions{}),
            run = sliced(config, tensor_mesh(world), optim::SGDOptions{});
    const torch::NoGradGuard no_grad;
    EXPECT_TENSOR_NEAR(run.net->forward(batch_of(0).ids), one.net->forward(batch_of(0).ids), kSums);
    const models::GenerateOptions greedy{.max_new_tokens = 8, .temperature = 0};
    const auto expected = models::generate(*one.net, {1, 2, 3}, greedy);
    EXPECT_EQ(models::generate(*run.net, {1, 2, 3}, greedy), expected);  // ranks together
    const std::shared_ptr<void> held = run.parallelism->gathered();
    if (world.rank() == 1) {
      EXPECT_EQ(models::generate(*run.net, {1, 2, 3}, greedy), expected);  // one rank alone
    }
    EXPECT_TENSOR_EQ(run.net->forward(batch_of(0).ids), one.net->forward(batch_of(0).ids));
  });
}

// LibTorch reports to it what this thread allocates and frees.
struct Meter : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
    live += size;
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t live = 0;
};

// Bytes that a forward leaves for its backward.
std::int64_t activation_bytes(Trained& run, const Batch& batch) {
  run.parallelism->before_forward();
  const auto meter = std::make_shared<Meter>();
  const c10::DebugInfoGuard listening(c10::DebugInfoKind::PROFILER_STATE, meter);
  const at::Tensor loss = run.net->loss(batch.ids, batch.targets);
  return meter->live;
}

// Each of 5 norms saves a token's input, its output, which the next layers save, and 1 (RMS) or 2
// factors: a rank keeps them for its part of the 24 tokens instead of for all.
TEST(SequenceParallel, RanksKeepTheirPartOfWhatLiesBetweenLayers) {
  for (const auto& [name, factors] : {std::pair("llama", 1), std::pair("gpt2", 2)})
    for (const int ranks : {2, 4})
      run_threads(ranks, [&, name = name, factors = factors](World& world) {
        const auto bytes = [&](bool sequence) {
          Trained run = sliced(config_of(name), tensor_mesh(world), optim::SGDOptions{},
                               [&](CausalLm& model) {
                                 model.use_fused(true);
                                 model.use_sequence_parallel(sequence);
                               });
          return activation_bytes(run, batch_of(0));
        };
        const std::int64_t all = bytes(false), part = bytes(true);
        const auto between = static_cast<std::int64_t>(sizeof(float)) * 5 * 24 * (2 * 32 + factors);
        EXPECT_EQ(all - part, between - between / ranks) << name << " " << all << " " << part;
      });
}

// Fewer tokens than ranks: each has all of them.
TEST(SequenceParallel, TakesSequencesThatAreTooShortToDivide) {
  const CausalLmConfig config = config_of("gpt2");
  run_threads(4, [&](World& world) {
    const Change change = [](CausalLm& model) { model.use_sequence_parallel(true); };
    Trained one = whole(config, optim::SGDOptions{}),
            run = sliced(config, tensor_mesh(world), optim::SGDOptions{}, change);
    for (const std::int64_t time : {3, 4, 5}) {
      const Batch batch = shorter(batch_of(1), time);
      one.step(batch), run.step(batch);
      EXPECT_NEAR(run.loss, one.loss, kSums) << time;
    }
    const torch::NoGradGuard no_grad;
    EXPECT_TENSOR_NEAR(run.net->forward(batch_of(0).ids), one.net->forward(batch_of(0).ids), kSums);
    const models::GenerateOptions greedy{.max_new_tokens = 8, .temperature = 0};
    EXPECT_EQ(models::generate(*run.net, {1, 2, 3}, greedy),
              models::generate(*one.net, {1, 2, 3}, greedy));
  });
}

TEST(TensorParallel, AStepThatLacksPassesIsRefusedAlsoWhereItClips) {
  run_threads(2, [](World& world) {
    Trained run = sliced(config_of("gpt2"), tensor_mesh(world), optim::SGDOptions{});
    run.backward(batch_of(0), /*last=*/false);
    EXPECT_THAT(message_of<UsageError>([&] { run.optimizer->step({.max_grad_norm = 1e-3}); }),
                HasSubstr("a step's backward passes are not complete"));
    run.step(batch_of(1));
  });
}

// An average leaves alone what is the same on every rank: a short micro-batch, which every rank has
// computed whole, and gradients that were averaged before and not set to zero.
TEST(SequenceParallel, GradientsOfAllKindsAddUp) {
  const CausalLmConfig config = config_of("gpt2");
  run_threads(4, [&](World& world) {
    const Change change = [](CausalLm& model) { model.use_sequence_parallel(true); };
    const optim::SGDOptions sgd{.lr = 1};
    Trained one = whole(config, sgd), run = sliced(config, tensor_mesh(world), sgd, change);
    for (Trained* const each : {&one, &run}) {
      each->backward(batch_of(0), /*last=*/false);
      each->backward(shorter(batch_of(1), 3), /*last=*/false);
      each->backward(batch_of(2));
      each->backward(batch_of(3));
      each->optimizer->step();
    }
    EXPECT_TENSOR_NEAR(run.weights(), one.weights(), 4 * kSums);
    run.parallelism->verify_parameters();
  });
}

// What a backward sends: for each of four pairs of layers two gathers and a reduce-scatter, for the
// head one of each and for the embedding a gather; and before a step one average of all small
// weights. The factor of an adapter that every rank has is such a weight without parts of a
// sequence, too, where a backward has a sum for each pair of layers and for the head. Beside
// adapters embedding and head are frozen: the first pair has nobody to give a gradient to, and the
// head needs its input no more.
TEST(SequenceParallel, SmallGradientsAreSentOnceInAnUpdate) {
  std::mutex drawing;
  for (const auto& [sequence, lora] :
       {std::pair(true, false), std::pair(true, true), std::pair(false, true)})
    run_threads(2, [&, sequence = sequence, lora = lora](World& world) {
      const Change change = [&](CausalLm& model) {
        const std::lock_guard lock(drawing);
        model.use_sequence_parallel(sequence);
        if (lora) models::add_lora(model, {.target_modules = ".*(c_attn|c_fc|c_proj)"});
      };
      const Mesh mesh = tensor_mesh(world);
      Trained run = sliced(config_of("gpt2"), mesh, optim::SGDOptions{}, change);
      const auto& sent = detail::Access::impl(mesh["tensor"])->sequence;
      const auto in_backward = [&](bool last) {
        run.parallelism->before_forward();
        const at::Tensor loss = run.net->loss(batch_of(0).ids, batch_of(0).targets);
        const std::uint64_t before = sent;
        run.parallelism->backward(loss, last);
        return static_cast<int>(sent - before);
      };
      const int adapted = sequence ? 4 * 3 - 1 + 1 : 4 - 1 + 1;
      const int expected = lora ? adapted : 4 * 3 + 2 + 1;
      EXPECT_EQ(in_backward(/*last=*/false), expected) << sequence << lora;
      EXPECT_EQ(in_backward(/*last=*/true), expected + 1) << sequence << lora;
    });
}

// A loss from all logits, for those who do not use CausalLm::loss(), and call backward() on it:
// the end of that one averages what TensorParallel::backward() would have.
TEST(TensorParallel, ALossOfAllLogitsHasTheSameGradients) {
  const CausalLmConfig config = config_of("gpt2");
  for (const bool sequence : {false, true})
    run_threads(2, [&](World& world) {
      const optim::SGDOptions sgd{.lr = 1};
      const Change change = [&](CausalLm& model) { model.use_sequence_parallel(sequence); };
      Trained one = whole(config, sgd), run = sliced(config, tensor_mesh(world), sgd, change);
      one.step(batch_of(0));
      run.parallelism->before_forward();
      const at::Tensor logits = run.net->forward(batch_of(0).ids);
      models::next_token_loss(logits, batch_of(0).targets).backward();
      run.optimizer->step();
      EXPECT_TENSOR_NEAR(run.weights(), one.weights(), kSums);
    });
}

TEST(TensorParallel, CheckpointedBlocksAreComputedAgainByAllRanks) {
  const CausalLmConfig config = config_of("llama");
  for (const bool sequence : {false, true})
    run_threads(2, [&](World& world) {
      const optim::SGDOptions sgd{.lr = 1};
      const Change once = [&](CausalLm& model) { model.use_sequence_parallel(sequence); };
      const Change again = [&](CausalLm& model) {
        model.use_sequence_parallel(sequence);
        model.run_blocks_with(lockstep::checkpoint);
      };
      Trained plain = sliced(config, tensor_mesh(world), sgd, once),
              run = sliced(config, tensor_mesh(world), sgd, again);
      plain.step(batch_of(0));
      run.step(batch_of(0));
      EXPECT_EQ(run.loss, plain.loss);
      EXPECT_TENSOR_NEAR(run.weights(), plain.weights(), kSums);
    });
}

TEST(TensorParallel, AnyRuleThatStepsElements) {
  const CausalLmConfig config = config_of("gpt2");
  run_threads(2, [&](World& world) {
    const optim::LionOptions lion{.lr = 1e-3};
    Trained one = whole(config, lion), run = sliced(config, tensor_mesh(world), lion);
    one.step(batch_of(0));
    run.step(batch_of(0));
    // A gradient that is a rounding error may have another sign; those are few.
    const at::Tensor differs = (run.weights() - one.weights()).abs() > kSums;
    EXPECT_LT(differs.to(at::kFloat).mean().item<double>(), 0.01);
    EXPECT_LT(run.optimizer->state_bytes(), one.optimizer->state_bytes());
  });
}

TEST(TensorParallel, AStepThatIsNotFiniteIsSkippedByAll) {
  const CausalLmConfig config = config_of("gpt2");
  run_threads(2, [&](World& world) {
    Trained run = sliced(config, tensor_mesh(world), optim::SGDOptions{.lr = 1});
    const at::Tensor before = run.weights();
    run.backward(batch_of(0));
    // In the slice of one rank alone.
    if (world.rank() == 1) run.net->parameters()[0].mutable_grad().fill_(INFINITY);
    EXPECT_TRUE(run.optimizer->step({.skip_non_finite = true}).was_skipped());
    EXPECT_TENSOR_EQ(run.weights(), before);
  });
}

// ---------------------------------------------------------------- slices and the whole

TEST(TensorParallel, WeightsAreCutByHeads) {
  const CausalLmConfig config = config_of("phi3");
  run_threads(2, [&](World& world) {
    const auto reference = make(config);
    Trained run = sliced(config, tensor_mesh(world), optim::SGDOptions{});
    const auto mine = run.net->named_parameters(), all = reference->named_parameters();
    const std::string block = "model.layers.0.";
    // 8 heads of queries and 4 of keys and values, 4 wide, in one matrix.
    const at::Tensor& qkv = all[block + "self_attn.qkv_proj.weight"];
    const std::int64_t r = world.rank();
    EXPECT_TENSOR_EQ(mine[block + "self_attn.qkv_proj.weight"],
                     at::cat({qkv.narrow(0, 16 * r, 16), qkv.narrow(0, 32 + 8 * r, 8),
                              qkv.narrow(0, 48 + 8 * r, 8)}));
    EXPECT_TENSOR_EQ(mine[block + "self_attn.o_proj.weight"],
                     all[block + "self_attn.o_proj.weight"].narrow(1, 16 * r, 16));
    // 45 rows of gate and of up: 22 and 23.
    const at::Tensor& both = all[block + "mlp.gate_up_proj.weight"];
    const std::int64_t begin = r == 0 ? 0 : 22, length = r == 0 ? 22 : 23;
    EXPECT_TENSOR_EQ(mine[block + "mlp.gate_up_proj.weight"],
                     at::cat({both.narrow(0, begin, length), both.narrow(0, 45 + begin, length)}));
    EXPECT_TENSOR_EQ(mine[block + "mlp.down_proj.weight"],
                     all[block + "mlp.down_proj.weight"].narrow(1, begin, length));
    EXPECT_TENSOR_EQ(mine[block + "input_layernorm.weight"], all[block + "input_layernorm.weight"]);
    EXPECT_EQ(mine["model.embed_tokens.weight"].size(0), r == 0 ? 18 : 19);
    const std::shared_ptr<void> held = run.parallelism->gathered();
    EXPECT_TENSOR_EQ(flat(*run.net), flat(*reference));
  });
}

TEST(TensorParallel, CopiesThatDifferAreFound) {
  const CausalLmConfig config = config_of("llama");
  const auto said = testing::run_threads_collecting(2, [&](World& world) {
    Trained run = sliced(config, tensor_mesh(world), optim::SGDOptions{});
    const torch::NoGradGuard no_grad;
    if (world.rank() == 1) run.net->named_parameters()["model.norm.weight"].add_(1);
    run.parallelism->verify_parameters();
  });
  for (const std::string& each : said)
    EXPECT_THAT(each, AllOf(HasSubstr("'model.norm.weight'"), HasSubstr("along 'tensor'")));
}

// ---------------------------------------------------------------- what is refused

void expect_refused(int ranks, const std::string& text, const std::function<void(World&)>& body) {
  for (const std::string& said : testing::run_threads_collecting(ranks, body))
    EXPECT_THAT(said, HasSubstr(text));
}

TEST(TensorParallel, RefusesModelsThatItCannotDivide) {
  expect_refused(
      3,
      "8 attention heads and 4 heads of keys and values are not divided by a degree of 3: every "
      "rank computes as many. Choose one that divides both (tensor_parallel_degree): 1, 2 or 4.",
      [](World& world) { TensorParallel(*make(config_of("llama")), tensor_mesh(world)); });
  const CausalLmConfig narrow = models::parse_config(
      R"({"model_type": "gpt2", "vocab_size": 3, "n_embd": 8, "n_layer": 1, "n_head": 4})", "n");
  expect_refused(4, "leave some of 4 ranks without a slice",
                 [&](World& world) { TensorParallel(*make(narrow), tensor_mesh(world)); });
  expect_refused(2, "'probe.weight' was added to the model", [](World& world) {
    const auto model = make(config_of("gpt2"));
    model->register_module("probe", torch::nn::Linear(2, 2));
    TensorParallel(*model, tensor_mesh(world));
  });
  expect_refused(2, "a device map has split the model", [](World& world) {
    const CausalLmConfig config = config_of("llama");
    const auto model = make(config);
    place(*model, models::balanced_device_map(config, {"cpu:0", "cpu:1"}));
    TensorParallel(*model, tensor_mesh(world));
  });
  expect_refused(2, "the module torch::nn::LinearImpl cannot be divided into slices",
                 [](World& world) {
                   torch::nn::Linear other(4, 4);
                   TensorParallel(*other, tensor_mesh(world));
                 });
}

struct Odd : torch::nn::Module, nn::Sliced {
  Odd() : weight(register_parameter("weight", at::zeros({4, 4}))) {}
  std::vector<Cut> cuts(int) const override { return {{weight, 0, {3}}}; }
  at::Tensor weight;
};

TEST(TensorParallel, RefusesCutsThatDoNotFit) {
  expect_refused(2, "parts of [3] along dimension 0, which no parameter has ('weight')",
                 [](World& world) {
                   Odd odd;
                   TensorParallel(odd, tensor_mesh(world));
                 });
}

struct Doubled : torch::nn::Module, nn::Sliced {
  Doubled() : weight(register_parameter("weight", at::ones({4}))) {}
  std::vector<Cut> cuts(int) const override { return {}; }
  at::Tensor loss() { return nn::enter_weight(weight * 2, tensor_group()).sum(); }
  at::Tensor weight;
};

TEST(TensorParallel, RefusesAWeightThatIsNoParameter) {
  expect_refused(2, "1 of the tensors that went through nn::enter_weight() are no parameters",
                 [](World& world) {
                   const auto doubled = std::make_shared<Doubled>();
                   TensorParallel model(*doubled, tensor_mesh(world));
                   model.backward(doubled->loss(), /*last=*/true);
                 });
}

TEST(TensorParallel, RefusesWhatIsNotForSlices) {
  const CausalLmConfig config = config_of("gpt2");
  expect_refused(2, "has ranks along axes other than 'data' and 'tensor'", [&](World& world) {
    TensorParallel(*make(config), Mesh(world, {{"pipeline", 2}}));
  });
  expect_refused(2, "rank 1 has", [&](World& world) {
    TensorParallel(*make(config_of(world.rank() == 0 ? "gpt2" : "llama")), tensor_mesh(world));
  });
  run_threads(2, [&](World& world) {
    Trained run = sliced(config, tensor_mesh(world), optim::SGDOptions{});
    const optim::SGDOptions sgd{};
    EXPECT_THAT(
        message_of<UsageError>([&] { run.parallelism->make_optimizer({{{at::zeros({2})}, sgd}}); }),
        HasSubstr("1 of 1 parameters in the groups are not the model's"));
    EXPECT_THAT(message_of<UsageError>(
                    [&] { parallelize(*run.net, tensor_mesh(world), {.shard_optimizer = true}); }),
                HasSubstr("Leave shard_optimizer out"));
  });
}

// A slice has a scale of its own, so that its values differ from the whole's by fp8's rounding: not
// more from those of float than one process in fp8 does, within a factor for chance.
TEST(TensorParallel, TrainsInFp8) {
  // A width of 95 is 47 and 48, of which fp8 would cover one.
  for (const int width : {96, 95})
    for (const bool sequence : {false, true}) {
      const CausalLmConfig config = models::parse_config(
          fmt::format(R"({{"model_type": "llama", "vocab_size": 37, "hidden_size": 64,
          "intermediate_size": {}, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2}})",
                      width),
          "fp8");
      run_threads(2, [&](World& world) {
        const optim::SGDOptions sgd{.lr = 0.1};
        const Change change = [&](CausalLm& model) { model.use_sequence_parallel(sequence); };
        Trained exact = whole(config, sgd), one = whole(config, sgd),
                run = sliced(config, tensor_mesh(world), sgd, change);
        exact.backward(batch_of(0));
        {
          const nn::Fp8Autocast fp8(nn::Fp8Recipe::kTensorwise);
          one.step(batch_of(0));
          run.step(batch_of(0));
        }
        exact.optimizer->step();
        EXPECT_NE(one.loss, exact.loss);
        EXPECT_LT(std::abs(run.loss - exact.loss), 0.02 * exact.loss);
        const at::Tensor want = exact.weights();
        const double off = (one.weights() - want).norm().item<double>();
        EXPECT_GT(off, 0);
        EXPECT_LT((run.weights() - want).norm().item<double>(), 2 * off);
        run.parallelism->verify_parameters();
      });
    }
}

TEST(TensorParallel, RefusesAdaptersOnABaseInFp8) {
  for (const char* layer : {"q_proj", "o_proj"})
    run_threads(2, [&](World& world) {
      const auto net = make(config_of("llama"));
      models::add_lora(*net, {.r = 2, .target_modules = {layer}});
      const TensorParallel model(*net, tensor_mesh(world));
      const nn::Fp8Autocast fp8(nn::Fp8Recipe::kTensorwise);
      EXPECT_THAT(message_of<UsageError>([&] { net->forward(batch_of(0).ids); }),
                  HasSubstr("adapters on a base in fp8 are not divided"));
    });
}

}  // namespace
}  // namespace lockstep
