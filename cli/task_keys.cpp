#include "cli/task_keys.h"

#include <fmt/format.h>

namespace lockstep::cli {
namespace {

struct TaskKey {
  std::string_view map;
  std::string_view of;  // the values of `name` that have it
  std::string_view name;
  std::string_view accepts;
  std::string_view fallback;
  std::string_view help;

  std::string full_name() const { return fmt::format("{}.{}", map, name); }
};

constexpr TaskKey kKeys[] = {
    {"model", "", "name", "gpt, mlp, resnet18 or resnet50", "gpt; mlp for data: random",
     "a bundled model; `model: gpt` is short for it"},
    {"model", "", "path", "folder", "", "a Hugging Face folder: its config.json and its weights"},
    {"model", "", "config", "folder or file", "",
     "a config.json: random weights in the shape that it describes"},
    {"model", "gpt, mlp, resnet", "weights", "folder", "",
     "begins with the weights in a folder's model.safetensors"},
    {"model", "language models", "device_map", "auto, balanced or {name: device}", "one device",
     "splits the model over devices, in a process of one rank (docs/models.md)"},
    {"model", "gpt", "n_layer", "integer, from 1", "4", "blocks"},
    {"model", "gpt", "n_head", "integer, from 1", "4", "attention heads of a block"},
    {"model", "gpt", "n_embd", "integer, a multiple of n_head", "128", "width"},
    {"model", "gpt", "vocab_size", "integer, from 1",
     "257 for bytes, 50257 for tokens; the tokenizer's", "tokens that the model knows"},
    {"model", "gpt", "n_positions", "integer, from 1", "max_seq_len, or 128",
     "the longest sequence"},
    {"model", "mlp", "hidden", "integer, from 1", "64", "width of a hidden layer"},
    {"model", "mlp", "layers", "integer, from 0", "1", "hidden layers"},
    {"model", "mlp", "dropout", "number, from 0 to 0.999", "0", "probability of dropping a value"},
    {"model", "mlp", "batch_norm", "boolean", "false", "BatchNorm after each hidden layer"},
    {"data", "", "name", "bytes, tokens, instructions, random or images",
     "bytes; tokens with dataset_dir", "a kind of data; `data: bytes` is short for it"},
    {"data", "bytes", "path", "file or folder", "torch-headers",
     "text files; torch-headers are LibTorch's own headers"},
    {"data", "bytes", "suffix", "text", "none; .h for torch-headers",
     "only files whose names end so"},
    {"data", "bytes", "max_bytes", "integer, from 1000", "4000000", "reads no more than this"},
    {"data", "bytes", "eval_bytes", "integer, from 0", "0", "the last bytes, for evaluations"},
    {"data", "tokens", "order", "shards or windows", "shards",
     "shuffles inside shards, or over all windows as PyTorch's DistributedSampler"},
    {"data", "instructions", "path", "file", "needed", "a .json or .jsonl file of records"},
    {"data", "instructions", "eval_path", "file", "", "records for evaluations"},
    {"data", "instructions", "tokenizer", "folder or file", "bytes",
     "a Hugging Face tokenizer.json; model.vocab_size must reach its last id"},
    {"data", "instructions", "padding", "longest, max_length or packed", "longest",
     "rows as long as the batch's longest, as max_seq_len, or several samples in a row"},
    {"data", "instructions", "pad_to_multiple_of", "integer, from 1",
     "1; on a GPU 64, up to max_seq_len",
     "rounds the length of padded rows up; for padding: longest"},
    {"data", "instructions", "train_on_prompt", "boolean", "false",
     "learns prompts too, not responses alone"},
    {"data", "instructions", "prompt", "text with {instruction} and {input}",
     "### Instruction: ... ### Input: ... ### Response:", "the prompt of a record with an input"},
    {"data", "instructions", "prompt_without_input", "text with {instruction}",
     "### Instruction: ... ### Response:", "the prompt of a record without one"},
    {"data", "instructions", "response", "text with {output} or {answer}", "{output}",
     "what is to be answered"},
    {"data", "instructions", "group_by_length", "boolean", "false",
     "batches of samples of similar length"},
    {"data", "random, images", "samples", "integer, from 1", "10000", "training samples"},
    {"data", "random, images", "eval_samples", "integer, from 0", "0", "samples for evaluations"},
    {"data", "random", "features", "integer, from 1", "20", "numbers of a sample"},
    {"data", "images", "image_size", "integer, from 32", "224", "height and width"},
    {"data", "random, images", "classes", "integer, from 2", "10; 1000 for images",
     "classes of the samples"},
};

}  // namespace

std::string task_keys_help(std::string_view part) {
  std::string text;
  for (const TaskKey& key : kKeys) {
    const std::string name = key.full_name();
    if (name.find(part) == name.npos) continue;
    text += fmt::format("  {:<32} {}{}\n{:36}[{}{}]\n", name,
                        key.of.empty() ? "" : fmt::format("({}) ", key.of), key.help, "",
                        key.accepts, key.fallback.empty() ? "" : fmt::format("; {}", key.fallback));
  }
  return text;
}

std::string task_keys_markdown() {
  std::string text = "| key | of | accepted | default | meaning |\n|---|---|---|---|---|\n";
  for (const TaskKey& key : kKeys)
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n", key.full_name(), key.of, key.accepts,
                        key.fallback, key.help);
  return text;
}

}  // namespace lockstep::cli
