// Our sides of the benchmarks that train models: a rank that trains on request (models.h). Model,
// wrapper and optimizer are used as lockstep::Trainer uses them.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <array>
#include <filesystem>
#include <set>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/harness.h"
#include "bench/marks.h"
#include "bench/models.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/memory/cpu_cache.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/models/resnet.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/sharded_optimizer.h"
#include "lockstep/run.h"
#include "lockstep/train/async_saver.h"
#include "lockstep/train/captured_step.h"
#include "lockstep/train/checkpoint.h"
#include "observe/plan/model_shape.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

constexpr std::uint64_t kSeed = 42;

// ---------------------------------------------------------------- sizes

const ModelPreset& preset_of(const ModelSettings& settings) {
  for (const ModelPreset& preset : kPresets)
    if (preset.kind == settings.kind && preset.name == settings.model) return preset;
  throw UsageError("bench", "{} has no model '{}'.", settings.kind, settings.model);
}

models::GptConfig gpt_config(const ModelSettings& settings) {
  if (settings.model == "small")
    return {.n_layer = settings.n_layer,
            .n_head = settings.n_head,
            .n_embd = settings.n_embd,
            .vocab_size = settings.vocab_size,
            .n_positions = settings.sequence_length,
            .tie_word_embeddings = settings.tied};
  const ModelPreset& preset = preset_of(settings);
  return {.n_layer = preset.layers,
          .n_head = preset.heads,
          .n_embd = preset.width,
          .vocab_size = preset.vocabulary > 0 ? preset.vocabulary : settings.vocab_size,
          .n_positions = settings.sequence_length};
}

// As Llama 3.2 has them, with one weight for embedding and head; those with adapters as Phi-3.
models::LlamaConfig llama_config(const ModelSettings& settings) {
  const ModelPreset& preset = preset_of(settings);
  const bool llama = settings.kind == "llama";
  models::LlamaConfig c{.vocab_size = preset.vocabulary,
                        .hidden_size = preset.width,
                        .intermediate_size = preset.inner,
                        .num_hidden_layers = preset.layers,
                        .num_attention_heads = preset.heads,
                        .num_key_value_heads = preset.keys,
                        .max_position_embeddings = settings.sequence_length,
                        .rms_norm_eps = 1e-5,
                        .tie_word_embeddings = llama,
                        .fused_projections = !llama};
  if (llama || settings.model == "llama3-8b") c.rope.rope_theta = 500000;
  return c;
}

models::CausalLmConfig lm_config(const ModelSettings& settings) {
  if (settings.kind == "gpt") return {.model = gpt_config(settings)};
  return {.model = llama_config(settings)};
}

models::LoraConfig lora_config(const ModelSettings& settings) {
  return {.r = 16,
          .lora_alpha = 32,
          .lora_dropout = settings.lora_dropout,
          .target_modules = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}};
}

models::ResNetConfig resnet_config(const ModelSettings& settings) {
  if (settings.model == "resnet50") return {.depth = 50};
  if (settings.model == "resnet18") return {.depth = 18};
  return {.depth = 18, .num_classes = 10};
}

bool is_resnet(const ModelSettings& settings) {
  return settings.kind == "resnet";
}

std::string model_folder(const ModelSettings& settings) {
  return settings.start + "/model";
}

std::string adapter_folder(const ModelSettings& settings) {
  return settings.start + "/adapter";
}

// ---------------------------------------------------------------- data

struct ModelBatch {
  at::Tensor data;    // token ids [batch, time], or images
  at::Tensor target;  // the ids that follow, or classes
};

constexpr std::int64_t kMask = 0x7fffffff;

// Bits of a position, in [0, 2^31). Products stay below 2^62.
at::Tensor hashed(const at::Tensor& position) {
  at::Tensor x = position.bitwise_and(kMask);
  for (const std::int64_t factor : {0x2c1b3c6d, 0x297a2d39}) {
    x = x.bitwise_xor(x.bitwise_right_shift(15));
    x = (x * factor).bitwise_and(kMask);
  }
  return x.bitwise_xor(x.bitwise_right_shift(15));
}

ModelBatch token_batch(const ModelSettings& settings, std::int64_t step, const at::Tensor& like) {
  const std::int64_t vocabulary = lm_config(settings).vocab_size();
  const std::int64_t rows = settings.batch_size, columns = settings.sequence_length + 1;
  const std::int64_t count = rows * columns;
  const at::Tensor places = torch::arange(step * count, (step + 1) * count, like.options()) * 3;
  // A product of two uniform numbers, as a share of the vocabulary.
  const at::Tensor share =
      (hashed(places) * hashed(places + 1).bitwise_right_shift(16)).bitwise_right_shift(15);
  const at::Tensor drawn = (share * vocabulary).bitwise_right_shift(31).view({rows, columns});
  const at::Tensor before = torch::cat({drawn.narrow(1, 0, 1), drawn.narrow(1, 0, columns - 1)}, 1);
  const at::Tensor follows = hashed(places + 2).bitwise_and(1).to(at::kBool).view({rows, columns});
  const at::Tensor ids = torch::where(follows, (before * 31 + 7).remainder(vocabulary), drawn);
  return {ids.narrow(1, 0, columns - 1).contiguous(), ids.narrow(1, 1, columns - 1).contiguous()};
}

ModelBatch image_batch(const ModelSettings& settings, std::int64_t step, const at::Tensor& like) {
  const std::int64_t rows = settings.batch_size, side = settings.sequence_length;
  const std::int64_t count = rows * 3 * side * side;
  const at::Tensor places = torch::arange(step * count, (step + 1) * count, like.options());
  at::Tensor images = (hashed(places).to(at::kFloat) * 0x1p-30 - 1).view({rows, 3, side, side});
  if (images.is_cuda()) images = images.contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor numbers = torch::arange(step * rows, (step + 1) * rows, like.options());
  return {images, hashed(numbers).remainder(resnet_config(settings).num_classes)};
}

// ---------------------------------------------------------------- models

struct Net {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const ModelBatch&)> loss;
  std::optional<models::LoraConfig> lora{};
};

template <typename Module>
Net net_of(std::shared_ptr<Module> module) {
  module->train();
  return {module,
          [module](const ModelBatch& batch) {
            const at::Tensor logits = module->forward(batch.data);
            return torch::cross_entropy_loss(logits.flatten(0, -2), batch.target.flatten());
          },
          {}};
}

// Head and loss are fused where the model can; "plain" uses only ATen's operations.
Net lm_of(const models::CausalLmPtr& module, const ModelSettings& settings) {
  module->train();
  if (settings.mode == "plain") module->use_fused(false);
  module->use_fp32_residual(settings.residual_in_fp32);
  return {module,
          [module](const ModelBatch& batch) { return module->loss(batch.data, batch.target); },
          {}};
}

// Billions of weights are drawn on the device where they stay.
models::CausalLmPtr drawn_base(const ModelSettings& settings, at::ScalarType type,
                               c10::Device device) {
  const torch::NoGradGuard no_grad;
  const auto made =
      models::make_causal_lm(lm_config(settings), {.dtype = type, .device = device, .draw = false});
  for (const auto& parameter : made->named_parameters()) {
    at::Tensor weight = parameter.value();
    if (weight.dim() == 1)
      weight.fill_(1);  // norms; there are no biases
    else
      weight.normal_(0, 0.02);
  }
  return made;
}

// An adapter begins as zero. peers/peer_loop.py sets the same.
void set_adapters(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.named_parameters()) {
    if (parameter.key().find("lora_B") == std::string::npos) continue;
    at::Tensor& weight = parameter.value();
    const at::Tensor numbers = torch::arange(weight.numel(), weight.options());
    weight.copy_((numbers.remainder(7) - 3).view_as(weight) * 0x1p-6);
  }
}

std::optional<nn::Fp8Recipe> fp8_of(const ModelSettings& settings) {
  if (settings.dtype != "fp8") return std::nullopt;
  return nn::fp8_recipe_of(settings.fp8_recipe);
}

Net make_lm(const ModelSettings& settings, at::ScalarType type, c10::Device device) {
  const bool lora = settings.kind == "lora";
  models::CausalLmPtr made;
  if (!settings.start.empty())
    made = models::load_pretrained(model_folder(settings), {.dtype = type, .device = device});
  else if (settings.kind != "gpt")
    made = drawn_base(settings, type, device);
  else
    made = models::make_causal_lm(lm_config(settings));
  made->to(device);
  Net net = lm_of(made, settings);
  if (!lora) return net;
  if (settings.start.empty()) {
    net.lora = lora_config(settings);
    models::add_lora(*made, *net.lora);
  } else {
    net.lora = models::load_adapter(*made, adapter_folder(settings));
  }
  made->train(!settings.exact);
  if (settings.exact) set_adapters(*made);
  if (const auto recipe = fp8_of(settings)) models::store_frozen_fp8(*made, *recipe);
  return net;
}

Net make_resnet(const ModelSettings& settings, c10::Device device) {
  const auto made = models::ResNet(resnet_config(settings)).ptr();
  if (!settings.start.empty()) train::load_weights(model_folder(settings), *made);
  made->to(device);
  if (device.is_cuda())
    for (auto& parameter : made->parameters())
      if (parameter.dim() == 4)
        parameter.set_data(parameter.data().contiguous(at::MemoryFormat::ChannelsLast));
  return net_of(made);
}

at::ScalarType type_of(const ModelSettings& settings) {
  return settings.dtype == "fp32" ? at::kFloat : at::kBFloat16;
}

// A frozen base is held in the compute dtype; what is trained is float.
Net make_net(const ModelSettings& settings, c10::Device device) {
  torch::manual_seed(kSeed);
  if (is_resnet(settings)) return make_resnet(settings, device);
  return make_lm(settings, settings.kind == "lora" ? type_of(settings) : at::kFloat, device);
}

// Batch `number` on the settings' device; the same numbers as in peers/peer_loop.py.
// Tokens: low ids are frequent, and every second one follows from its predecessor, so there is
// something to learn. Images and classes: hashes of their positions.
ModelBatch make_batch(const ModelSettings& settings, std::int64_t step) {
  const at::Tensor like =
      torch::empty({0}, at::TensorOptions(c10::Device(settings.device)).dtype(at::kLong));
  return is_resnet(settings) ? image_batch(settings, step, like)
                             : token_batch(settings, step, like);
}

// Draws the initial weights and writes them to settings.start: model/ and, for lora, adapter/.
void write_start(const ModelSettings& settings) {
  ModelSettings drawn = settings;
  drawn.start.clear();
  if (drawn.dtype == "fp8") drawn.dtype = "bf16";  // a base in fp8 is no base of others
  std::filesystem::create_directories(settings.start);
  const Net net = make_net(drawn, c10::Device(settings.device));
  if (is_resnet(settings)) {
    train::write_checkpoint(
        model_folder(settings),
        {.model = train::model_tensors(*net.module, /*copy_buffers=*/false), .only_model = true});
    return;
  }
  if (net.lora) models::save_adapter(*net.module, *net.lora, adapter_folder(settings));
  models::save_pretrained(dynamic_cast<models::CausalLm&>(*net.module), model_folder(settings));
}

// ---------------------------------------------------------------- a step

class ModelStep {
 public:
  enum class Phase { kForward, kBackward, kOptimizer };
  ModelStep(const ModelSettings& settings, World world);
  ModelStep(const ModelStep&) = delete;
  ModelStep& operator=(const ModelStep&) = delete;

  // Forward, backward, clipping and AdamW. Returns the loss.
  at::Tensor step(const ModelBatch& batch);

  // Called after each part of an eager step was launched.
  void on_phase(std::function<void(Phase)> called) { on_phase_ = std::move(called); }
  // Called before parameters and optimizer state change; in a captured step before the whole step.
  void before_update(std::function<void()> called) { before_update_ = std::move(called); }

  // The contents of its checkpoint, as the Trainer saves it; tensors are the model's own.
  train::CheckpointContents contents(std::int64_t step);

  double parameters(bool trainable = false) const;  // all, or those
  // Floating-point operations of a step with settings.batch_size samples, forward and backward:
  //   gpt      6 N + 12 L T C for a token (N parameters, L layers, T tokens, C channels)
  //   lora     4 N + 6 n + 12 L T C (N frozen, n trained: a frozen weight has no gradient)
  //   resnet   6 for each multiplication of a forward's convolutions and last layer
  double flops() const;

 private:
  at::Tensor eager_step(const ModelBatch& batch);

  ModelSettings settings_;
  World world_;
  c10::Device device_;
  Net net_;
  std::optional<DistributedDataParallel<std::shared_ptr<torch::nn::Module>>> wrapped_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<CapturedStep> captured_;
  std::function<void(Phase)> on_phase_;
  std::function<void()> before_update_;
};

ModelStep::ModelStep(const ModelSettings& settings, World world)
    : settings_(settings),
      world_(std::move(world)),
      device_(settings.device),
      net_(make_net(settings, device_)) {
  const optim::AdamWOptions options{
      .lr = settings.lr, .betas = {kBeta1, kBeta2}, .weight_decay = kWeightDecay};
  if (settings.ddp) {
    wrapped_.emplace(net_.module, world_, DdpOptions{.force_reducer = settings.force_reducer});
    if (settings.sharded)
      optimizer_ = std::make_unique<ShardedOptimizer>(*wrapped_, options);
    else
      optimizer_ = std::make_unique<optim::ReplicatedOptimizer>(*wrapped_, options);
  } else {
    optimizer_ = std::make_unique<optim::ReplicatedOptimizer>(
        optim::NamedParameters(net_.module->named_parameters().pairs()), options);
  }
  if (settings.mode != "captured") return;
  captured_ = std::make_unique<CapturedStep>(
      *optimizer_, CapturedStepOptions{{.max_grad_norm = kMaxGradNorm}, net_.module->parameters()},
      [this](const CapturedStep::Tensors& inputs, int) {
        return CapturedStep::Tensors{eager_step({inputs[0], inputs[1]})};
      });
}

at::Tensor ModelStep::step(const ModelBatch& batch) {
  if (!captured_) return eager_step(batch);
  if (before_update_) before_update_();
  return captured_->run({batch.data, batch.target})[0];
}

at::Tensor ModelStep::eager_step(const ModelBatch& batch) {
  const auto reached = [this](Phase phase) {
    if (on_phase_) on_phase_(phase);
  };
  at::Tensor loss;
  {
    const optim::Autocast autocast(device_, type_of(settings_));
    const nn::Fp8Autocast fp8(fp8_of(settings_));
    loss = net_.loss(batch);
  }
  if (wrapped_) loss = wrapped_->reducer().watch(loss);
  reached(Phase::kForward);
  loss.backward();
  reached(Phase::kBackward);
  if (before_update_ && !captured_) before_update_();
  optimizer_->step({.max_grad_norm = settings_.clip ? kMaxGradNorm : 0});
  optimizer_->zero_grad();
  if (settings_.barrier) world_.barrier();
  reached(Phase::kOptimizer);
  return loss.detach();
}

train::CheckpointContents ModelStep::contents(std::int64_t step) {
  train::CheckpointContents all;
  if (net_.lora) {
    all.files = {.stem = models::kAdapterStem, .config = models::kAdapterConfig};
    all.model = models::lora_tensors(*net_.module, *net_.lora);
    all.model_config = models::adapter_config_text(*net_.module, *net_.lora);
  } else {
    all.model = train::model_tensors(*net_.module, /*copy_buffers=*/true);
  }
  all.optimizer = optimizer_->state_dict({.copy = false});
  all.state.global_step = step;
  return all;
}

double ModelStep::parameters(bool trainable) const {
  double count = 0;
  for (const at::Tensor& parameter : net_.module->parameters())
    if (!trainable || parameter.requires_grad()) count += static_cast<double>(parameter.numel());
  return count;
}

double ModelStep::flops() const {
  const auto batch = static_cast<double>(settings_.batch_size);
  if (is_resnet(settings_))
    return batch * plan::flops_per_token({.config = resnet_config(settings_),
                                          .image_size = settings_.sequence_length});
  const models::CausalLmConfig config = lm_config(settings_);
  const auto length = static_cast<double>(settings_.sequence_length);
  const auto width = static_cast<double>(config.spec().width);
  const double trained = parameters(true), frozen = parameters() - trained;
  const double token =
      4 * frozen + 6 * trained + 12 * static_cast<double>(config.layers()) * length * width;
  return batch * length * token;
}

// ---------------------------------------------------------------- a rank

constexpr std::int64_t kDistinctBatches = 4;  // while steps are timed
constexpr int kStepsAroundSave = 8;

// Asks the driver, since LibTorch has no name without its CUDA headers. Empty when there is none.
std::string cuda_name(int index) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "";
  const auto name = reinterpret_cast<int (*)(char*, int, int)>(::dlsym(library, "cuDeviceGetName"));
  std::array<char, 256> text{};
  if (name == nullptr || name(text.data(), static_cast<int>(text.size()) - 1, index) != 0)
    return "";
  return text.data();
}

class Trainee {
 public:
  // `rank` is not the world's for ranks that do not communicate.
  Trainee(ModelSettings settings, World world, int rank, int ranks)
      : settings_(std::move(settings)),
        world_(std::move(world)),
        rank_(rank),
        ranks_(ranks),
        device_(world_.device()) {
    settings_.device = device_.str();
  }

  json obey(const json& order) {
    const std::string what = order.at("do");
    if (what == "write") {
      if (rank_ == 0) write_start(settings_);
      release();
      return json::object();
    }
    if (what == "new") return begin(order);
    if (what == "drop") {
      model_.reset();
      release();
      return json::object();
    }
    LOCKSTEP_ASSERT(model_ != nullptr);
    if (what == "train") return train_steps(order);
    if (what == "time") {
      settings_.batch_size = order.value("batch_size", settings_.batch_size);
      return time_steps(order.at("warmup"), order.at("steps"));
    }
    if (what == "breakdown") return breakdown(order.at("steps"));
    if (what == "kernels") return kernels(order.at("steps"));
    LOCKSTEP_ASSERT(what == "save");
    return save(order.at("folder"), order.at("saves"));
  }

 private:
  // Frees memory that the others need while they are timed.
  void release() const {
    if (device_.is_cuda()) c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
  }

  json begin(const json& order) {
    model_.reset();
    release();
    settings_.dtype = order.at("dtype").get<std::string>();
    settings_.mode = order.at("mode").get<std::string>();
    settings_.lr = order.at("lr");
    settings_.ddp = order.at("ddp");
    settings_.exact = order.at("exact");
    optim::set_tf32(order.at("tf32"));
    model_ = std::make_unique<ModelStep>(settings_, world_);
    trained_ = 0;
    if (device_.is_cuda()) c10::getDeviceAllocator(c10::kCUDA)->resetPeakStats(device_.index());
    return {{"parameters", model_->parameters()},
            {"trainable", model_->parameters(true)},
            {"flops", model_->flops()},
            {"device", device_.is_cuda() ? cuda_name(device_.index()) : "cpu"}};
  }

  json train_steps(const json& order) {
    ModelSettings sized = settings_;
    sized.batch_size = order.at("batch_size");
    const int steps = order.at("steps");
    const int rank = order.value("same", false) ? 0 : rank_;
    std::vector<at::Tensor> losses;
    for (int step = 0; step < steps; ++step)
      losses.push_back(model_->step(make_batch(sized, step * ranks_ + rank)).clone());
    std::vector<double> values;
    for (const at::Tensor& loss : losses) values.push_back(loss.item<double>());
    trained_ += steps;
    release();
    return {{"losses", values}};
  }

  std::vector<ModelBatch> batches() const {
    std::vector<ModelBatch> made;
    for (std::int64_t i = 0; i < kDistinctBatches; ++i)
      made.push_back(make_batch(settings_, i * ranks_ + rank_));
    return made;
  }

  at::Tensor step(const std::vector<ModelBatch>& batches) {
    return model_->step(batches[static_cast<std::size_t>(trained_++) % batches.size()]);
  }

  json time_steps(int warmup, int steps) {
    const auto inputs = batches();
    for (int i = 0; i < warmup; ++i) step(inputs);
    Marks marks(device_);
    marks.add();
    at::Tensor loss;
    for (int i = 0; i < steps; ++i) {
      loss = step(inputs);
      marks.add();
    }
    json answer{{"ms", marks.between()}, {"loss", loss.item<double>()}};
    const auto [peak, reserved] = memory();
    answer["peak_bytes"] = peak;
    answer["reserved_bytes"] = reserved;
    release();
    return answer;
  }

  // Peaks since "new": what is allocated, and what is held for it. 0 on the CPU.
  std::pair<std::int64_t, std::int64_t> memory() const {
    if (!device_.is_cuda()) return {0, 0};
    const auto stats = c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(device_.index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return {stats.allocated_bytes[kAll].peak, stats.reserved_bytes[kAll].peak};
  }

  // Medians over steps of the time until each part's work is done in the stream.
  json breakdown(int steps) {
    const auto inputs = batches();
    step(inputs);
    std::array<std::vector<double>, 3> parts;
    for (int i = 0; i < steps; ++i) {
      Marks marks(device_);
      marks.add();
      model_->on_phase([&](ModelStep::Phase) { marks.add(); });
      step(inputs);
      model_->on_phase({});
      const auto ms = marks.between();
      if (ms.size() != parts.size()) return json::object();  // a step without such parts
      for (std::size_t part = 0; part < parts.size(); ++part) parts[part].push_back(ms[part]);
    }
    release();
    return {{"forward_ms", median(parts[0])},
            {"backward_ms", median(parts[1])},
            {"optimizer_ms", median(parts[2])}};
  }

  // From LibTorch's profiler: how much of a step each kernel takes.
  json kernels(int steps) {
    namespace profiler = torch::autograd::profiler;
    using torch::profiler::impl::ActivityType;
    const auto inputs = batches();
    step(inputs);
    const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
    const std::set<ActivityType> activities{ActivityType::CUDA};
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
    for (int i = 0; i < steps; ++i) step(inputs);
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    const auto result = profiler::disableProfiler();
    std::map<std::string, std::pair<int, double>> sums;
    for (const auto& event : result->events()) {
      if (event.deviceType() != c10::DeviceType::CUDA) continue;
      auto& [count, ms] = sums[event.name()];
      ++count;
      ms += static_cast<double>(event.durationNs()) * 1e-6;
    }
    json all = json::array();
    for (const auto& [name, sum] : sums)
      all.push_back({{"name", name},
                     {"count", static_cast<double>(sum.first) / steps},
                     {"ms", sum.second / steps}});
    release();
    return {{"kernels", all}};
  }

  // The step after a save begins waits for the copy before it changes anything. The time beyond the
  // median of the steps around it is the stall; blocked_ms is the host's share. Steps before those
  // bring an idle GPU to its usual clocks.
  json save(const std::string& folder, int saves) {
    using Clock = Deadline::Clock;
    const auto ms_since = [](Clock::time_point start) { return 1e3 * seconds_since(start); };
    train::AsyncSaver saver({.output_dir = folder, .limit = 1});
    const auto inputs = batches();
    json stalls = json::array();
    for (int number = 0; number < saves; ++number) {
      for (int i = 0; i < kStepsAroundSave; ++i) step(inputs);
      Marks marks(device_);
      marks.add();
      const auto train = [&] {
        for (int i = 0; i < kStepsAroundSave; ++i) {
          step(inputs);
          marks.add();
        }
      };
      train();
      auto start = Clock::now();
      saver.begin(model_->contents(trained_));
      double blocked_ms = ms_since(start);
      model_->before_update([&] {
        start = Clock::now();
        saver.wait_copied();
        blocked_ms += ms_since(start);
      });
      step(inputs);
      model_->before_update({});
      marks.add();
      train();
      std::vector<double> ms = marks.between();
      const double with_save = ms[kStepsAroundSave];
      ms.erase(ms.begin() + kStepsAroundSave);
      const auto outcome = saver.wait();
      LOCKSTEP_ASSERT(outcome.has_value());
      if (!outcome->committed) throw Error("bench", outcome->alert);
      stalls.push_back({{"stall_ms", with_save - median(ms)},
                        {"blocked_ms", blocked_ms},
                        {"copy_ms", outcome->copy_ms},
                        {"write_ms", outcome->write_ms}});
    }
    return {{"stalls", stalls}};
  }

  ModelSettings settings_;
  World world_;
  int rank_, ranks_;
  c10::Device device_;
  std::unique_ptr<ModelStep> model_;
  std::int64_t trained_ = 0;
};

}  // namespace

int model_rank(const json& description, const std::string& orders) {
  const auto settings = description.get<ModelSettings>();
  if (settings.threads > 0) torch::set_num_threads(settings.threads);
  if (settings.cached) cache_cpu_memory();
  const auto body = [&](World& world, int rank, int ranks) {
    Trainee trainee(settings, world, rank, ranks);
    serve(orders, rank, [&](const json& order) { return trainee.obey(order); });
  };
  if (settings.alone) {
    World own;
    body(own, static_cast<int>(env::get_int("RANK", 0, 4096).value_or(0)),
         static_cast<int>(env::get_int("WORLD_SIZE", 1, 4096).value_or(1)));
    return 0;
  }
  return run([&](World& world) { body(world, world.rank(), world.size()); },
             {.device = c10::Device(settings.device)});
}

}  // namespace lockstep::bench
