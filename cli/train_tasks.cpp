#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <type_traits>

#include "cli/task_config.h"
#include "cli/train_commands.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/instruction.h"
#include "lockstep/data/token_shards.h"
#include "lockstep/data/tokenize.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/models/resnet.h"
#include "lockstep/nn/block.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/effective_batch.h"
#include "lockstep/train/run_control.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using data::Batch;

// ---------------------------------------------------------------- data

// LibTorch's own headers: C++ text that is there wherever this program runs.
fs::path torch_headers() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&at::globalContext), &info) == 0 ||
      info.dli_fname == nullptr)
    throw UsageError("train", "LibTorch's library cannot be located. Give data.path a folder.");
  return fs::path(info.dli_fname).parent_path().parent_path() / "include" / "torch";
}

// The bytes of the files in their order; 256 stands between two of them.
std::vector<std::int16_t> read_bytes(const std::vector<std::string>& files, std::int64_t most) {
  std::vector<std::int16_t> tokens;
  for (const std::string& file : files) {
    errno = 0;
    std::ifstream in(file, std::ios::binary);
    if (!in) data::refuse_text_file(file, errno);
    for (char c; in.get(c);) {
      if (static_cast<std::int64_t>(tokens.size()) >= most) return tokens;
      tokens.push_back(static_cast<unsigned char>(c));
    }
    if (in.bad()) data::refuse_text_file(file, errno != 0 ? errno : EIO);
    tokens.push_back(data::ByteTokenizer::kEndOfText);
  }
  return tokens;
}

// Rows of length + 1 tokens: all but the last are read, all but the first are predicted.
class Windows : public data::Dataset {
 public:
  explicit Windows(at::Tensor rows) : rows_(std::move(rows)) {}
  std::int64_t size() const override { return rows_.size(0); }
  data::Example get(std::int64_t index, data::SampleRandom&) const override {
    const at::Tensor row = rows_[index].to(at::kLong);
    return {row.slice(0, 0, -1), row.slice(0, 1)};
  }
  std::optional<Batch> get_batch(data::Indices indices, const data::RandomKey&) const override {
    const at::Tensor wanted =
        at::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()), at::kLong);
    const at::Tensor rows = rows_.index_select(0, wanted).to(at::kLong);
    Batch batch;
    batch.data = rows.slice(1, 0, -1).contiguous();
    batch.target = rows.slice(1, 1).contiguous();
    batch.tokens = data::count_tokens(batch.target, batch.data.size(0));
    return batch;
  }

 private:
  at::Tensor rows_;
};

// A token beyond the vocabulary is found here, on the CPU and with its sample's number; on a GPU it
// would end the process somewhere else.
class InVocabulary : public data::Dataset {
 public:
  // `settable`: the vocabulary comes from the training file, not from a given model.
  InVocabulary(data::DatasetPtr inner, std::int64_t size, bool settable)
      : inner_(std::move(inner)), max_(size), settable_(settable) {
    // Data for another model is a mistake in the training file, not of a sample, where the first
    // one shows it.
    data::SampleRandom random({}, 0);
    if (inner_->size() > 0) InVocabulary::get(0, random);
  }
  std::int64_t size() const override { return inner_->size(); }
  data::Example get(std::int64_t index, data::SampleRandom& random) const override {
    data::Example example = inner_->get(index, random);
    check(example.data);
    check(example.target);
    return example;
  }
  Batch collate(std::vector<data::Example> examples) const override {
    return inner_->collate(std::move(examples));
  }
  std::optional<Batch> get_batch(data::Indices indices, const data::RandomKey& key) const override {
    std::optional<Batch> batch = inner_->get_batch(indices, key);
    if (!batch) return batch;
    check(batch->data);
    check(batch->target);
    return batch;
  }

 private:
  void check(const at::Tensor& tokens) const {
    if (!tokens.defined() || tokens.numel() == 0) return;
    const auto largest = tokens.max().item<std::int64_t>();
    if (largest < max_) return;
    throw UsageError("train",
                     "the data has the token {}, and the model's vocabulary ends at {}. It was "
                     "probably made for another one. {}",
                     largest, max_ - 1,
                     settable_ ? fmt::format("Set model.vocab_size to {} or more.", largest + 1)
                               : "Make the data with the tokenizer of this model.");
  }

  data::DatasetPtr inner_;
  std::int64_t max_;
  bool settable_;
};

struct Data {
  data::DatasetPtr train;
  data::DatasetPtr eval{};
  data::SamplerPtr sampler{};
  std::optional<std::int64_t> end_of_text{};
  std::optional<PromptFormat> format{};  // for texts that were made from records
};

Data byte_data(const DataConfig& config) {
  const std::string path = config.path == kTorchHeaders ? torch_headers().string() : config.path;
  const std::vector<std::string> files = text_files(path, config.suffix);
  const std::vector<std::int16_t> tokens = read_bytes(files, config.max_bytes);
  const std::int64_t rows = byte_rows(config, {.tokens = static_cast<std::int64_t>(tokens.size()),
                                               .files = static_cast<std::int64_t>(files.size())});
  const std::int64_t width = config.length + 1;
  const std::int64_t eval_rows = config.eval_bytes / width;
  const at::Tensor all =
      at::tensor(tokens, at::kShort).narrow(0, 0, rows * width).view({rows, width});
  Data data{.train = std::make_shared<Windows>(all.narrow(0, 0, rows - eval_rows)),
            .end_of_text = data::ByteTokenizer::kEndOfText};
  if (eval_rows > 0)
    data.eval = std::make_shared<Windows>(all.narrow(0, rows - eval_rows, eval_rows));
  return data;
}

Data token_data(const DataConfig& config, const TrainingArguments& a) {
  const auto shards = std::make_shared<data::TokenShards>(config.train_files, config.length);
  Data data{.train = shards};
  // Without it one shuffle goes over all windows, as PyTorch's DistributedSampler would.
  if (config.order == "shards") data.sampler = shards->sampler(train::data_seed(a));
  if (config.evaluates)
    data.eval = std::make_shared<data::TokenShards>(config.eval_files, config.length);
  return data;
}

// Prompts and responses as tokens; only responses are learned from.
Data instruction_data(const TaskConfig& task, const TrainingArguments& a) {
  const DataConfig& config = task.data;
  const auto read = [&](const std::string& path) {
    data::InstructionRows rows = read_instructions(task, path);
    if (const std::string cut = what_was_cut(rows); !cut.empty()) log::warning("train", "{}", cut);
    return rows;
  };
  data::InstructionRows rows = read(config.path);
  const std::int64_t end_of_text = rows.options().encoder.end_of_text;
  const data::RecordKind kind = rows.kind();
  const auto train = std::make_shared<data::InstructionDataset>(std::move(rows));
  Data data{.train = train,
            .end_of_text = end_of_text,
            .format = PromptFormat{.kind = kind, .texts = config.prompt}};
  if (config.tokenizer) data.format->tokenizer = fs::absolute(config.tokenizer->path());
  // As in Hugging Face, one rank's samples of an update; if the update's size is given, all its
  // samples, so that the order does not depend on the number of ranks.
  if (config.group_by_length)
    data.sampler = train->length_grouped(train::effective_batch(a, 1), train::data_seed(a));
  if (config.evaluates)
    data.eval = std::make_shared<data::InstructionDataset>(read(config.eval_path));
  return data;
}

// Noise, and the class that a random linear map of it gives: something to learn.
Data random_data(const DataConfig& config, const TrainingArguments& a) {
  const optim::WithSeed seeded(train::data_seed(a));
  const at::Tensor teacher = torch::randn({config.features, config.classes});
  const auto make = [&](std::int64_t count) {
    const at::Tensor x = torch::randn({count, config.features});
    return std::make_shared<data::TensorDataset>(x, x.matmul(teacher).argmax(1));
  };
  Data data{.train = make(config.samples)};
  if (config.evaluates) data.eval = make(config.eval_samples);
  return data;
}

// Noise around a colour for each class: images of any size without a file, the same for an index in
// every epoch.
Data image_data(const DataConfig& config, const TrainingArguments& a) {
  const auto make = [&](std::int64_t count, std::int64_t first) {
    const auto seed = train::data_seed(a);
    return data::make_dataset(count, [=](std::int64_t index, data::SampleRandom&) {
      data::SampleRandom random({.seed = seed, .epoch = 0}, first + index);
      const auto label = static_cast<std::int64_t>(random.below(config.classes));
      data::SampleRandom tint({.seed = seed, .epoch = 1}, label);
      const at::Tensor colour = torch::tensor(
          {tint.uniform(-1, 1), tint.uniform(-1, 1), tint.uniform(-1, 1)}, at::kFloat);
      const at::Tensor pixels =
          torch::randn({3, config.image_size, config.image_size}, data::generator(random));
      return data::Example{pixels + colour.view({3, 1, 1}), torch::tensor(label, at::kLong)};
    });
  };
  Data data{.train = make(config.samples, 0)};
  if (config.evaluates) data.eval = make(config.eval_samples, config.samples);
  return data;
}

Data make_data(const TaskConfig& task, const TrainingArguments& a) {
  const DataConfig& config = task.data;
  if (config.name == "bytes") return byte_data(config);
  if (config.name == "tokens") return token_data(config, a);
  if (config.name == "instructions") return instruction_data(task, a);
  if (config.name == "images") return image_data(config, a);
  return random_data(config, a);
}

// ---------------------------------------------------------------- models

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, double smoothing) {
  return torch::nn::functional::cross_entropy(
      logits.flatten(0, -2), target.flatten(),
      torch::nn::functional::CrossEntropyFuncOptions().label_smoothing(smoothing));
}

// Initial weights: from `checkpoint import`, another run, or transformers.
void load_weights(const std::string& folder, torch::nn::Module& module) {
  if (folder.empty()) return;
  check_whole(folder, io::Depth::kFull);
  train::load_weights(folder, module);
}

// Loss and accuracy for a model that returns logits.
template <typename Module>
void set_loss(TrainerTask& task, std::shared_ptr<Module> net, double smoothing) {
  // With a device map the logits are where the head is, and losses go back to the rank's device.
  task.loss = [net, smoothing](const Batch& batch) {
    const at::Tensor logits = net->forward(batch.data);
    if constexpr (std::is_base_of_v<nn::Staged, Module>)
      if (!net->stage().last) return LossOutput(logits);  // what the next stage takes
    const at::Tensor target = batch.target.to(logits.device());
    return LossOutput(cross_entropy(logits, target, smoothing).to(batch.target.device()), logits);
  };
  task.totals = [](const Batch& batch, const at::Tensor& logits) {
    const at::Tensor right = logits.argmax(-1) == batch.target.to(logits.device());
    return std::map<std::string, at::Tensor>{{"accuracy", right.sum().to(batch.target.device())}};
  };
  task.module = net;
}

// Training needs only the loss, which a language model computes without holding all logits; an
// evaluation computes the accuracy from them.
void set_language_loss(TrainerTask& task, const models::CausalLmPtr& net, double smoothing) {
  set_loss(task, net, smoothing);
  if (smoothing != 0) return;
  task.loss = [net](const Batch& batch) {
    at::Tensor logits;
    const bool trains = torch::GradMode::is_enabled();
    const at::Tensor loss = net->loss(batch.data, batch.target, trains ? nullptr : &logits);
    return LossOutput(loss.to(batch.target.device()), logits);
  };
}

models::CausalLmPtr make_net(const ModelConfig& model, std::optional<std::int64_t> end_of_text) {
  if (!model.hugging_face) {
    models::CausalLmConfig config{.model = model.gpt};
    if (end_of_text) config.eos_token_ids = {*end_of_text};
    const auto net = models::make_causal_lm(config);
    load_weights(model.weights, *net);
    return net;
  }
  const bool nf4 = model.load_in_4bit;
  if (model.weights.empty()) return models::make_causal_lm(*model.hugging_face, {.nf4 = nf4});
  check_whole(model.weights, io::Depth::kFull);
  const auto net = models::load_pretrained(model.weights, {.nf4 = nf4});
  net->train();
  return net;
}

// The devices that auto and balanced spread a model over.
std::vector<std::string> devices_of(const World& world) {
  if (world.device().is_cpu()) return {"cpu"};
  std::vector<std::string> all;
  const auto gpus = static_cast<int>(torch::cuda::device_count());
  for (int i = 0; i < gpus; ++i) all.push_back(fmt::format("cuda:{}", i));
  return all;
}

void place_parts(models::CausalLm& net, const ModelConfig& model, const World& world) {
  if (!model.device_map) return;
  const std::string own = world.device().str();
  const auto map =
      models::read_device_map(*model.device_map, net.config(),
                              world.size() > 1 ? std::vector<std::string>{own} : devices_of(world));
  for (const models::DeviceMap::Part& part : map.parts) {
    const bool on_own =
        world.device().is_cpu() ? part.device.starts_with("cpu") : part.device == own;
    if (world.size() > 1 && !on_own)
      throw UsageError("train",
                       "model.device_map puts {} on {}, and each of the {} ranks has one device, "
                       "{}. A device map is for one process that uses several devices. Start one "
                       "rank, or delete device_map: if the model fits one GPU, ranks are faster.",
                       part.name, part.device, world.size(), own);
  }
  models::place(net, map);
  if (map.devices().size() > 1)
    log::info("train", "the model is split over {}, which work one after the other",
              fmt::join(map.devices(), ", "));
}

void make_language_model(TrainerTask& task, const TaskConfig& wanted, const TrainingArguments& a,
                         const Mesh& mesh, std::optional<std::int64_t> end_of_text) {
  const ModelConfig& model = wanted.model;
  // In half precision adapters convert the frozen base, and trials of batches run on one rank: both
  // need it whole.
  const bool whole = (wanted.lora && (a.bf16 || a.fp16)) || a.auto_find_batch_size;
  const bool offload = train::fsdp_plan(a).cpu_offload;
  std::optional<ShardedConstruction> divided;
  std::optional<PipelinedConstruction> split;
  if (!whole && mesh.size("pipeline") > 1)
    split.emplace(
        mesh, static_cast<int>(causal_lm_config(model).layers()),
        PipelineOptions{.schedule = parallel::schedule_named(a.pipeline_parallel_schedule),
                        .shard = {.cpu_offload = offload}});
  else if (!whole && (mesh.size("shard") > 1 || mesh.size("tensor") > 1 || offload))
    divided.emplace(mesh, offload);
  const models::CausalLmPtr net = make_net(model, end_of_text);
  place_parts(*net, model, mesh.world());
  net->use_fp32_residual(a.residual_in_fp32);
  net->use_sequence_parallel(a.sequence_parallel);
  if (train::checkpoints_activations(a))
    net->run_blocks_with(lockstep::checkpoint, models::block_parts(a.gradient_checkpointing.parts));
  set_language_loss(task, net, a.label_smoothing_factor);
  for (data::DatasetPtr* samples : {&task.train_data, &task.eval_data})
    if (*samples)
      *samples = std::make_shared<InVocabulary>(*samples, net->config().vocab_size(),
                                                !model.hugging_face.has_value());
  task.model_config = models::config_json(net->config());
  task.model_files.function = models::function_text(net->config());
}

// ---------------------------------------------------------------- adapters

// Call it after the model has its weights. Checkpoints then hold only the adapters.
void add_adapters(TrainerTask& task, const TaskConfig& wanted, const TrainingArguments& a,
                  c10::Device device) {
  const models::LoraConfig& lora = *wanted.lora;
  torch::nn::Module& module = *task.module;
  models::add_lora(module, lora);
  // Autocasting computes with these bits anyway, but would hold the base twice.
  if (a.bf16) models::convert_frozen_weights(module, at::kBFloat16);
  if (a.fp16) models::convert_frozen_weights(module, at::kHalf);
  // FullyShard and Pipeline free the weights themselves, so they are cast in each step there.
  const bool divided = train::fsdp_plan(a).on || a.pipeline_parallel_degree > 1;
  if (const std::string recipe = train::fp8_recipe_name(a); !recipe.empty() && !divided) {
    module.to(device);  // what is stored stays where it was made
    models::store_frozen_fp8(module, nn::fp8_recipe_of(recipe));
  }
  task.model_config = models::adapter_config_text(module, lora);
  task.model_files = {
      .stem = models::kAdapterStem,
      .config = models::kAdapterConfig,
      .tensors = [net = task.module, lora] { return models::lora_tensors(*net, lora); },
      .function =
          models::function_text(lora, task.model_files.function, wanted.model.load_in_4bit)};
}

}  // namespace

TrainerTask make_task(TaskConfig wanted, const TrainingArguments& a, const Mesh& mesh) {
  const World& world = mesh.world();
  // A CUDA graph has one length, so a GPU gets batches of few lengths.
  constexpr std::int64_t kLengths = 64;
  if (world.device().is_cuda() && wanted.data.padding == "longest" &&
      wanted.data.pad_to_multiple_of == 1) {
    wanted.data.pad_to_multiple_of = kLengths;
    wanted.data.pad_at_most = std::min(wanted.data.length, wanted.model.n_positions);
  }
  const Data data = make_data(wanted, a);
  TrainerTask task;
  task.train_data = data.train;
  task.eval_data = data.eval;
  task.sampler = data.sampler;
  const optim::WithSeed seeded(static_cast<std::uint64_t>(a.seed));  // the same on every rank
  const ModelConfig& model = wanted.model;
  const bool has_language_model = model.name == "gpt" || model.hugging_face;
  if (has_language_model)
    make_language_model(task, wanted, a, mesh, data.end_of_text);
  else if (model.name == "mlp")
    set_loss(task, models::Mlp(model.mlp).ptr(), a.label_smoothing_factor);
  else
    set_loss(task, models::ResNet(resnet_config(wanted)).ptr(), a.label_smoothing_factor);
  if (!has_language_model) load_weights(model.weights, *task.module);
  if (wanted.lora) add_adapters(task, wanted, a, world.device());
  if (data.format) task.model_files.texts = {{kPromptFormat, prompt_format_text(*data.format)}};
  // A split model waits for its other devices.
  task.capturable = !model.device_map;
  task.whole_at_end = false;
  return task;
}

}  // namespace lockstep::cli
