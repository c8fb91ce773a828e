// The model and data that a training file requests from `lockstep train`, read and checked without
// torch: the maps `model` and `data`, and the files that they name.
//
// `lockstep config check` and `lockstep train` call the same function, and `train` builds model and
// dataset from its result alone, so `check` refuses whatever `train` would refuse at this stage.
// The samples themselves, which take long to read, are read by read_instructions(), also for both.
//
//   const TaskConfig task = read_task(config.arguments);   // UsageError with every mistake
//
// `lockstep config keys model data` and docs/configuration.md list the keys; models/lora_config.h
// has those of `lora`, models/device_map.h the maps of `model.device_map`.
//
// Values and a function that only reads; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/problems.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/io/manifest.h"
#include "lockstep/models/device_map.h"
#include "lockstep/models/hugging_face.h"
#include "lockstep/models/lora_config.h"
#include "lockstep/models/shapes.h"
#include "lockstep/train/arguments.h"

namespace lockstep::cli {

inline constexpr const char* kTorchHeaders = "torch-headers";  // C++ text that comes with LibTorch

struct DataConfig {
  std::string name;
  std::int64_t length = 0;  // tokens of a sample: max_seq_len
  bool evaluates = false;   // there is data for evaluations
  // bytes; `path` of instructions too
  std::string path{};
  std::string suffix{};
  std::int64_t max_bytes = 0;
  std::int64_t eval_bytes = 0;
  // tokens
  std::string order{};
  std::vector<std::string> train_files{};
  std::vector<std::string> eval_files{};
  // instructions
  std::string eval_path{};
  std::optional<data::Tokenizer> tokenizer{};  // none: bytes
  std::string padding{};
  std::int64_t pad_to_multiple_of = 1;
  std::int64_t pad_at_most = 0;  // maximum padding; 0: unlimited
  bool train_on_prompt = false;
  bool group_by_length = false;
  data::PromptTemplate prompt{};
  // random and images
  std::int64_t samples = 0;
  std::int64_t eval_samples = 0;
  std::int64_t classes = 0;
  std::int64_t features = 0;    // random
  std::int64_t image_size = 0;  // images
};

// The name of a model that is defined by a config.json; users cannot write it.
inline constexpr const char* kHuggingFace = "hugging_face";

struct ModelConfig {
  std::string name;
  std::string weights{};  // a folder; empty: random initial weights
  // from a Hugging Face folder; `weights` is that folder if its weights are loaded too
  std::optional<models::CausalLmConfig> hugging_face{};
  bool load_in_4bit = false;         // of Hugging Face's: the linear layers of its blocks
  std::optional<Node> device_map{};  // for a language model; where the GPUs are is not known yet
  std::int64_t vocab_size = 0;       // of a language model
  std::int64_t n_positions = 0;      // the longest sequence that it takes
  models::GptConfig gpt{};
  models::MlpConfig mlp{};
};

struct TaskConfig {
  DataConfig data;
  // The section `data` has no mistakes, and the length of its samples does not depend on others.
  bool data_is_right = false;
  ModelConfig model;
  std::optional<models::LoraConfig> lora{};
  std::vector<std::string> notes{};  // what is allowed and has no effect
};

// kUnread: data and weights may be missing, but not config.json. Enough for a plan.
enum class TaskFiles { kChecked, kUnread };
TaskConfig read_task(const TrainingArguments& arguments, TaskFiles files = TaskFiles::kChecked);
// The same, with the mistakes added to `problems`; the result cannot be trained if there are any.
TaskConfig read_task(const TrainingArguments& arguments, TaskFiles files, Problems& problems);

// The model's options for its module, and its tensors. A resnet has the data's classes.
models::CausalLmConfig causal_lm_config(const ModelConfig& model);
models::ResNetConfig resnet_config(const TaskConfig& task);
std::vector<io::TensorShape> model_tensors(const TaskConfig& task);
// The size of a checkpoint's tensors in bytes: the model's, or only its adapters'.
std::uint64_t checkpoint_bytes(const TaskConfig& task);

// A file, or a folder's files with the suffix `suffix`, in a fixed order. UsageError if there is
// none, or if one of them cannot be read.
std::vector<std::string> text_files(const std::string& path, const std::string& suffix);

struct ByteCount {
  std::int64_t tokens = 0;  // every byte, and one at the end of each file
  std::int64_t files = 0;
};
// The number of samples in a text, with evaluation's; UsageError if none is left to train on.
std::int64_t byte_rows(const DataConfig& data, const ByteCount& count);

// Checks a folder of weights against its manifest, if it has one.
void check_whole(const std::string& folder, io::Depth depth);

// Reads the rows of which training makes its dataset; `config check` reads and discards the same
// rows, so that both refuse the same records. `path` is data.path or data.eval_path. Refuses rows
// that are longer than the model's positions.
data::InstructionRows read_instructions(const TaskConfig& task, const std::string& path,
                                        const data::ReadProgress& progress = {});
// A sentence about the rows that max_seq_len truncated; empty if there are none.
std::string what_was_cut(const data::InstructionRows& rows);

}  // namespace lockstep::cli
