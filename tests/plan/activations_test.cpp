// The bytes that observe/plan computes, compared with those that the models allocate on the CPU,
// where the same operations save the same tensors as on a GPU, and with those of optimizers.
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/amp.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "lockstep/testing/worlds.h"
#include "lockstep/train/rule_options.h"
#include "observe/plan/model_shape.h"

namespace lockstep::plan {
namespace {

// Counts what LibTorch allocates for CPU tensors.
class Counting : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const data = c10::alloc_cpu(bytes);
    const std::lock_guard lock(mutex_);
    if (data != nullptr) sizes_[data] = bytes;
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    return {data, data, &Counting::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Counting::release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  std::uint64_t live() {
    const std::lock_guard lock(mutex_);
    return live_;
  }
  std::uint64_t peak() {
    const std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = live_;
  }
  static Counting& instance() {
    static Counting& counting = *new Counting;  // tensors may outlive main()
    return counting;
  }

 private:
  static void release(void* data) {
    Counting& self = instance();
    {
      const std::lock_guard lock(self.mutex_);
      if (const auto found = self.sizes_.find(data); found != self.sizes_.end()) {
        self.live_ -= found->second;
        self.sizes_.erase(found);
      }
    }
    c10::free_cpu(data);
  }

  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;
  std::uint64_t live_ = 0;
  std::uint64_t peak_ = 0;
};

struct Case {
  const char* name;
  Model model;
  bool half = false;
  bool checkpointing = false;
  bool fused = false;
  models::BlockParts again{};
};

// Dropout is not among them: its mask is a float on CPUs and a byte on GPUs.
Model gpt(std::int64_t vocabulary) {
  const models::GptConfig c{
      .n_layer = 3, .n_head = 4, .n_embd = 128, .vocab_size = vocabulary, .n_positions = 64};
  return {.config = models::CausalLmConfig{.model = c}, .length = 64};
}

Model llama(bool fused, bool adapters) {
  models::LlamaConfig c{.vocab_size = 256,
                        .hidden_size = 128,
                        .intermediate_size = 352,
                        .num_hidden_layers = 3,
                        .num_attention_heads = 4,
                        .num_key_value_heads = fused ? 4 : 2,
                        .max_position_embeddings = 64};
  c.fused_projections = fused;
  Model model{.config = models::CausalLmConfig{.model = c}, .length = 64};
  if (adapters) {
    model.lora = models::LoraConfig{.r = 8, .lora_alpha = 16};
    model.lora->target_modules = fused ? models::ModuleNames{"qkv_proj", "o_proj", "down_proj"}
                                       : models::ModuleNames{"q_proj", "v_proj"};
  }
  return model;
}

Model small(std::string_view type) {
  const models::Family& family = *models::find_family(type);
  models::Options o = family.defaults();
  for (const auto& [key, value] : std::map<std::string, std::int64_t>{{"vocab_size", 256},
                                                                      {"hidden_size", 128},
                                                                      {"intermediate_size", 352},
                                                                      {"num_hidden_layers", 3},
                                                                      {"num_attention_heads", 4},
                                                                      {"num_key_value_heads", 2},
                                                                      {"head_dim", 32},
                                                                      {"num_local_experts", 3}})
    o.set(key, value);
  return {.config = models::CausalLmConfig{.model = models::FamilyConfig(family, o)}, .length = 64};
}

constexpr std::int64_t kBatch = 4;

class Activation : public ::testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() {
    c10::SetCPUAllocator(&Counting::instance(), 255);
    torch::set_num_threads(1);
  }

  Activation() {
    const Case& c = GetParam();
    net_ = models::make_causal_lm(*c.model.causal_lm());
    net_->use_fused(c.fused);
    if (c.model.lora) {
      models::add_lora(*net_, *c.model.lora);
      if (c.half) models::convert_frozen_weights(*net_, at::kBFloat16);
    }
    if (c.checkpointing || c.again.any()) net_->run_blocks_with(lockstep::checkpoint, c.again);
    net_->train();
    ids_ = torch::randint(0, 256, {kBatch, c.model.length}, at::kLong);
    const optim::Autocast autocast(at::kCPU, c.half ? at::kBFloat16 : at::kFloat);
    net_->hidden_states(ids_);  // makes what is made once: angles
  }

  void step() {
    at::Tensor loss;
    {
      const optim::Autocast autocast(at::kCPU, GetParam().half ? at::kBFloat16 : at::kFloat);
      const at::Tensor logits = net_->forward(ids_);
      loss = models::next_token_loss(logits, ids_);
    }
    loss.backward();
  }

  std::uint64_t weights_of_blocks() const {
    std::int64_t count = 0;
    for (const auto& item : net_->named_parameters())
      if (item.value().dim() == 2 && (item.key().find(".h.") != std::string::npos ||
                                      item.key().find(".layers.") != std::string::npos))
        count += item.value().numel();
    return static_cast<std::uint64_t>(count);
  }

  models::CausalLmPtr net_;
  at::Tensor ids_;
};

TEST_P(Activation, SavedByTheBlocksIsAsPlanned) {
  const Case& c = GetParam();
  const std::uint64_t before = Counting::instance().live();
  std::uint64_t measured = 0;
  {
    const optim::Autocast autocast(at::kCPU, c.half ? at::kBFloat16 : at::kFloat);
    const at::Tensor hidden = net_->hidden_states(ids_);
    measured = Counting::instance().live() - before;
  }
  const Parameters p = parameters_of(c.model);
  const std::uint64_t tokens = static_cast<std::uint64_t>(kBatch * c.model.length);
  const auto width = static_cast<std::uint64_t>(p.head / c.model.causal_lm()->vocab_size());
  const MemoryOptions options{.batch = kBatch,
                              .half = c.half,
                              .checkpointing = c.checkpointing,
                              .again = c.again,
                              .fused = c.fused};
  // Of whole blocks, or of all that is in them.
  const bool segments = c.again.mlp && c.again.attention, frees = c.checkpointing || segments;
  std::uint64_t planned = activations_of(c.model, options).saved;
  if (c.fused) {
    // On CPUs rotated queries have their heads first, so attention's result is copied for the layer
    // after it.
    const std::uint64_t element = c.half ? 2 : 4;
    const bool copied = c.model.causal_lm()->spec().rotary.has_value();
    if (copied && !frees) planned += 3 * tokens * element * width;
    // The generator's state, for each block or part.
    if (frees) planned += (segments ? 2 : 1) * 3 * 5056;
    // Float weights are converted for the pass, and are copies of the plan's, not activations.
    if (c.model.lora) planned += element * static_cast<std::uint64_t>(p.trainable);
    if (!c.model.lora && c.half && !frees) planned += 2 * weights_of_blocks();
    EXPECT_NEAR(static_cast<double>(measured), static_cast<double>(planned), 0.03 * measured)
        << "planned/measured " << static_cast<double>(planned) / static_cast<double>(measured);
    return;
  }
  // The head's input is still in float, and not yet copied; weights of the blocks have copies.
  if (!c.model.lora) planned -= tokens * (c.half ? 2 : 4) * width;
  planned += tokens * 4 * width;
  if (segments) planned += 2 * 3 * 5056;
  if (c.half && !frees)
    planned += 2 * static_cast<std::uint64_t>(p.trainable_matrices - (c.model.lora ? 0 : p.head));
  EXPECT_NEAR(static_cast<double>(measured), static_cast<double>(planned), 0.03 * measured)
      << "planned/measured " << static_cast<double>(planned) / static_cast<double>(measured);
}

TEST_P(Activation, PeakOfAStepIsAsPlanned) {
  const Case& c = GetParam();
  if (c.fused) GTEST_SKIP() << "on CPUs fused operations have other temporaries than on GPUs";
  if (c.half) GTEST_SKIP() << "on CPUs autocast computes the loss in bfloat16, on GPUs in float";
  const std::uint64_t before = Counting::instance().live();
  Counting::instance().reset_peak();
  step();
  const auto measured = static_cast<double>(Counting::instance().peak() - before);
  const Memory memory = memory_of(c.model, {.batch = kBatch,
                                            .half = c.half,
                                            .checkpointing = c.checkpointing,
                                            .again = c.again,
                                            .state_bytes = 0});
  const auto planned = static_cast<double>(memory.allocated() - memory.parameters);
  EXPECT_NEAR(measured, planned, 0.1 * measured) << "planned/measured " << planned / measured;
}

constexpr models::BlockParts kSegments{.mlp = true, .attention = true};
constexpr models::BlockParts kSmall{.swiglu = true, .norm = true};
constexpr models::BlockParts kAll{true, true, true, true};

INSTANTIATE_TEST_SUITE_P(
    Models, Activation,
    ::testing::Values(
        Case{"gpt", gpt(256)}, Case{"gpt_large_vocabulary", gpt(4096)},
        Case{"gpt_half", gpt(256), true}, Case{"gpt_checkpointed", gpt(256), false, true},
        Case{"gpt_checkpointed_half", gpt(256), true, true}, Case{"llama", llama(false, false)},
        Case{"llama_half", llama(false, false), true}, Case{"phi3", llama(true, false)},
        Case{"phi3_half", llama(true, false), true}, Case{"phi3_lora", llama(true, true)},
        Case{"phi3_lora_half", llama(true, true), true},
        Case{"llama_lora_half", llama(false, true), true}, Case{"qwen2_half", small("qwen2"), true},
        Case{"qwen3", small("qwen3")}, Case{"qwen3_half", small("qwen3"), true},
        Case{"gemma2", small("gemma2")}, Case{"mixtral", small("mixtral")},
        Case{"mixtral_half", small("mixtral"), true},
        Case{"mixtral_fused_half", small("mixtral"), true, false, true},
        Case{"starcoder2", small("starcoder2")}, Case{"starcoder2_half", small("starcoder2"), true},
        Case{"starcoder2_fused_half", small("starcoder2"), true, false, true},
        Case{"gpt_fused", gpt(256), false, false, true},
        Case{"gpt_fused_half", gpt(256), true, false, true},
        Case{"gpt_fused_checkpointed", gpt(256), true, true, true},
        Case{"llama_fused_half", llama(false, false), true, false, true},
        Case{"phi3_fused_half", llama(true, false), true, false, true},
        Case{"phi3_lora_fused_half", llama(true, true), true, false, true},
        Case{"gpt_segments", gpt(256), false, false, false, kSegments},
        Case{"gpt_half_segments", gpt(256), true, false, false, kSegments},
        Case{"gpt_fused_half_segments", gpt(256), true, false, true, kSegments},
        Case{"llama_half_segments", llama(false, false), true, false, false, kSegments},
        Case{"llama_fused_half_segments", llama(false, false), true, false, true, kSegments},
        Case{"llama_fused_half_all", llama(false, false), true, false, true, kAll},
        Case{"llama_fused_half_swiglu_norm", llama(false, false), true, false, true, kSmall},
        Case{"phi3_fused_half_swiglu_norm", llama(true, false), true, false, true, kSmall},
        Case{"phi3_lora_fused_half_swiglu_norm", llama(true, true), true, false, true, kSmall}),
    [](const auto& one) { return std::string(one.param.name); });

// ---------------------------------------------------------------- tensor parallel ranks

using Slices = Activation;

// Two ranks are threads of this process, so that the allocator sees what both have.
TEST_P(Slices, SavedByARankIsAsPlanned) {
  const Case& c = GetParam();
  for (const bool sequence : {false, true}) {
    std::uint64_t before = 0, after = 0;
    testing::run_threads(2, [&](World& world) {
      const auto net = models::make_causal_lm(*c.model.causal_lm());
      net->use_fused(c.fused);
      net->use_sequence_parallel(sequence);
      if (c.model.lora) models::add_lora(*net, *c.model.lora);
      TensorParallel model(*net, Mesh(world, {{"data", -1}, {"tensor", 2}}));
      net->train();
      const auto loss = [&] {
        const optim::Autocast autocast(at::kCPU, c.half ? at::kBFloat16 : at::kFloat);
        model.before_forward();
        return net->loss(ids_, ids_);
      };
      loss();  // makes what is made once
      const auto count = [&](std::uint64_t& bytes) {
        world.barrier();
        if (world.is_leader()) bytes = Counting::instance().live();
        world.barrier();
      };
      count(before);
      const at::Tensor kept = loss();
      count(after);
    });
    Model slice = c.model;
    slice.slices = 2;
    slice.sequence_parallel = sequence;
    const auto tokens = static_cast<std::uint64_t>(kBatch * slice.length);
    const Parameters p = parameters_of(slice);
    std::uint64_t planned =
        activations_of(slice, {.batch = kBatch, .half = c.half, .fused = c.fused}).saved;
    planned += tokens * 4 * static_cast<std::uint64_t>(slice.spec().vocabulary);  // softmax
    if (c.half) planned += 2 * static_cast<std::uint64_t>(p.trainable_matrices);  // copies
    const double measured = static_cast<double>(after - before) / 2;
    EXPECT_NEAR(measured, static_cast<double>(planned), 0.03 * measured)
        << "sequence_parallel " << sequence << ", planned/measured "
        << static_cast<double>(planned) / measured;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Slices,
                         ::testing::Values(Case{"gpt", gpt(256)}, Case{"gpt_half", gpt(256), true},
                                           Case{"gpt_fused", gpt(256), false, false, true},
                                           Case{"llama", llama(false, false)},
                                           Case{"llama_half", llama(false, false), true},
                                           Case{"llama_lora", llama(false, true)},
                                           Case{"phi3", llama(true, false)},
                                           Case{"phi3_lora", llama(true, true)},
                                           Case{"qwen3", small("qwen3")},
                                           Case{"gemma2", small("gemma2")}),
                         [](const auto& one) { return std::string(one.param.name); });

// ---------------------------------------------------------------- optimizer state

// The optimizer state that `lockstep plan` predicts from a training file, against the state that
// its optimizer holds after one step, for each update rule.

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
