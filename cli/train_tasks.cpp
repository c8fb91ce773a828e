#include "cli/train_tasks.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/map_reader.h"
#include "lockstep/data/byte_tokenizer.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/instruction.h"
#include "lockstep/data/token_shards.h"
#include "lockstep/io/manifest.h"
#include "lockstep/models/gpt.h"
#include "lockstep/models/mlp.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/parallel/checkpoint.h"
#include "lockstep/train/checkpoint.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using data::Batch;

constexpr std::int64_t kDefaultLength = 128;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 32;

// `gpt` stands for {name: gpt}.
Node map_of(const Node& node, const char* key, const char* fallback) {
  if (node.is(NodeKind::kMap)) return node;
  Node map;
  map.kind = NodeKind::kMap;
  map.place = node.place;
  const Node name = node.is(NodeKind::kNull) ? text_node(fallback) : node;
  map.entries.push_back({"name", node.place, text_node(as_string(name, key))});
  return map;
}

// ---------------------------------------------------------------- data

// LibTorch's own headers: C++ text that is there wherever this program runs.
fs::path torch_headers() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&at::globalContext), &info) == 0 ||
      info.dli_fname == nullptr)
    throw UsageError("train", "LibTorch's library cannot be located. Give data.path a folder.");
  return fs::path(info.dli_fname).parent_path().parent_path() / "include" / "torch";
}

// The bytes of the files in a fixed order; 256 stands between two of them.
std::vector<std::int16_t> read_bytes(const fs::path& path, const std::string& suffix,
                                     std::int64_t most) {
  std::vector<fs::path> files;
  if (fs::is_regular_file(path)) {
    files.push_back(path);
  } else if (fs::is_directory(path)) {
    for (const auto& entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file() && entry.path().string().ends_with(suffix))
        files.push_back(entry.path());
  }
  if (files.empty())
    throw UsageError("train", "data.path {} holds no file that ends in '{}'.", path.string(),
                     suffix);
  std::sort(files.begin(), files.end());
  std::vector<std::int16_t> tokens;
  for (const fs::path& file : files) {
    std::ifstream in(file, std::ios::binary);
    for (char c; in.get(c);) {
      if (static_cast<std::int64_t>(tokens.size()) >= most) return tokens;
      tokens.push_back(static_cast<unsigned char>(c));
    }
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
  InVocabulary(data::DatasetPtr inner, std::int64_t size) : inner_(std::move(inner)), most_(size) {}
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
    if (largest < most_) return;
    throw UsageError("train",
                     "the data has the token {}, and the model's vocabulary ends at {}. It was "
                     "probably made for another one. Set model.vocab_size to {} or more.",
                     largest, most_ - 1, largest + 1);
  }

  data::DatasetPtr inner_;
  std::int64_t most_;
};

struct Data {
  data::DatasetPtr train;
  data::DatasetPtr eval{};
  data::SamplerPtr sampler{};
  std::int64_t inputs = 0;   // features of a sample; 0: a sample is a sequence of tokens
  std::int64_t classes = 0;  // or the size of the vocabulary
  std::optional<std::int64_t> end_of_text{};
};

Data byte_data(MapReader& keys, const TrainingArguments& a) {
  const std::string path = keys.text("path", "torch-headers");
  const std::string suffix = keys.text("suffix", path == "torch-headers" ? ".h" : "");
  const std::int64_t most = keys.integer("max_bytes", 4'000'000, 1'000, kMostBytes);
  const std::int64_t eval_bytes = keys.integer("eval_bytes", 0, 0, most / 2);
  const std::int64_t length = a.max_seq_len.value_or(kDefaultLength);
  const std::vector<std::int16_t> tokens =
      read_bytes(path == "torch-headers" ? torch_headers() : fs::path(path), suffix, most);
  const std::int64_t rows = static_cast<std::int64_t>(tokens.size()) / (length + 1);
  const std::int64_t eval_rows = eval_bytes / (length + 1);
  if (rows - eval_rows < 1)
    throw UsageError("train",
                     "{} has {} bytes, too few for one sample of {}. Use a shorter "
                     "max_seq_len, or more text.",
                     path, tokens.size(), length);
  const at::Tensor all =
      at::tensor(tokens, at::kShort).narrow(0, 0, rows * (length + 1)).view({rows, length + 1});
  Data data{.train = std::make_shared<Windows>(all.narrow(0, 0, rows - eval_rows)),
            .classes = data::ByteTokenizer::kVocabSize,
            .end_of_text = data::ByteTokenizer::kEndOfText};
  if (eval_rows > 0)
    data.eval = std::make_shared<Windows>(all.narrow(0, rows - eval_rows, eval_rows));
  return data;
}

Data token_data(MapReader& keys, const TrainingArguments& a) {
  const std::string order = keys.choice("order", "shards", {"shards", "windows"});
  if (!a.dataset_dir)
    throw UsageError("train", "data: tokens needs dataset_dir, the folder of the shards.");
  const std::int64_t length = a.max_seq_len.value_or(kDefaultLength);
  const auto shards =
      std::make_shared<data::TokenShards>(data::token_files(*a.dataset_dir, "train"), length);
  Data data{.train = shards, .classes = 0};
  // Without it one shuffle goes over all windows, as PyTorch's DistributedSampler would.
  if (order == "shards")
    data.sampler = shards->sampler(static_cast<std::uint64_t>(a.data_seed.value_or(a.seed)));
  if (a.eval_strategy != Interval::kNo || a.eval_on_start)
    data.eval =
        std::make_shared<data::TokenShards>(data::token_files(*a.dataset_dir, "val"), length);
  return data;
}

// Prompts and responses, byte by byte; only responses are learned from.
Data instruction_data(MapReader& keys, const TrainingArguments& a) {
  const std::string path = keys.text("path", "");
  const std::string eval_path = keys.text("eval_path", "");
  if (path.empty())
    throw UsageError("train", "data: instructions needs path, a .json or .jsonl file. Give it.");
  for (const std::string& file : {path, eval_path})
    if (!file.empty() && !fs::is_regular_file(file))
      throw UsageError("train",
                       "data: instructions: there is no file {}. Relative paths begin at {}.", file,
                       fs::current_path().string());
  data::InstructionOptions options;
  options.max_length = a.max_seq_len.value_or(kDefaultLength);
  const std::string padding =
      keys.choice("padding", "longest", {"longest", "max_length", "packed"});
  options.padding = padding == "packed"       ? data::Padding::kPacked
                    : padding == "max_length" ? data::Padding::kMaxLength
                                              : data::Padding::kLongest;
  options.pad_to_multiple_of = keys.integer("pad_to_multiple_of", 1, 1, options.max_length);
  options.train_on_prompt = keys.boolean("train_on_prompt", false);
  options.prompt.prompt = keys.text("prompt", options.prompt.prompt);
  options.prompt.prompt_without_input =
      keys.text("prompt_without_input", options.prompt.prompt_without_input);
  options.prompt.response = keys.text("response", options.prompt.response);
  const bool grouped = keys.boolean("group_by_length", false);
  const auto train =
      std::make_shared<data::InstructionDataset>(data::load_instructions(path), options);
  const data::InstructionCounts& counts = train->counts();
  if (counts.truncated > 0 || counts.dropped > 0)
    log::warning("train",
                 "{}: of {} samples {} are longer than max_seq_len {} and lose their end, {} are "
                 "left out because their prompt alone fills it.",
                 path, counts.read, counts.truncated, options.max_length, counts.dropped);
  Data data{.train = train,
            .classes = data::ByteTokenizer::kVocabSize,
            .end_of_text = data::ByteTokenizer::kEndOfText};
  if (grouped)
    data.sampler =
        train->length_grouped(a.per_device_train_batch_size * a.gradient_accumulation_steps,
                              static_cast<std::uint64_t>(a.data_seed.value_or(a.seed)));
  if (!eval_path.empty())
    data.eval =
        std::make_shared<data::InstructionDataset>(data::load_instructions(eval_path), options);
  return data;
}

// Noise, and the class that a random linear map of it gives: something to learn.
Data random_data(MapReader& keys, const TrainingArguments& a) {
  const std::int64_t samples = keys.integer("samples", 10'000, 1, 100'000'000);
  const std::int64_t eval_samples = keys.integer("eval_samples", 0, 0, 100'000'000);
  const std::int64_t features = keys.integer("features", 20, 1, 1'000'000);
  const std::int64_t classes = keys.integer("classes", 10, 2, 1'000'000);
  const optim::WithSeed seeded(static_cast<std::uint64_t>(a.data_seed.value_or(a.seed)));
  const at::Tensor teacher = torch::randn({features, classes});
  const auto make = [&](std::int64_t count) {
    const at::Tensor x = torch::randn({count, features});
    return std::make_shared<data::TensorDataset>(x, x.matmul(teacher).argmax(1));
  };
  Data data{.train = make(samples), .inputs = features, .classes = classes};
  if (eval_samples > 0) data.eval = make(eval_samples);
  return data;
}

Data make_data(const TrainingArguments& a) {
  const Node node = map_of(a.data, "data", "bytes");
  MapReader keys(node, "data");
  const std::string name =
      keys.choice("name", "bytes", {"bytes", "tokens", "instructions", "random"});
  Data data = name == "bytes"          ? byte_data(keys, a)
              : name == "tokens"       ? token_data(keys, a)
              : name == "instructions" ? instruction_data(keys, a)
                                       : random_data(keys, a);
  keys.finish();
  return data;
}

// ---------------------------------------------------------------- models

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, double smoothing) {
  return torch::nn::functional::cross_entropy(
      logits.flatten(0, -2), target.flatten(),
      torch::nn::functional::CrossEntropyFuncOptions().label_smoothing(smoothing));
}

// Weights to begin with: of `checkpoint import`, of another run, or of transformers.
void load_weights(const std::string& folder, torch::nn::Module& module) {
  if (folder.empty()) return;
  if (!fs::exists(fs::path(folder) / "model.safetensors") &&
      !fs::exists(fs::path(folder) / "model.safetensors.index.json"))
    throw UsageError("train",
                     "model.weights {} is no folder with a model.safetensors. Give a checkpoint's "
                     "folder, or one that `lockstep checkpoint import` has made.",
                     folder);
  if (fs::exists(fs::path(folder) / io::kManifestName)) {
    auto faults = io::verify(folder);
    std::erase_if(faults, [](const io::Fault& f) { return f.kind == io::FaultKind::kExtra; });
    if (!faults.empty())
      throw UsageError("train", "model.weights {} is damaged: {}", folder, io::describe(faults));
  }
  train::load_weights(folder, module);
}

// Loss and accuracy of a model that gives logits.
template <typename Net>
void set_loss(TrainerTask& task, Net net, double smoothing) {
  task.loss = [net, smoothing](const Batch& batch) mutable {
    return cross_entropy(net(batch.data), batch.target, smoothing);
  };
  task.totals = [net](const Batch& batch) mutable {
    const at::Tensor right = net(batch.data).argmax(-1) == batch.target;
    return std::map<std::string, at::Tensor>{{"accuracy", right.sum()}};
  };
  task.module = net.ptr();
}

void make_gpt(TrainerTask& task, MapReader& keys, const TrainingArguments& a, const Data& data) {
  const std::int64_t vocabulary = data.classes > 0 ? data.classes : 50'257;
  const models::GptConfig config{
      .n_layer = keys.integer("n_layer", 4, 1, 1'000),
      .n_head = keys.integer("n_head", 4, 1, 1'000),
      .n_embd = keys.integer("n_embd", 128, 1, 100'000),
      .vocab_size = keys.integer("vocab_size", vocabulary, 1, 10'000'000),
      .n_positions =
          keys.integer("n_positions", a.max_seq_len.value_or(kDefaultLength), 1, 10'000'000)};
  const std::string weights = keys.text("weights", "");
  keys.finish();
  models::Gpt net(config);
  load_weights(weights, *net);
  if (a.gradient_checkpointing)
    net->run_blocks_with([](models::Block block, std::vector<at::Tensor> inputs) {
      return lockstep::checkpoint(std::move(block), std::move(inputs));
    });
  set_loss(task, net, a.label_smoothing_factor);
  for (data::DatasetPtr* samples : {&task.train_data, &task.eval_data})
    if (*samples) *samples = std::make_shared<InVocabulary>(*samples, config.vocab_size);
  task.model_config = models::hugging_face_config(config, data.end_of_text);
}

void make_mlp(TrainerTask& task, MapReader& keys, const TrainingArguments& a, const Data& data) {
  const models::MlpConfig config{.inputs = data.inputs,
                                 .hidden = keys.integer("hidden", 64, 1, 1'000'000),
                                 .layers = keys.integer("layers", 1, 0, 1'000),
                                 .outputs = data.classes,
                                 .dropout = keys.real("dropout", 0, 0, 0.999),
                                 .batch_norm = keys.boolean("batch_norm", false)};
  const std::string weights = keys.text("weights", "");
  keys.finish();
  if (a.gradient_checkpointing)
    throw UsageError("train",
                     "gradient_checkpointing is for models of blocks, and mlp has none. Delete it, "
                     "or train a gpt.");
  models::Mlp net(config);
  load_weights(weights, *net);
  set_loss(task, net, a.label_smoothing_factor);
}

}  // namespace

TrainerTask make_task(const TrainingArguments& a) {
  const Data data = make_data(a);
  TrainerTask task;
  task.train_data = data.train;
  task.eval_data = data.eval;
  task.sampler = data.sampler;
  const Node node = map_of(a.model, "model", data.inputs > 0 ? "mlp" : "gpt");
  MapReader keys(node, "model");
  const std::string name = keys.choice("name", data.inputs > 0 ? "mlp" : "gpt", {"gpt", "mlp"});
  if ((name == "mlp") != (data.inputs > 0))
    throw UsageError("train",
                     "the model {} does not take this data. gpt trains on bytes, tokens and "
                     "instructions, mlp on random.",
                     name);
  const optim::WithSeed seeded(static_cast<std::uint64_t>(a.seed));  // the same on every rank
  if (name == "gpt") {
    make_gpt(task, keys, a, data);
  } else {
    make_mlp(task, keys, a, data);
  }
  return task;
}

}  // namespace lockstep::cli
