#include "cli/task_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/data/shard_format.h"
#include "lockstep/data/tokenize.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kDefaultLength = 128;  // for a gpt that has no n_positions either
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 32;
constexpr std::int64_t kGpt2Vocabulary = 50'257;
constexpr std::int64_t kMaxPositions = 10'000'000;

// Metrics from evaluating a bundled task (set_loss in train_tasks.cpp, and the Trainer itself).
const std::vector<std::string> kMetrics{"eval_loss", "eval_accuracy", "eval_runtime",
                                        "eval_samples_per_second"};

// `gpt` is short for {name: gpt}. Reports top-level keys that are written inside the map.
Node map_of(const train::NodePtr& given, const char* key, Problems& problems) {
  const Node node = given ? *given : Node{};
  Node map = node;
  if (!node.is(NodeKind::kMap)) {
    map = Node{};
    map.kind = NodeKind::kMap;
    map.location = node.location;
    if (!node.is(NodeKind::kNull)) {
      Node name = text_node(as_string(node, key));
      name.location = node.location;
      map.entries.push_back({"name", node.location, std::move(name)});
    }
  }
  std::erase_if(map.entries, [&](const Entry& entry) {
    if (train::find_key(entry.key) == nullptr) return false;
    problems.add(
        fmt::format("{}: {} is a key of the top level, not of {}. Write it without "
                    "indentation.",
                    entry.location.text(), entry.key, key));
    return true;
  });
  return map;
}

// Mistakes in the section `name` begin with a place in the training file: that of the key that they
// name ("data.path") or whose value they quote, or of the section.
void add_with_places(const Problems& found, const train::NodePtr& section, const std::string& name,
                     Problems& problems) {
  const std::string whole = section ? section->location.text() : "";
  const std::string file = whole.substr(0, whole.find(':'));
  const std::vector<Entry> none;
  for (const std::string& text : found.texts()) {
    std::string place = whole;
    const auto named = [&](const Entry& entry) {
      return text.find(fmt::format("{}.{}", name, entry.key)) != text.npos;
    };
    const auto quoted = [&](const Entry& entry) {
      return entry.value.is(NodeKind::kString) && text.find(entry.value.text) != text.npos;
    };
    const std::vector<Entry>& entries = section ? section->entries : none;
    auto key = std::ranges::find_if(entries, named);
    if (key == entries.end()) key = std::ranges::find_if(entries, quoted);
    if (key != entries.end()) place = key->location.text();
    const bool placed = place.empty() || text.starts_with(file + ":");
    problems.add(placed ? text : fmt::format("{}: {}", place, text));
  }
}

// ---------------------------------------------------------------- data

// Whether nothing has that name; what exists may still be unreadable.
bool missing(const std::string& path) {
  std::error_code ignored;
  return fs::status(path, ignored).type() == fs::file_type::not_found;
}

void check_file(const char* key, const std::string& path) {
  if (path.empty()) return;
  if (!missing(path)) return data::check_text_file(path);
  throw UsageError("config",
                   "data.{}: there is no file {}.{} Relative paths begin at {}; with several "
                   "hosts each of them needs the file. It holds records of instruction, input and "
                   "output; docs/data.md says where commonsense_170k.json comes from.",
                   key, path, link_advice(path), fs::current_path().string());
}

void read_bytes_keys(MapReader& keys, DataConfig& data) {
  data.path = keys.text("path", kTorchHeaders);
  data.suffix = keys.text("suffix", data.path == kTorchHeaders ? ".h" : "");
  data.max_bytes = keys.integer("max_bytes", 4'000'000, 1'000, kMaxBytes);
  data.eval_bytes = keys.integer("eval_bytes", 0, 0, data.max_bytes / 2);
  data.evaluates = data.eval_bytes > data.length;
  if (data.eval_bytes > 0 && !data.evaluates)
    throw UsageError("config",
                     "data.eval_bytes {} is too few for one sample of {} tokens and the one after "
                     "it. Raise it to {} or more, or shorten max_seq_len.",
                     data.eval_bytes, data.length, data.length + 1);
}

void check_bytes(const DataConfig& data) {
  if (data.path == kTorchHeaders) {  // LibTorch knows where; there are more than enough
    byte_rows(data, {.tokens = data.max_bytes});
    return;
  }
  ByteCount count;
  for (const std::string& file : text_files(data.path, data.suffix)) {
    std::error_code error;
    const auto size = fs::file_size(file, error);
    if (error) data::refuse_text_file(file, error.value());
    count.tokens += static_cast<std::int64_t>(size) + 1;
    ++count.files;
  }
  byte_rows(data, count);
}

void read_token_keys(MapReader& keys, DataConfig& data) {
  data.order = keys.choice("order", "shards", {"shards", "windows"});
  if (keys.has("path"))
    throw UsageError(
        "config",
        "data: tokens has no path. Name the folder of the shards in dataset_dir, a key "
        "of the top level.");
}

void check_tokens(DataConfig& data, const TrainingArguments& a) {
  if (!a.dataset_dir)
    throw UsageError("config", "data: tokens needs dataset_dir, the folder of the shards.");
  if (const std::string link = link_advice(*a.dataset_dir); !link.empty())
    throw UsageError("config", "dataset_dir {} does not exist.{}", *a.dataset_dir, link);
  data.train_files = data::token_files(*a.dataset_dir, "train");
  data.evaluates = a.eval_strategy != Interval::kNo || a.eval_on_start;
  if (data.evaluates) data.eval_files = data::token_files(*a.dataset_dir, "val");
  for (const auto* files : {&data.train_files, &data.eval_files}) {
    std::uint64_t largest = 0;
    for (const std::string& file : *files)
      largest = std::max(largest, data::TokenFile(file).size());  // also checks its header
    if (!files->empty() && largest <= static_cast<std::uint64_t>(data.length))
      throw UsageError("config",
                       "none of {} token files in {} holds a window of {} tokens and the one after "
                       "it; the largest has {}. Use a shorter max_seq_len or more text.",
                       files->size(), *a.dataset_dir, data.length, largest);
  }
}

void read_instruction_keys(MapReader& keys, DataConfig& data, TaskFiles files, Problems& problems) {
  data.path = keys.text("path", "");
  data.eval_path = keys.text("eval_path", "");
  const std::string tokenizer = keys.text("tokenizer", "");
  if (!tokenizer.empty() && (files == TaskFiles::kChecked || !missing(tokenizer)))
    problems.attempt([&] {
      data.tokenizer = data::Tokenizer::from_file(tokenizer);
      data.tokenizer->text_encoder();  // or says what is missing
    });
  data.padding = keys.choice("padding", "longest", {"longest", "max_length", "packed"});
  data.pad_to_multiple_of = keys.integer("pad_to_multiple_of", 1, 1, data.length);
  data.train_on_prompt = keys.boolean("train_on_prompt", false);
  data.prompt.prompt = keys.text("prompt", data.prompt.prompt);
  data.prompt.prompt_without_input =
      keys.text("prompt_without_input", data.prompt.prompt_without_input);
  data.prompt.response = keys.text("response", data.prompt.response);
  data.group_by_length = keys.boolean("group_by_length", false);
  if (data.pad_to_multiple_of > 1 && data.padding != "longest")
    throw UsageError("config",
                     "data.pad_to_multiple_of is for padding: longest, and with padding: {} every "
                     "row has max_seq_len tokens already. Delete one of them.",
                     data.padding);
  data.evaluates = !data.eval_path.empty();
}

void check_instructions(const DataConfig& data, Problems& problems) {
  if (data.path.empty())
    problems.add("data: instructions needs path, a .json or .jsonl file. Give it.");
  for (const auto& [key, file] : {std::pair("path", data.path), {"eval_path", data.eval_path}})
    problems.attempt([&] { check_file(key, file); });
  if (data.length < 2)
    problems.add(fmt::format("max_seq_len is {}, and instructions need 2 or more.", data.length));
  problems.attempt([&] {
    data::apply(data.prompt, {.instruction = "a", .input = "b"});
    data::apply(data.prompt, {.instruction = "a"});
  });
}

// Reads the keys of `random` and `images`.
void read_random_keys(MapReader& keys, DataConfig& data) {
  const bool images = data.name == "images";
  data.samples = keys.integer("samples", 10'000, 1, 100'000'000);
  data.eval_samples = keys.integer("eval_samples", 0, 0, 100'000'000);
  if (images)
    data.image_size = keys.integer("image_size", 224, 32, 4096);
  else
    data.features = keys.integer("features", 20, 1, 1'000'000);
  data.classes = keys.integer("classes", images ? 1000 : 10, 2, 1'000'000);
  data.evaluates = data.eval_samples > 0;
}

bool has_tokens(const DataConfig& data) {
  return data.name != "random" && data.name != "images";
}

// Keys of the top level that this data does not read.
void check_unread_keys(const TrainingArguments& a, const DataConfig& data, Problems& problems) {
  if (a.dataset_dir && data.name != "tokens")
    problems.add(
        fmt::format("dataset_dir is a folder of token shards, and data: {} does not read it. "
                    "Delete it, or write data: tokens.",
                    data.name));
  if (a.max_seq_len && !has_tokens(data) && !a.tokens_per_update)
    problems.add(fmt::format(
        "max_seq_len is for samples of tokens, and data: {} has none. Delete it.", data.name));
}

void note_unused_evaluation(const TrainingArguments& a, TaskConfig& task) {
  const DataConfig& data = task.data;
  if (data.name == "tokens" || a.eval_strategy != Interval::kNo || a.eval_on_start) return;
  if (data.evaluates)
    task.notes.push_back(
        fmt::format("data.{} is set, and nothing is evaluated. Set eval_strategy, or delete it.",
                    data.name == "bytes" ? "eval_bytes"
                    : !has_tokens(data)  ? "eval_samples"
                                         : "eval_path"));
}

// Tokens of a sample: without max_seq_len, as many as the model has positions. A model that cannot
// be read is refused by read_model().
std::int64_t sample_length(const TrainingArguments& a) {
  if (a.max_seq_len) return *a.max_seq_len;
  if (!a.model || !a.model->is(NodeKind::kMap)) return kDefaultLength;
  try {
    MapReader keys(*a.model, "model");
    const std::string folder = keys.text("path", keys.text("config", ""));
    if (!folder.empty()) return models::read_config(folder).max_positions();
    return keys.integer("n_positions", kDefaultLength, 1, kMaxPositions);
  } catch (const Error&) {
    return kDefaultLength;
  }
}

// Checks the files named by `data`, if they exist.
void check_data(const TrainingArguments& a, DataConfig& data, Problems& problems) {
  if (data.name == "instructions") check_instructions(data, problems);
  try {
    problems.attempt([&] {
      if (data.name == "bytes") check_bytes(data);
      if (data.name == "tokens") check_tokens(data, a);
    });
  } catch (const SystemError& error) {  // a shard that cannot be read
    problems.add(error.what());
  }
}

// Returns whether the kind of data is known, on which the model depends.
bool read_data(const TrainingArguments& a, TaskFiles files, DataConfig& data, Problems& problems) {
  const char* fallback = a.dataset_dir ? "tokens" : "bytes";
  const Node node = map_of(a.data, "data", problems);
  const std::size_t before = problems.size();
  MapReader keys(node, "data", &problems);
  data.name =
      keys.choice("name", fallback, {"bytes", "tokens", "instructions", "random", "images"});
  if (problems.size() > before) return false;
  data.length = sample_length(a);
  check_unread_keys(a, data, problems);
  problems.attempt([&] {
    if (data.name == "bytes") read_bytes_keys(keys, data);
    if (data.name == "tokens") read_token_keys(keys, data);
    if (data.name == "instructions") read_instruction_keys(keys, data, files, problems);
    if (!has_tokens(data)) read_random_keys(keys, data);
  });
  train::add_words_of_others(keys, node, "data", data.name, problems);
  keys.finish();
  // Another wrong key may be the reason for a text that is too short, but not for a missing one,
  // which is always reported.
  const bool named = !data.path.empty() && data.path != kTorchHeaders;
  const bool right = problems.size() == before;
  if (files == TaskFiles::kChecked && (right || (named && missing(data.path))))
    check_data(a, data, problems);
  return true;
}

// ---------------------------------------------------------------- models

// Weights show their shapes; how many heads share them shows only in config.json.
void check_heads(const ModelConfig& model) {
  const std::string path = model.weights + "/config.json";
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return;
  const Node root = parse_json(read_file(path), path);
  const Entry* heads = root.find("num_attention_heads");  // transformers' other name goes first
  if (heads == nullptr) heads = root.find("n_head");
  if (heads == nullptr || !heads->value.is(NodeKind::kInteger)) return;
  if (heads->value.integer == model.gpt.n_head) return;
  throw UsageError("config",
                   "model.n_head is {}, and the weights in {} were trained with {} ({}). The same "
                   "weights would compute something else. Set model.n_head: {}.",
                   model.gpt.n_head, model.weights, heads->value.integer, path,
                   heads->value.integer);
}

// An adapter's folder in place of a model's.
void refuse_adapter(const char* key, const std::string& folder) {
  const std::string config = folder + "/adapter_config.json";
  std::error_code ignored;
  if (!fs::exists(config, ignored) || fs::exists(folder + "/config.json", ignored)) return;
  std::string base;
  try {
    const Node root = parse_json(read_file(config), config);
    const Entry* const entry = root.find("base_model_name_or_path");
    if (entry != nullptr && entry->value.is(NodeKind::kString)) base = entry->value.text;
  } catch (const Error&) {  // by its name it is an adapter's, also if it cannot be read
  }
  throw UsageError("config",
                   "model.{} {} holds an adapter (adapter_config.json), not a model. model.path "
                   "is the folder of its base model{}, and `lora` describes an adapter to train; "
                   "resume_from_checkpoint goes on from a checkpoint's. lockstep checkpoint merge "
                   "makes one model of both.",
                   key, folder, base.empty() ? "" : fmt::format(" ({})", base));
}

// Checks only the names and shapes of the weights; their bytes are read when they are needed.
void check_weights(const TaskConfig& task) {
  const ModelConfig& model = task.model;
  if (model.weights.empty()) return;
  const char* const key = model.hugging_face ? "path" : "weights";
  refuse_adapter(key, model.weights);
  if (!io::SafetensorsSet::exists(model.weights))
    throw UsageError("config",
                     "model.{} {} is not a folder with a model.safetensors.{} Give a checkpoint's "
                     "folder, or one that `lockstep checkpoint import` has made.",
                     key, model.weights, link_advice(model.weights + "/model.safetensors"));
  check_whole(model.weights, io::Depth::kSizes);
  const io::SafetensorsSet files(model.weights);
  if (model.hugging_face) {
    models::find_weights(model.weights, files, *model.hugging_face);
    return;
  }
  train::check_weights(model.weights, files, model_tensors(task));
  if (model.name == "gpt") check_heads(model);
}

void read_gpt_keys(MapReader& keys, ModelConfig& model, const DataConfig& data) {
  const std::int64_t vocabulary = data.tokenizer          ? data.tokenizer->max_id() + 1
                                  : data.name == "tokens" ? kGpt2Vocabulary
                                                          : data::ByteTokenizer::kVocabSize;
  model.gpt.n_layer = keys.integer("n_layer", 4, 1, 1'000);
  model.gpt.n_head = keys.integer("n_head", 4, 1, 1'000);
  model.gpt.n_embd = keys.integer("n_embd", 128, 1, 100'000);
  model.vocab_size = keys.integer("vocab_size", vocabulary, 1, 10'000'000);
  model.n_positions = keys.integer("n_positions", data.length, 1, kMaxPositions);
  model.gpt.vocab_size = model.vocab_size;
  model.gpt.n_positions = model.n_positions;
}

void read_mlp_keys(MapReader& keys, const DataConfig& data, models::MlpConfig& mlp) {
  mlp = {.inputs = data.features, .outputs = data.classes};
  mlp.hidden = keys.integer("hidden", 64, 1, 1'000'000);
  mlp.layers = keys.integer("layers", 1, 0, 1'000);
  mlp.dropout = keys.real("dropout", 0, 0, 0.999);
  mlp.batch_norm = keys.boolean("batch_norm", false);
}

void check_vocabulary(const ModelConfig& model, const DataConfig& data, Problems& problems) {
  if (!data.tokenizer || data.tokenizer->max_id() < model.vocab_size) return;
  const std::int64_t largest = data.tokenizer->max_id();
  problems.add(fmt::format(
      "the model's vocabulary of {} is too small for data.tokenizer {}, whose ids go up to {}. {}",
      model.vocab_size, data.tokenizer->path(), largest,
      model.hugging_face ? "Name the tokenizer of this model."
                         : fmt::format("Set model.vocab_size: {}, or delete it.", largest + 1)));
}

void read_device_map(MapReader& keys, ModelConfig& model) {
  const Node* const map = keys.node("device_map");
  if (map == nullptr) return;
  models::read_device_map(*map, causal_lm_config(model), {"cpu"});  // or says what is wrong
  model.device_map = *map;
}

void check_length(const ModelConfig& model, const DataConfig& data, Problems& problems) {
  // Rows that are padded to the longest in a batch may all be shorter than they could be.
  const bool capped = data.name == "instructions" && data.padding == "longest";
  if (model.n_positions < data.length && !capped)
    problems.add(
        fmt::format("model.n_positions {} is shorter than a sample, max_seq_len {}. Raise "
                    "the one or lower the other.",
                    model.n_positions, data.length));
}

void check_gpt(const ModelConfig& model, const DataConfig& data, Problems& problems) {
  if (model.gpt.n_embd % model.gpt.n_head != 0)
    problems.add(
        fmt::format("model.n_embd {} does not divide into {} heads of equal width. Choose "
                    "n_embd as a multiple of n_head.",
                    model.gpt.n_embd, model.gpt.n_head));
  check_length(model, data, problems);
  check_vocabulary(model, data, problems);
}

// Keys of transformers and bitsandbytes beside load_in_4bit.
void refuse_bitsandbytes(MapReader& keys) {
  for (const char* key :
       {"load_in_8bit", "quantization", "quantization_config", "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"})
    if (keys.has(key))
      throw UsageError("config",
                       "model.{} is not read here. model.load_in_4bit: true means nf4 with double "
                       "quantisation, computed in the type of mixed_precision. Write that alone, "
                       "or mixed_precision: fp8 for a base in 8 bits.",
                       key);
}

// A base in 4 bits is for adapters on ranks that each have all of it.
void check_4_bits(const TrainingArguments& a, Problems& problems) {
  const auto refuse = [&](std::string_view why) {
    problems.add(fmt::format("model.load_in_4bit {}", why));
  };
  if (!a.lora)
    refuse("is for a frozen base, and nothing trains beside it. Add `lora`, or delete it.");
  if (a.mixed_precision == "fp8")
    refuse("and mixed_precision: fp8 are two ways to store the base. Write mixed_precision: bf16.");
  const char* const divided = train::fsdp_plan(a).on           ? "fsdp"
                              : a.tensor_parallel_degree > 1   ? "tensor_parallel_degree"
                              : a.pipeline_parallel_degree > 1 ? "pipeline_parallel_degree"
                                                               : nullptr;
  if (divided != nullptr)
    refuse(
        fmt::format("keeps all of the base on every rank, and {} divides it. Keep one.", divided));
}

// `path` or `config`, exactly one of which is given: config.json says what the model is.
void read_hugging_face_keys(MapReader& keys, ModelConfig& model) {
  model.weights = keys.text("path", "");
  const std::string config = keys.text("config", "");
  model.load_in_4bit = keys.boolean("load_in_4bit", false);
  refuse_bitsandbytes(keys);
  if (!model.weights.empty() && !config.empty())
    throw UsageError("config",
                     "model.path takes the config.json of its own folder. Delete model.config, or "
                     "delete model.path for random weights.");
  if (keys.has("name"))
    throw UsageError("config", "model.name has no meaning beside model.{}. Delete it.",
                     config.empty() ? "path" : "config");
  refuse_adapter(config.empty() ? "path" : "config", config.empty() ? model.weights : config);
  try {
    model.hugging_face = models::read_config(config.empty() ? model.weights : config);
  } catch (const SystemError& error) {  // a file that cannot be read
    throw UsageError("config", "{}", error.what());
  }
  model.vocab_size = model.hugging_face->vocab_size();
  model.n_positions =
      model.hugging_face->spec().positions_end() ? model.hugging_face->max_positions() : INT64_MAX;
}

void note_length(const models::CausalLmConfig& config, TaskConfig& task) {
  if (config.spec().positions_end() || task.data.length <= config.max_positions()) return;
  task.notes.push_back(
      fmt::format("max_seq_len {} is longer than the model's max_position_embeddings {}: it has "
                  "not been trained for such texts.",
                  task.data.length, config.max_positions()));
}

// As in transformers, whose smoothed loss is computed from the logits alone.
void note_load_balancing(const models::CausalLmConfig& config, TaskConfig& task,
                         const TrainingArguments& a) {
  const auto& experts = config.spec().block.mlp.experts;
  if (experts && experts->load_balancing != 0 && a.label_smoothing_factor != 0)
    task.notes.push_back(
        "label_smoothing_factor leaves the load balancing loss out (output_router_logits, "
        "router_aux_loss_coef in config.json), as in transformers: the router is not trained to "
        "use its experts equally.");
}

// The name, if it suits the data; otherwise nothing, and a problem is added.
bool read_name(MapReader& keys, TaskConfig& task, Problems& problems) {
  const std::string& data = task.data.name;
  const char* fallback = data == "random" ? "mlp" : data == "images" ? "resnet50" : "gpt";
  std::string& name = task.model.name;
  if (keys.has("path") || keys.has("config"))
    name = kHuggingFace;
  else
    name = keys.choice("name", fallback, {"gpt", "mlp", "resnet18", "resnet50"});
  const bool right = name == "mlp"                ? data == "random"
                     : name.starts_with("resnet") ? data == "images"
                                                  : has_tokens(task.data);
  if (right) return true;
  problems.add(
      fmt::format("the model {} does not take this data. gpt and Hugging Face's models train on "
                  "bytes, tokens and instructions, mlp on random, resnet18 and resnet50 on images.",
                  name == kHuggingFace ? "of a config.json" : name));
  return false;
}

// Reports what Pipeline would refuse once the model is made.
void check_stages(const models::DecoderSpec& spec, const TrainingArguments& a, Problems& problems) {
  const bool interleaves = a.pipeline_parallel_schedule == "Interleaved1F1B";
  const std::int64_t ranks = a.pipeline_parallel_degree, per_rank = interleaves ? 2 : 1;
  if (spec.layers() < ranks * per_rank)
    problems.add(
        fmt::format("{} stages ({} ranks x {}), and the model has {} block{}. Every stage needs "
                    "one. Lower pipeline_parallel_degree{}.",
                    ranks * per_rank, ranks, per_rank, spec.layers(), spec.layers() == 1 ? "" : "s",
                    interleaves ? ", or set pipeline_parallel_schedule to 1F1B" : ""));
  const auto& experts = spec.block.mlp.experts;
  if (experts && experts->load_balancing != 0 && a.label_smoothing_factor == 0)
    problems.add(
        "pipeline_parallel_degree: the load balancing loss is taken over the routers of all "
        "blocks, and each stage of a pipeline has some of them. Set output_router_logits to false "
        "in config.json.");
}

// `right`: the model has no mistakes so far.
void check_degrees(const TaskConfig& task, const TrainingArguments& a, Problems& problems,
                   bool right) {
  const bool slices = a.tensor_parallel_degree > 1;
  if (!slices && a.pipeline_parallel_degree <= 1) return;
  const char* const key = slices ? "tensor_parallel_degree" : "pipeline_parallel_degree";
  if (task.model.device_map)
    return problems.add(
        fmt::format("model.device_map splits the model over the devices of one rank, and {} over "
                    "ranks. Keep one.",
                    key));
  if (!has_tokens(task.data))
    return problems.add(
        fmt::format("{} is for models of blocks, and {} has none. Delete it, or train a gpt.", key,
                    task.model.name));
  if (!right) return;
  if (a.pipeline_parallel_degree > 1)
    check_stages(causal_lm_config(task.model).spec(), a, problems);
  if (slices)
    problems.attempt([&] {
      models::tensor_cuts(causal_lm_config(task.model).spec(),
                          static_cast<int>(a.tensor_parallel_degree));
    });
}

void read_model(const TrainingArguments& a, TaskFiles files, bool data_is_right, TaskConfig& task,
                Problems& problems) {
  ModelConfig& model = task.model;
  const Node node = map_of(a.model, "model", problems);
  const std::size_t before = problems.size();
  MapReader keys(node, "model", &problems);
  if (!read_name(keys, task, problems) || problems.size() > before) return;
  problems.attempt([&] {
    if (model.name == "gpt") read_gpt_keys(keys, model, task.data);
    if (model.name == "mlp") read_mlp_keys(keys, task.data, model.mlp);
    if (model.name == kHuggingFace)
      problems.attempt([&] { read_hugging_face_keys(keys, model); });
    else
      model.weights = keys.text("weights", "");
    if (model.name == "gpt" || model.name == kHuggingFace) {
      keys.node("device_map");  // known, whether it can be read or not
      if (problems.size() == before) read_device_map(keys, model);
    }
  });
  train::add_words_of_others(keys, node, "model", model.name, problems);
  keys.finish();
  if (problems.size() > before) return;
  if (model.name == "gpt") check_gpt(model, task.data, problems);
  if (model.hugging_face) {
    check_length(model, task.data, problems);
    check_vocabulary(model, task.data, problems);
    note_length(*model.hugging_face, task);
    note_load_balancing(*model.hugging_face, task, a);
  }
  if (model.load_in_4bit) problems.attempt([&] { check_4_bits(a, problems); });
  problems.attempt([&] {
    if (model.device_map && train::fsdp_plan(a).on)
      throw UsageError("config",
                       "model.device_map splits the model over the devices of one rank, and fsdp "
                       "divides it over ranks. Keep one.");
  });
  check_degrees(task, a, problems, /*right=*/problems.size() == before);
  if (has_tokens(task.data) && problems.size() == before)
    problems.attempt([&] {
      models::check_parts(models::block_parts(a.gradient_checkpointing.parts),
                          causal_lm_config(task.model).spec());
    });
  if (!has_tokens(task.data) && train::checkpoints_activations(a))
    problems.add(
        fmt::format("{} is for models of blocks, and {} has none. Delete it, or train a gpt.",
                    a.gradient_checkpointing ? "gradient_checkpointing"
                                             : "fsdp_config.activation_checkpointing",
                    model.name));
  // The weights cannot be checked against an invalid model, and not with data that is wrong, which
  // says how large a vocabulary is where no config.json does.
  const bool checkable = problems.size() == before && (data_is_right || model.hugging_face);
  const bool gone = !model.weights.empty() && !io::SafetensorsSet::exists(model.weights);
  if (files == TaskFiles::kChecked && (checkable || gone))
    problems.attempt([&] { check_weights(task); });
}

// ---------------------------------------------------------------- adapters

void read_lora(const TrainingArguments& a, bool model_is_right, TaskConfig& task,
               Problems& problems) {
  if (!a.lora) return;
  models::LoraConfig lora = models::read_lora_config(*a.lora, "lora", problems);
  // Which layers there are is not known, or which of them are asked for.
  if (!model_is_right || !problems.empty()) return;
  if (task.model.name != "gpt" && !task.model.hugging_face)
    throw UsageError("config", "lora is for language models, and {} is none. Delete it.",
                     task.model.name);
  const models::CausalLmConfig config = causal_lm_config(task.model);
  const models::LoraTargets targets(lora);
  targets.check_ranks(targets.select(config.spec()), config.spec());
  if (task.model.load_in_4bit) {
    std::vector<std::string> in_blocks = models::linear_layers(config.spec());
    std::erase(in_blocks, config.spec().head.name);
    targets.refuse_saved_whole(in_blocks);
  }
  std::string& base = lora.base_model_name_or_path;
  if (base.empty()) base = task.model.weights;
  // PEFT resolves a relative path where it runs, which is rarely where this run began.
  std::error_code ignored;
  if (fs::is_directory(base, ignored)) base = fs::absolute(base).lexically_normal();
  if (task.model.weights.empty())
    task.notes.push_back(
        "lora trains adapters of a frozen model, and this one has random weights. Name a folder "
        "with weights in model.");
  task.lora = std::move(lora);
}

}  // namespace

std::vector<std::string> text_files(const std::string& path, const std::string& suffix) {
  if (missing(path))
    throw UsageError("config", "data.path {} does not exist.{} Relative paths begin at {}.", path,
                     link_advice(path), fs::current_path().string());
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    data::check_text_file(path);
    return {path};
  }
  const auto found =
      data::files_below(path, [&](const std::string& file) { return file.ends_with(suffix); });
  if (found.empty())
    throw UsageError(
        "config", "the folder {} (data.path) holds no file{}. Name one that does.", path,
        suffix.empty() ? "" : fmt::format(" whose name ends in '{}' (data.suffix)", suffix));
  std::vector<fs::path> files(found.begin(), found.end());  // ordered folder by folder
  std::sort(files.begin(), files.end());
  return {files.begin(), files.end()};
}

std::int64_t byte_rows(const DataConfig& data, const ByteCount& count) {
  const std::int64_t width = data.length + 1;
  const std::int64_t rows = std::min(count.tokens, data.max_bytes) / width;
  const std::int64_t eval_rows = data.eval_bytes / width;
  if (rows > eval_rows) return rows;
  const bool cut = count.tokens >= data.max_bytes;
  const std::string found =
      fmt::format("{} has {} bytes{}", data.path, cut ? data.max_bytes : count.tokens - count.files,
                  cut && count.files > 0 ? " within data.max_bytes" : "");
  if (rows > 0)
    throw UsageError("config",
                     "{}, and data.eval_bytes {} leaves none of them to train on. Lower "
                     "data.eval_bytes, or give more text.",
                     found, data.eval_bytes);
  throw UsageError("config",
                   "{}, too few for one sample of {}. Use a shorter max_seq_len, or more text.",
                   found, data.length);
}

models::CausalLmConfig causal_lm_config(const ModelConfig& model) {
  return model.hugging_face ? *model.hugging_face : models::CausalLmConfig{.model = model.gpt};
}

models::ResNetConfig resnet_config(const TaskConfig& task) {
  return {.depth = task.model.name == "resnet18" ? 18 : 50, .num_classes = task.data.classes};
}

std::vector<io::TensorShape> model_tensors(const TaskConfig& task) {
  if (task.model.name == "mlp") return models::tensors_of(task.model.mlp);
  if (has_tokens(task.data)) return models::tensors_of(causal_lm_config(task.model));
  return models::tensors_of(resnet_config(task));
}

std::uint64_t checkpoint_bytes(const TaskConfig& task) {
  if (task.lora) return models::adapter_bytes(*task.lora, causal_lm_config(task.model).spec());
  std::uint64_t bytes = 0;
  for (const io::TensorShape& tensor : model_tensors(task))
    bytes += io::tensor_bytes(tensor.dtype, tensor.shape).value_or(0);
  return bytes;
}

TaskConfig read_task(const TrainingArguments& arguments, TaskFiles files) {
  Problems problems;
  TaskConfig task = read_task(arguments, files, problems);
  problems.raise();
  return task;
}

TaskConfig read_task(const TrainingArguments& arguments, TaskFiles files, Problems& problems) {
  TaskConfig task;
  bool known = false;
  Problems of_data, of_model, of_lora;
  of_data.attempt([&] { known = read_data(arguments, files, task.data, of_data); });
  const bool right = of_data.empty();
  // Skips checks that depend on a part with mistakes.
  if (known) of_model.attempt([&] { read_model(arguments, files, right, task, of_model); });
  of_lora.attempt([&] { read_lora(arguments, known && of_model.empty(), task, of_lora); });
  add_with_places(of_data, arguments.data, "data", problems);
  add_with_places(of_model, arguments.model, "model", problems);
  add_with_places(of_lora, arguments.lora, "lora", problems);
  task.data_is_right = right && (of_model.empty() || arguments.max_seq_len);
  // No text is too long for a model that could not be read.
  if (!of_model.empty()) task.model.n_positions = INT64_MAX;
  if (files == TaskFiles::kUnread) return task;
  if (right) problems.attempt([&] { train::check_evaluation(arguments, task.data.evaluates); });
  problems.attempt([&] { train::check_metric(arguments, kMetrics); });
  if (right) note_unused_evaluation(arguments, task);
  return task;
}

void check_whole(const std::string& folder, io::Depth depth) {
  if (!io::has_manifest(folder)) return;
  if (const auto faults = io::damage_of(folder, depth); !faults.empty())
    throw UsageError("train", "the model's weights in {} are damaged: {}", folder,
                     io::describe(faults));
}

// ---------------------------------------------------------------- the contents of files

namespace {

// A row is padded to the longest in its batch, so the longest of all must fit.
void check_positions(const TaskConfig& task, const data::InstructionRows& rows) {
  const std::vector<std::int64_t> lengths = rows.lengths();
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const std::int64_t multiple = task.data.pad_to_multiple_of;
  const std::int64_t padded =
      task.data.pad_at_most > 0 ? longest : (longest + multiple - 1) / multiple * multiple;
  if (task.data.padding != "longest" || padded <= task.model.n_positions) return;
  throw UsageError("config",
                   "{}: the longest sample has {} tokens{}, and model.n_positions is {}. Set "
                   "model.n_positions: {}, or lower max_seq_len.",
                   rows.options().source, longest,
                   padded == longest ? ""
                                     : fmt::format(", which data.pad_to_multiple_of {} pads to {}",
                                                   multiple, padded),
                   task.model.n_positions, padded);
}

data::InstructionRows read_rows(const DataConfig& data, const std::string& path,
                                const data::ReadProgress& progress) {
  data::InstructionOptions options;
  options.max_length = data.length;
  options.length_key = "max_seq_len";
  options.source = path;
  options.padding = data.padding == "packed"       ? data::Padding::kPacked
                    : data.padding == "max_length" ? data::Padding::kMaxLength
                                                   : data::Padding::kLongest;
  options.pad_to_multiple_of = data.pad_to_multiple_of;
  options.pad_at_most = data.pad_at_most;
  options.train_on_prompt = data.train_on_prompt;
  options.prompt = data.prompt;
  if (data.tokenizer) options.encoder = data.tokenizer->text_encoder();
  options.chat = data.tokenizer;
  if (!progress) return data::InstructionRows(data::load_instructions(path), options);
  // Parsing takes about the first half of the time, and cutting into rows the second.
  const auto items = data::load_instructions(
      path, [&](std::uint64_t done, std::uint64_t total) { progress(done, 2 * total); });
  data::InstructionRows rows(items, options, [&](std::uint64_t done, std::uint64_t total) {
    progress(total + done, 2 * total + 1);  // not the end yet: the rest of them follows
  });
  progress(1, 1);
  return rows;
}

}  // namespace

data::InstructionRows read_instructions(const TaskConfig& task, const std::string& path,
                                        const data::ReadProgress& progress) {
  data::InstructionRows rows = read_rows(task.data, path, progress);
  check_positions(task, rows);
  return rows;
}

std::string what_was_cut(const data::InstructionRows& rows) {
  const data::InstructionCounts& counts = rows.counts();
  if (counts.truncated == 0 && counts.dropped == 0) return {};
  return fmt::format(
      "{}: of {} samples {} are longer than max_seq_len {} and lose their end, {} are skipped "
      "because their prompt alone fills it.",
      rows.options().source, counts.read, counts.truncated, rows.options().max_length,
      counts.dropped);
}

}  // namespace lockstep::cli
