// Our sides of the benchmarks that train models: a rank that trains on request (models.h). Model,
// wrapper and optimizer are used as lockstep::Trainer uses them.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <filesystem>

#include "bench/harness.h"
#include "bench/marks.h"
#include "bench/models.h"
#include "bench/processes.h"
#include "cli/task_config.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/memory/cpu_cache.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/models/resnet.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/run.h"
#include "lockstep/train/captured_step.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

constexpr std::uint64_t kSeed = 42;

// ---------------------------------------------------------------- the model that is asked for

// The keys of a training file that define its model, as `lockstep train` reads them.
struct Asked {
  models::CausalLmConfig lm{};
  std::optional<models::LoraConfig> lora{};
  std::optional<models::ResNetConfig> resnet{};
  std::optional<nn::Fp8Recipe> fp8{};
  bool residual_in_fp32 = false;
};

Asked asked(const ModelSettings& settings) {
  if (settings.file.empty())
    return {.lm = {.model = models::GptConfig{.n_layer = settings.n_layer,
                                              .n_head = settings.n_head,
                                              .n_embd = settings.n_embd,
                                              .vocab_size = settings.classes,
                                              .n_positions = settings.sequence_length,
                                              .tie_word_embeddings = false}}};
  const TrainingArguments a = train::load_config(settings.file, settings.flags).arguments;
  const cli::TaskConfig task = cli::read_task(a, cli::TaskFiles::kUnread);
  if (settings.kind == "resnet") return {.resnet = cli::resnet_config(task)};
  Asked result{.lm = cli::causal_lm_config(task.model),
               .lora = task.lora,
               .residual_in_fp32 = a.residual_in_fp32};
  if (settings.dtype == "fp8") result.fp8 = nn::fp8_recipe_of(train::fp8_recipe_name(a));
  return result;
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
  const std::int64_t vocabulary = settings.classes;
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
  return {images, hashed(numbers).remainder(settings.classes)};
}

// ---------------------------------------------------------------- models

struct Net {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const ModelBatch&)> loss;
  std::optional<models::LoraConfig> lora{};
  std::optional<nn::Fp8Recipe> fp8{};
};

// Billions of weights are drawn on the device where they stay.
models::CausalLmPtr drawn_lm(const Asked& model, at::ScalarType type, c10::Device device) {
  const torch::NoGradGuard no_grad;
  const auto made =
      models::make_causal_lm(model.lm, {.dtype = type, .device = device, .draw = false});
  for (const auto& parameter : made->named_parameters()) {
    at::Tensor weight = parameter.value();
    if (weight.dim() == 1)
      weight.fill_(parameter.key().ends_with("bias") ? 0 : 1);  // of a norm
    else
      weight.normal_(0, 0.02);
  }
  return made;
}

// An adapter begins as zero. peers/model_peer.py sets the same.
void set_adapters(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.named_parameters()) {
    if (parameter.key().find("lora_B") == std::string::npos) continue;
    at::Tensor& weight = parameter.value();
    const at::Tensor numbers = torch::arange(weight.numel(), weight.options());
    weight.copy_((numbers.remainder(7) - 3).view_as(weight) * 0x1p-6);
  }
}

// A frozen base is held in the compute dtype; trained weights are float.
Net make_lm(const Asked& model, const ModelSettings& settings, c10::Device device) {
  const at::ScalarType type = model.lora && settings.dtype != "fp32" ? at::kBFloat16 : at::kFloat;
  const models::CausalLmPtr made =
      settings.start.empty()
          ? drawn_lm(model, type, device)
          : models::load_pretrained(model_folder(settings), {.dtype = type, .device = device});
  made->to(device);
  made->use_fp32_residual(model.residual_in_fp32);
  if (model.lora && settings.start.empty()) models::add_lora(*made, *model.lora);
  if (model.lora && !settings.start.empty()) models::load_adapter(*made, adapter_folder(settings));
  made->train(!settings.exact);
  if (settings.exact) set_adapters(*made);
  if (model.lora && model.fp8) models::store_frozen_fp8(*made, *model.fp8);
  return {made, [made](const ModelBatch& batch) { return made->loss(batch.data, batch.target); },
          model.lora, model.fp8};
}

Net make_resnet(const Asked& model, const ModelSettings& settings, c10::Device device) {
  const auto made = models::ResNet(*model.resnet).ptr();
  if (!settings.start.empty()) train::load_weights(model_folder(settings), *made);
  made->to(device);
  if (device.is_cuda())
    for (auto& parameter : made->parameters())
      if (parameter.dim() == 4)
        parameter.set_data(parameter.data().contiguous(at::MemoryFormat::ChannelsLast));
  made->train();
  return {made, [made](const ModelBatch& batch) {
            return torch::cross_entropy_loss(made->forward(batch.data), batch.target);
          }};
}

at::ScalarType type_of(const ModelSettings& settings) {
  return settings.dtype == "fp32" ? at::kFloat : at::kBFloat16;
}

Net make_net(const ModelSettings& settings, c10::Device device) {
  torch::manual_seed(kSeed);
  const Asked model = asked(settings);
  return model.resnet ? make_resnet(model, settings, device) : make_lm(model, settings, device);
}

// Batch `number` on the settings' device; the same numbers as in peers/model_peer.py.
// Tokens: low ids are frequent, and every second one follows from its predecessor, so there is
// something to learn. Images and classes: hashes of their positions.
ModelBatch make_batch(const ModelSettings& settings, std::int64_t step) {
  const at::Tensor like =
      torch::empty({0}, at::TensorOptions(c10::Device(settings.device)).dtype(at::kLong));
  return is_resnet(settings) ? image_batch(settings, step, like)
                             : token_batch(settings, step, like);
}

// Draws the initial weights and writes them to settings.start: model/ and, with lora, adapter/.
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
  ModelStep(const ModelSettings& settings, World world);
  ModelStep(const ModelStep&) = delete;
  ModelStep& operator=(const ModelStep&) = delete;

  // Forward, backward, clipping and AdamW. Returns the loss.
  at::Tensor step(const ModelBatch& batch);

  double parameters() const;

 private:
  at::Tensor eager_step(const ModelBatch& batch);

  ModelSettings settings_;
  World world_;
  c10::Device device_;
  Net net_;
  std::shared_ptr<Parallelism> parallelism_;  // null: one rank without any
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<CapturedStep> captured_;
};

ModelStep::ModelStep(const ModelSettings& settings, World world)
    : settings_(settings),
      world_(std::move(world)),
      device_(settings.device),
      net_(make_net(settings, device_)) {
  const optim::AdamWOptions options{
      .lr = settings.lr, .betas = {kBeta1, kBeta2}, .weight_decay = kWeightDecay};
  if (settings.ddp) {
    parallelism_ = parallelize(*net_.module, world_, {.shard_optimizer = settings.sharded});
    optimizer_ = parallelism_->make_optimizer({{net_.module->parameters(), options}});
  } else {
    optimizer_ = std::make_unique<optim::ReplicatedOptimizer>(
        optim::NamedParameters(net_.module->named_parameters().pairs()), options);
  }
  if (settings.mode != "captured") return;
  captured_ = std::make_unique<CapturedStep>(
      *optimizer_,
      CapturedStepOptions{{.max_grad_norm = settings.clip ? kMaxGradNorm : 0},
                          net_.module->parameters()},
      [this](const CapturedStep::Tensors& inputs, int) {
        return CapturedStep::Tensors{eager_step({inputs[0], inputs[1]})};
      });
}

at::Tensor ModelStep::step(const ModelBatch& batch) {
  return captured_ ? captured_->run({batch.data, batch.target})[0] : eager_step(batch);
}

at::Tensor ModelStep::eager_step(const ModelBatch& batch) {
  at::Tensor loss;
  if (parallelism_) parallelism_->before_forward();
  {
    const optim::Autocast autocast(device_, type_of(settings_));
    const nn::Fp8Autocast fp8(net_.fp8);
    loss = net_.loss(batch);
  }
  if (parallelism_)
    parallelism_->backward(parallelism_->watch(loss), /*last=*/true);
  else
    loss.backward();
  optimizer_->step({.max_grad_norm = settings_.clip ? kMaxGradNorm : 0});
  optimizer_->zero_grad();
  if (settings_.barrier) world_.barrier();
  return loss.detach();
}

double ModelStep::parameters() const {
  double count = 0;
  for (const at::Tensor& parameter : net_.module->parameters())
    count += static_cast<double>(parameter.numel());
  return count;
}

// ---------------------------------------------------------------- a rank

constexpr std::int64_t kDistinctBatches = 4;  // while steps are timed

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
    LOCKSTEP_ASSERT(what == "time");
    settings_.batch_size = order.value("batch_size", settings_.batch_size);
    return time_steps(order.at("warmup"), order.at("steps"));
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
    return {{"parameters", model_->parameters()}};
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
    release();
    return answer;
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
