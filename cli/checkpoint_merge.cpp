// `lockstep checkpoint merge`: an adapter and its base model become one model, as with PEFT's
// merge_and_unload().

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cli/base_model.h"
#include "cli/flags.h"
#include "cli/print.h"
#include "cli/prompt_format.h"
#include "cli/train_commands.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/lora.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMergeUsage = "usage: lockstep checkpoint merge ADAPTER FOLDER [--base DIR]";

// What belongs to a model's folder besides weights and config.json; the adapter's own goes first.
std::vector<std::pair<std::string, std::string>> other_files(const std::string& adapter,
                                                             const std::string& base) {
  constexpr std::size_t kLargest = std::size_t{256} << 20;
  std::vector<std::pair<std::string, std::string>> texts;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                           "chat_template.jinja", "generation_config.json", kPromptFormat})
    for (const std::string& folder : {adapter, base}) {
      const fs::path file = fs::path(folder) / name;
      std::error_code ignored;
      if (!fs::is_regular_file(file, ignored)) continue;
      texts.emplace_back(name, read_file(file, kLargest));
      break;
    }
  return texts;
}

}  // namespace

int checkpoint_merge_main(int argc, char** argv) {
  std::string given_base;
  Flags flags("checkpoint");
  flags.text("--base", given_base);
  const Args names = flags.read(Args(argv + 1, argv + argc), /*keys=*/true);
  if (names.size() != 2 || names[0].starts_with("--") || names[1].starts_with("--"))
    throw UsageError("checkpoint", "{}", kMergeUsage);
  const std::string adapter = model_folder(names[0]), &out = names[1];
  if (!fs::exists(fs::path(adapter) / models::kAdapterConfig))
    throw UsageError("checkpoint",
                     "{} holds no adapter: there is no {} in it. Give a checkpoint of a training "
                     "with lora, or a folder of PEFT's.",
                     adapter, models::kAdapterConfig);
  if (fs::exists(out))
    throw UsageError("checkpoint", "{} is there already. Give the name of a new folder.", out);
  const std::string base = base_folder(adapter, given_base);
  const io::SafetensorsSet weights(base);
  const auto type = io::scalar_type_of(weights.at(weights.names().front()).entry->dtype);
  const LoadedModel loaded = load_model(adapter, base, {.dtype = type});
  models::unload_lora(*loaded.model);
  models::save_pretrained(*loaded.model, out, {.texts = other_files(adapter, base)});
  print_text("{}: {} with the adapter of {}\n", out, base, adapter);
  return 0;
}

}  // namespace lockstep::cli
