// The commands of lockstep-train, and their common functions: making the models and datasets of a
// training file, loading a model's folder, and the format of prompts.
//
//   TrainerTask task = make_task(read_task(arguments), arguments, mesh_for(world, arguments));
//   const PromptFormat format = read_prompt_format(folder + "/" + kPromptFormat);
//
// Functions without state; call from any thread.
#pragma once

#include <string>

#include "cli/task_config.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {

// argv[0] is the command's name.
int train_main(int argc, char** argv);              // train.cpp
int generate_main(int argc, char** argv);           // generate.cpp
int checkpoint_import_main(int argc, char** argv);  // generate.cpp
int checkpoint_merge_main(int argc, char** argv);   // generate.cpp
int plan_probe_main(int argc, char** argv);         // train.cpp; `lockstep plan --probe` starts it
int doctor_probe_main(int argc, char** argv);       // probe_ranks.cpp; `lockstep doctor` starts it

// Makes the bundled models and datasets for a training file (task_config.h lists the
// keys). Under fsdp and in a pipeline a language model is divided while it is made.
// UsageError for faults that only the files' contents show. Every rank calls it, with the
// same arguments.
TrainerTask make_task(TaskConfig wanted, const TrainingArguments& arguments, const Mesh& mesh);

// For `lockstep generate` and `lockstep checkpoint merge`: a Hugging Face folder or a checkpoint as
// it is, and for an output_dir its newest checkpoint.
std::string model_folder(const std::string& folder);

struct LoadedModel {
  models::CausalLmPtr model;
  std::string folder;  // the model's own; for an adapter, that of its base
};

// `base` names an adapter's base model if adapter_config.json does not.
LoadedModel load_model(const std::string& folder, const std::string& base,
                       const models::PretrainedOptions& options);

// The folder of an adapter's base model. UsageError when it is not a folder here.
std::string base_folder(const std::string& adapter_folder, const std::string& base);

// prompt_format.json, beside the weights of a checkpoint: the format of the training texts, with
// which `lockstep generate` makes its prompts.
inline constexpr const char* kPromptFormat = "prompt_format.json";

struct PromptFormat {
  data::RecordKind kind = data::RecordKind::kInstruction;
  data::PromptTemplate texts{};  // for instructions
  std::string tokenizer{};       // the absolute path of a tokenizer.json; empty: bytes
};

std::string prompt_format_text(const PromptFormat& format);
// UsageError for a file of another kind, SystemError for one that cannot be read.
PromptFormat read_prompt_format(const std::string& path);

}  // namespace lockstep::cli
