#include "bench/model_step.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/models/resnet.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/parallel/ddp.h"

namespace lockstep::bench {
namespace {

constexpr std::uint64_t kSeed = 42;

[[noreturn]] void unknown_model(const ModelSettings& settings) {
  throw UsageError("bench", "{} has no model '{}'.", settings.kind, settings.model);
}

// ---------------------------------------------------------------- sizes

models::GptConfig gpt_config(const ModelSettings& settings) {
  const auto made = [&](std::int64_t layers, std::int64_t heads, std::int64_t width,
                        std::int64_t vocabulary) {
    return models::GptConfig{.n_layer = layers,
                             .n_head = heads,
                             .n_embd = width,
                             .vocab_size = vocabulary,
                             .n_positions = settings.sequence_length};
  };
  if (settings.model == "124m") return made(12, 12, 768, settings.vocab_size);
  if (settings.model == "350m") return made(24, 16, 1024, settings.vocab_size);
  if (settings.model == "774m") return made(36, 20, 1280, settings.vocab_size);
  if (settings.model == "1.3b") return made(24, 16, 2048, settings.vocab_size);
  if (settings.model == "tiny") return made(2, 4, 32, 128);
  unknown_model(settings);
}

models::LlamaConfig phi3_config(const ModelSettings& settings) {
  models::LlamaConfig c{.vocab_size = 32064,
                        .hidden_size = 3072,
                        .intermediate_size = 8192,
                        .num_hidden_layers = 32,
                        .num_attention_heads = 32,
                        .rms_norm_eps = 1e-5,
                        .fused_projections = true};
  if (settings.model == "phi3-mini") return c;
  if (settings.model != "tiny") unknown_model(settings);
  c.vocab_size = 128;
  c.hidden_size = 32;
  c.intermediate_size = 48;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.max_position_embeddings = settings.sequence_length;
  return c;
}

models::CausalLmConfig lm_config(const ModelSettings& settings) {
  if (settings.kind == "gpt") return {.model = gpt_config(settings)};
  return {.model = phi3_config(settings)};
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
  if (settings.model != "tiny") unknown_model(settings);
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

template <typename Module>
ModelStep::Net net_of(std::shared_ptr<Module> module) {
  module->train();
  return {module,
          [module](const ModelBatch& batch) {
            const at::Tensor logits = module->forward(batch.data);
            return torch::cross_entropy_loss(logits.flatten(0, -2), batch.target.flatten());
          },
          {}};
}

// Head and loss are fused where the model can; "plain" uses only ATen's operations.
ModelStep::Net lm_of(const models::CausalLmPtr& module, const ModelSettings& settings) {
  module->train();
  if (settings.mode == "plain") module->use_fused(false);
  module->use_fp32_residual(settings.residual_in_fp32);
  return {module,
          [module](const ModelBatch& batch) { return module->loss(batch.data, batch.target); },
          {}};
}

// Billions of untrained weights are drawn on the device where they stay.
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

ModelStep::Net make_lm(const ModelSettings& settings, at::ScalarType type, c10::Device device) {
  const bool lora = settings.kind == "lora";
  models::CausalLmPtr made;
  if (!settings.start.empty())
    made = models::load_pretrained(model_folder(settings), {.dtype = type, .device = device});
  else if (lora)
    made = drawn_base(settings, type, device);
  else
    made = models::make_causal_lm(lm_config(settings));
  made->to(device);
  ModelStep::Net net = lm_of(made, settings);
  if (!lora) return net;
  if (settings.start.empty()) {
    net.lora = lora_config(settings);
    models::add_lora(*made, *net.lora);
  } else {
    net.lora = models::load_adapter(*made, adapter_folder(settings));
  }
  made->train(!settings.exact);
  if (settings.exact) set_adapters(*made);
  return net;
}

ModelStep::Net make_resnet(const ModelSettings& settings, c10::Device device) {
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
  return settings.dtype == "bf16" ? at::kBFloat16 : at::kFloat;
}

// A frozen base is held in the compute dtype; what is trained is float.
ModelStep::Net make_net(const ModelSettings& settings, c10::Device device) {
  torch::manual_seed(kSeed);
  if (is_resnet(settings)) return make_resnet(settings, device);
  return make_lm(settings, settings.kind == "lora" ? type_of(settings) : at::kFloat, device);
}

// ---------------------------------------------------------------- arithmetic

// Multiplications in the forward pass of one image, from the shapes and positions of the weights.
double resnet_multiplications(const ModelSettings& settings) {
  const models::ResNetConfig config = resnet_config(settings);
  double sum = 0;
  for (const io::TensorShape& tensor : models::tensors_of(config)) {
    if (tensor.shape.size() != 4 && tensor.name != "fc.weight") continue;
    double weights = 1;
    for (const std::int64_t size : tensor.shape) weights *= static_cast<double>(size);
    double side = 1;  // of its output
    if (tensor.name == "conv1.weight") {
      side = std::ceil(static_cast<double>(settings.sequence_length) / 2);
    } else if (tensor.shape.size() == 4) {
      const int stage = tensor.name.at(5) - '0';  // layer1 to layer4
      // The first convolution of a block that narrows comes before the one with a stride.
      const bool before =
          stage > 1 && config.expansion() > 1 && tensor.name.substr(6) == ".0.conv1.weight";
      side = std::ceil(static_cast<double>(settings.sequence_length) /
                       std::exp2(stage + (before ? 0 : 1)));
    }
    sum += weights * side * side;
  }
  return sum;
}

}  // namespace

ModelBatch make_batch(const ModelSettings& settings, std::int64_t step) {
  const at::Tensor like =
      torch::empty({0}, at::TensorOptions(c10::Device(settings.device)).dtype(at::kLong));
  return is_resnet(settings) ? image_batch(settings, step, like)
                             : token_batch(settings, step, like);
}

void write_start(const ModelSettings& settings) {
  ModelSettings drawn = settings;
  drawn.start.clear();
  std::filesystem::create_directories(settings.start);
  const ModelStep::Net net = make_net(drawn, c10::Device(settings.device));
  if (is_resnet(settings)) {
    train::write_checkpoint(
        model_folder(settings),
        {.model = train::model_tensors(*net.module, /*copy_buffers=*/false), .only_model = true});
    return;
  }
  if (net.lora) models::save_adapter(*net.module, *net.lora, adapter_folder(settings));
  models::save_pretrained(dynamic_cast<models::CausalLm&>(*net.module), model_folder(settings));
}

ModelStep::ModelStep(const ModelSettings& settings, World world)
    : settings_(settings), device_(settings.device), net_(make_net(settings, device_)) {
  const optim::AdamWOptions options{
      .lr = settings.lr, .betas = {kBeta1, kBeta2}, .weight_decay = kWeightDecay};
  if (settings.ddp) {
    wrapped_.emplace(net_.module, std::move(world),
                     DdpOptions{.force_reducer = settings.force_reducer});
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
    loss = net_.loss(batch);
  }
  if (wrapped_) loss = wrapped_->reducer().watch(loss);
  reached(Phase::kForward);
  loss.backward();
  reached(Phase::kBackward);
  if (before_update_ && !captured_) before_update_();
  optimizer_->step({.max_grad_norm = kMaxGradNorm});
  optimizer_->zero_grad();
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

double ModelStep::parameters() const {
  double count = 0;
  for (const at::Tensor& parameter : net_.module->parameters())
    count += static_cast<double>(parameter.numel());
  return count;
}

double ModelStep::trainable() const {
  double count = 0;
  for (const at::Tensor& parameter : net_.module->parameters())
    if (parameter.requires_grad()) count += static_cast<double>(parameter.numel());
  return count;
}

double ModelStep::flops() const {
  const auto batch = static_cast<double>(settings_.batch_size);
  if (is_resnet(settings_)) return batch * 6 * resnet_multiplications(settings_);
  const models::CausalLmConfig config = lm_config(settings_);
  const auto length = static_cast<double>(settings_.sequence_length);
  const auto width = static_cast<double>(config.spec().width);
  const double frozen = parameters() - trainable();
  const double token =
      4 * frozen + 6 * trainable() + 12 * static_cast<double>(config.layers()) * length * width;
  return batch * length * token;
}

}  // namespace lockstep::bench
