// `lockstep checkpoint import`: an archive that a C++ program wrote with torch::save becomes a
// folder of safetensors. LibTorch's own reader opens it; nothing of ours reads pickle.
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <vector>

#include "cli/print.h"
#include "cli/train_commands.h"
#include "lockstep/core/error.h"
#include "lockstep/io/file.h"
#include "lockstep/train/checkpoint.h"

namespace lockstep::cli {
namespace {

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

// What the file probably is, when LibTorch's reader refuses it.
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

}  // namespace lockstep::cli
