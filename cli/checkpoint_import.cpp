// `lockstep checkpoint import`: an archive that a C++ program wrote with torch::save becomes a
// folder of safetensors. LibTorch's own reader opens it; nothing of ours reads pickle.
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <filesystem>

#include "cli/train_commands.h"
#include "lockstep/core/error.h"
#include "lockstep/io/file.h"
#include "lockstep/train/checkpoint.h"

namespace lockstep::cli {
namespace {

void collect(torch::serialize::InputArchive& archive, const std::string& prefix,
             train::NamedTensors& found) {
  for (const std::string& key : archive.keys()) {
    at::Tensor tensor;
    torch::serialize::InputArchive inner;
    if (archive.try_read(key, tensor)) {
      if (tensor.defined()) found.emplace_back(prefix + key, tensor);
    } else if (archive.try_read(key, inner)) {
      collect(inner, prefix + key + ".", found);
    }
  }
}

train::NamedTensors read_archive(const std::string& path) {
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(path, c10::Device(c10::kCPU));
  } catch (const c10::Error& e) {
    const std::string what = e.what_without_backtrace();
    throw UsageError("checkpoint",
                     "{} is no archive of C++'s torch::save ({}). One that Python wrote is "
                     "exported there: safetensors.torch.save_file(model.state_dict(), ...).",
                     path, what.substr(0, what.find('\n')));
  }
  train::NamedTensors found;
  collect(archive, "", found);
  return found;
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
  train::CheckpointContents contents;
  contents.model = read_archive(from);
  if (contents.model.empty()) throw UsageError("checkpoint", "{} holds no tensor.", from);
  contents.only_model = true;
  train::write_checkpoint(to, contents);
  fmt::print("{}: {} tensors, {}\n", to, contents.model.size(),
             io::size_text(train::checkpoint_bytes(contents)));
  return 0;
}

}  // namespace lockstep::cli
