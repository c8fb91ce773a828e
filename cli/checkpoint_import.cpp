// `lockstep checkpoint import`: an archive that a C++ program wrote with torch::save becomes a
// folder of safetensors. LibTorch's own reader opens it; nothing of ours reads pickle.
// `lockstep checkpoint merge`: an adapter and its base model become one model, as with PEFT's
// merge_and_unload().

#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/train_commands.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/file.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/lora.h"
#include "lockstep/train/checkpoint.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using Archive = torch::serialize::InputArchive;

struct Imported {
  train::NamedTensors tensors;
  std::vector<std::string> skipped;  // what safetensors cannot hold
};

// Numbers become tensors, pairs such as Adam's betas a vector of two.
void collect_value(const c10::IValue& value, const std::string& name, Imported& found) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) found.tensors.emplace_back(name, value.toTensor());
  } else if (value.isBool()) {
    found.tensors.emplace_back(name, at::scalar_tensor(value.toBool(), at::kBool));
  } else if (value.isInt()) {
    found.tensors.emplace_back(name, at::scalar_tensor(value.toInt(), at::kLong));
  } else if (value.isDouble()) {
    found.tensors.emplace_back(name, at::scalar_tensor(value.toDouble(), at::kDouble));
  } else if (value.isTuple() || value.isList()) {
    const std::vector<c10::IValue> parts =
        value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    const auto real = [](const c10::IValue& part) { return part.isDouble(); };
    if (!parts.empty() && std::ranges::all_of(parts, real)) {
      std::vector<double> numbers;
      for (const c10::IValue& part : parts) numbers.push_back(part.toDouble());
      found.tensors.emplace_back(name, at::tensor(numbers, at::kDouble));
      return;
    }
    for (std::size_t i = 0; i < parts.size(); ++i)
      collect_value(parts[i], fmt::format("{}.{}", name, i), found);
  } else if (!value.isNone()) {
    found.skipped.push_back(name);
  }
}

void collect(Archive& archive, const std::string& prefix, Imported& found);

std::int64_t number_in(Archive& archive, const std::string& key) {
  at::Tensor number;
  archive.read(key, number);
  return number.item<std::int64_t>();
}

// torch::optim names a parameter by its address in the process that saved. Here it gets its number
// among the parameters of all groups, as in Python's state_dict().
void collect_optimizer(Archive& states, Archive& groups, const std::string& prefix,
                       Imported& found) {
  std::int64_t number = 0;
  const std::int64_t count = number_in(groups, "param_groups/size");
  for (std::int64_t g = 0; g < count; ++g) {
    Archive group, options;
    groups.read(fmt::format("param_groups/{}", g), group);
    const std::int64_t parameters = number_in(group, "params/size");
    for (std::int64_t i = 0; i < parameters; ++i, ++number) {
      c10::IValue address;
      group.read(fmt::format("params/{}", i), address);
      Archive state;
      if (states.try_read(address.toStringRef(), state))
        collect(state, fmt::format("{}state.{}.", prefix, number), found);
    }
    group.read("options", options);
    collect(options, fmt::format("{}param_groups.{}.", prefix, g), found);
  }
}

void collect(Archive& archive, const std::string& prefix, Imported& found) {
  Archive states, groups;
  if (archive.try_read("state", states) && archive.try_read("param_groups", groups))
    return collect_optimizer(states, groups, prefix, found);
  for (const std::string& key : archive.keys()) {
    Archive inner;
    c10::IValue value;
    if (archive.try_read(key, inner))
      collect(inner, prefix + key + ".", found);
    else if (archive.try_read(key, value))
      collect_value(value, prefix + key, found);
  }
}

// The probable kind of a file that LibTorch's reader refuses.
std::string advice_for(const std::string& path) {
  constexpr const char* kPython =
      "Python's torch.save wrote it. Export the weights there: "
      "safetensors.torch.save_file(model.state_dict(), ...).";
  std::string start(4, '\0');
  std::ifstream(path, std::ios::binary).read(start.data(), 4);
  if (start[0] == '\x80') return kPython;  // a bare pickle, as before PyTorch 1.6
  if (start != "PK\x03\x04") return "Give the archive that torch::save wrote.";
  try {
    caffe2::serialize::PyTorchStreamReader reader(path);
    if (reader.hasRecord("data.pkl") && !reader.hasRecord("constants.pkl")) return kPython;
  } catch (const std::exception&) {
    // Not even its table of contents can be read.
  }
  return "It is probably cut short or damaged. Copy it again.";
}

Imported read_archive(const std::string& path) {
  std::string what;
  try {
    Archive archive;
    archive.load_from(path, c10::Device(c10::kCPU));
    Imported found;
    collect(archive, "", found);
    return found;
  } catch (const c10::Error& e) {
    what = e.what_without_backtrace();
  } catch (const std::exception& e) {
    what = e.what();
  }
  throw UsageError("checkpoint", "{} is not an archive of C++'s torch::save ({}). {}", path,
                   what.substr(0, what.find('\n')), advice_for(path));
}

}  // namespace

int checkpoint_import_main(int argc, char** argv) {
  if (argc != 3) throw UsageError("checkpoint", "usage: lockstep checkpoint import ARCHIVE FOLDER");
  const std::string from = argv[1], to = argv[2];
  if (!std::filesystem::is_regular_file(from))
    throw UsageError("checkpoint", "{} is not a file. Give the archive that torch::save wrote.",
                     from);
  if (std::filesystem::exists(to))
    throw UsageError("checkpoint", "{} is there already. Give the name of a new folder.", to);
  Imported found = read_archive(from);
  if (found.tensors.empty()) throw UsageError("checkpoint", "{} holds no tensor.", from);
  train::CheckpointContents contents;
  contents.model = std::move(found.tensors);
  contents.only_model = true;
  train::write_checkpoint(to, contents);
  print_text("{}: {} tensors, {}\n", to, contents.model.size(),
             io::size_text(train::checkpoint_bytes(contents)));
  if (!found.skipped.empty())
    print_text("skipped, being neither tensors nor numbers: {}\n", fmt::join(found.skipped, ", "));
  return 0;
}

// ---------------------------------------------------------------- merge

namespace {

constexpr const char* kMergeUsage = "usage: lockstep checkpoint merge ADAPTER FOLDER [--base DIR]";

// A model folder's files besides weights and config.json; the adapter's own take precedence.
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
