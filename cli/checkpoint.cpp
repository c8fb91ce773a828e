// `lockstep checkpoint`: shows a checkpoint, verifies that it is complete, and compares two.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>

#include "cli/commands.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"
#include "lockstep/io/safetensors.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "checkpoint-";
constexpr const char* kCheckpointHelp =
    "usage: lockstep checkpoint verify PATH...\n"
    "       lockstep checkpoint show PATH [--tensors]\n"
    "       lockstep checkpoint diff A B\n"
    "       lockstep checkpoint import ARCHIVE FOLDER\n"
    "       lockstep checkpoint merge ADAPTER FOLDER [--base DIR]\n\n"
    "verify  reads every byte against the manifest: 0 when all is ok, 1 with what is wrong. A\n"
    "        folder of checkpoints (an output_dir) stands for all of them\n"
    "show    step, position in the data, files, and with --tensors every tensor\n"
    "diff    tensors that differ, and by how much at most; other differences in progress, except\n"
    "        logs: 0 when nothing differs, 1 otherwise\n"
    "import  an archive that C++'s torch::save wrote becomes a folder of safetensors\n"
    "merge   an adapter (a checkpoint of lora, or PEFT's folder) and its base become one model in\n"
    "        a new folder, which needs neither; --base says where the base is if not where\n"
    "        adapter_config.json says it\n";

std::vector<std::string> folders_of(const std::string& path) {
  if (!fs::is_directory(path))
    throw UsageError("checkpoint", "{} is not a folder.{} Give checkpoint-<step> or an output_dir.",
                     path, link_advice(path));
  if (io::has_manifest(path)) return {path};
  std::vector<std::string> folders;
  for (const io::NumberedDir& dir : io::list_numbered(path, kPrefix)) folders.push_back(dir.path);
  return folders.empty() ? std::vector<std::string>{path} : folders;
}

int verify_checkpoints(const Args& args) {
  if (args.empty()) throw UsageError("checkpoint", "verify needs a folder.");
  bool whole = true;
  for (const std::string& arg : args) {
    for (const std::string& folder : folders_of(arg)) {
      bool damaged = false;
      std::string lines;
      for (const io::Fault& fault : io::verify(folder)) {
        damaged |= fault.kind != io::FaultKind::kExtra;
        lines += fmt::format("  {}\n", fault.text);
      }
      whole &= !damaged;
      print_text("{:<8}{}\n{}", damaged ? "damaged" : "ok", folder, lines);
    }
  }
  return whole ? 0 : 1;
}

void show_tensors(const std::string& folder, const std::string& stem, bool all) {
  const io::SafetensorsSet set(folder, stem);
  std::map<std::string, std::uint64_t> by_type;
  std::uint64_t elements = 0, bytes = 0;
  for (const std::string& name : set.names()) {
    const io::TensorEntry& entry = *set.at(name).entry;
    std::uint64_t count = 1;
    for (const std::int64_t size : entry.shape) count *= static_cast<std::uint64_t>(size);
    elements += count;
    bytes += entry.end - entry.begin;
    by_type[std::string(io::dtype_name(entry.dtype))] += count;
    if (all)
      print_text("    {:<48}{:<6}[{}]\n", name, io::dtype_name(entry.dtype),
                 fmt::join(entry.shape, ", "));
  }
  std::string types;
  for (const auto& [type, count] : by_type) types += fmt::format(" {} {}", count, type);
  print_text("  {:<12}{} tensors, {} elements ({}),{}\n", stem.substr(0, stem.find('_')),
             set.names().size(), elements, io::size_text(bytes), types);
}

int show_checkpoint(const Args& args) {
  bool all = false;
  Flags flags("checkpoint");
  flags.toggle("--tensors", all);
  const Args names = flags.read(args, /*keys=*/true);
  for (const std::string& name : names)
    if (name.starts_with("--") || &name != &names.front())
      throw UsageError("checkpoint", "show takes one folder and --tensors, not '{}'.", name);
  if (names.empty()) throw UsageError("checkpoint", "show needs a folder.");
  const std::string folder = folders_of(names.front()).front();
  const std::string state_file = folder + "/trainer_state.json";
  const train::TrainerState state =
      train::parse_trainer_state(read_file(state_file, 256u << 20), state_file);
  // A user's own loop need not know its last step.
  const std::string of = state.max_steps > 0 ? fmt::format(" of {}", state.max_steps) : "";
  print_text("{}\n  {:<12}{}{}, epoch {:.4f}\n", folder, "step", state.global_step, of,
             state.epoch);
  if (state.best_metric)
    print_text("  {:<12}{} at step {}\n", "best", *state.best_metric,
               state.best_global_step.value_or(-1));
  for (auto entry = state.log_history.rbegin(); entry != state.log_history.rend(); ++entry) {
    const double* loss = train::find_metric(entry->values, "loss");
    if (loss == nullptr) continue;
    print_text("  {:<12}{:.4f} at step {}\n", "loss", *loss, entry->step);
    break;
  }
  const std::string sampler = folder + "/sampler.json";
  if (fs::exists(sampler)) {
    const auto at = train::parse_data_position(read_file(sampler), sampler);
    print_text(
        "  {:<12}epoch {}, sample {} of {}, seed {}; {} data parallel rank{} x batch {} x "
        "accumulation {}{}\n",
        "data", at.epoch, at.cursor, at.dataset_size, at.seed, at.world_size,
        at.world_size == 1 ? "" : "s", at.batch_size, at.accumulation,
        at.threads > 0 ? fmt::format(", OMP_NUM_THREADS={}", at.threads) : "");
  }
  const bool adapters = fs::exists(folder + "/adapter_model.safetensors");
  show_tensors(folder, adapters ? "adapter_model" : "model", all);
  if (fs::exists(folder + "/optimizer.safetensors")) show_tensors(folder, "optimizer", all);
  return 0;
}

template <typename T>
double largest(std::span<const std::byte> a, std::span<const std::byte> b) {
  double most = 0;
  for (std::size_t at = 0; at + sizeof(T) <= a.size(); at += sizeof(T)) {
    T x, y;
    std::memcpy(&x, a.data() + at, sizeof(T));
    std::memcpy(&y, b.data() + at, sizeof(T));
    const double distance = std::abs(static_cast<double>(x) - static_cast<double>(y));
    if (distance > most || std::isnan(distance)) most = distance;
    if (std::isnan(distance)) return most;
  }
  return most;
}

// The difference of two tensors; nothing when they are equal to the byte.
std::optional<std::string> difference(const io::SafetensorsSet::Found& a,
                                      const io::SafetensorsSet::Found& b) {
  if (a.entry->dtype != b.entry->dtype || a.entry->shape != b.entry->shape)
    return fmt::format("{} [{}] and {} [{}]", io::dtype_name(a.entry->dtype),
                       fmt::join(a.entry->shape, ", "), io::dtype_name(b.entry->dtype),
                       fmt::join(b.entry->shape, ", "));
  const auto x = a.bytes(), y = b.bytes();
  if (x.empty() || std::memcmp(x.data(), y.data(), x.size()) == 0) return std::nullopt;
  if (a.entry->dtype == io::DType::kF32)
    return fmt::format("differs by at most {:.3g}", largest<float>(x, y));
  if (a.entry->dtype == io::DType::kF64)
    return fmt::format("differs by at most {:.3g}", largest<double>(x, y));
  return std::string("differs");
}

int diff_set(const Args& args, const std::string& stem) {
  const bool there[] = {io::SafetensorsSet::exists(args[0], stem),
                        io::SafetensorsSet::exists(args[1], stem)};
  if (!there[0] && !there[1]) return 0;
  if (there[0] != there[1]) {
    print_text("{}: only in {}\n", stem, args[there[0] ? 0 : 1]);
    return 1;
  }
  const io::SafetensorsSet a(args[0], stem), b(args[1], stem);
  int differing = 0;
  std::size_t all = a.names().size();
  for (const std::string& name : a.names()) {
    const auto other = b.find(name);
    const auto text = other.entry == nullptr
                          ? std::optional<std::string>(fmt::format("only in {}", args[0]))
                          : difference(a.at(name), other);
    if (!text) continue;
    print_text("{}: {} {}\n", stem, name, *text);
    ++differing;
  }
  for (const std::string& name : b.names()) {
    if (a.find(name).entry != nullptr) continue;
    print_text("{}: {} only in {}\n", stem, name, args[1]);
    ++differing;
    ++all;
  }
  print_text("{}: {} of {} tensors differ\n", stem, differing, all);
  return differing;
}

// The path of a run is not part of its state.
Node comparable(const std::string& key, const Node& value) {
  if (key != "best_model_checkpoint" || !value.is(NodeKind::kString)) return value;
  return text_node(fs::path(value.text).filename().string());
}

int diff_members(const Args& args, const std::string& stem) {
  constexpr DocumentLimits kLimits{.bytes = 256u << 20, .depth = 32, .nodes = 50'000'000};
  std::vector<Node> roots;
  for (const std::string& folder : args) {
    const std::string path = folder + "/" + stem + ".json";
    Node root;
    if (fs::exists(path)) {
      root = parse_json(read_file(path, kLimits.bytes), path, kLimits);
      as_map(root, stem);
    }
    roots.push_back(std::move(root));
  }
  if (roots[0].is(NodeKind::kNull) != roots[1].is(NodeKind::kNull)) {
    print_text("{}: only in {}\n", stem, args[roots[0].is(NodeKind::kNull) ? 1 : 0]);
    return 1;
  }
  int differing = 0;
  for (const Entry& entry : roots[0].entries) {
    if (entry.key == "log_history") continue;  // it has times and speeds in it
    const Entry* other = roots[1].find(entry.key);
    if (other != nullptr &&
        same_value(comparable(entry.key, entry.value), comparable(entry.key, other->value)))
      continue;
    ++differing;
    if (other == nullptr)
      print_text("{}: {} only in {}\n", stem, entry.key, args[0]);
    else
      print_text("{}: {} {} and {}\n", stem, entry.key, to_json(entry.value),
                 to_json(other->value));
  }
  for (const Entry& entry : roots[1].entries) {
    if (roots[0].find(entry.key) != nullptr || entry.key == "log_history") continue;
    print_text("{}: {} only in {}\n", stem, entry.key, args[1]);
    ++differing;
  }
  return differing;
}

int diff_checkpoints(const Args& args) {
  if (args.size() != 2) throw UsageError("checkpoint", "diff needs two folders.");
  Args folders;
  for (const std::string& arg : args) folders.push_back(folders_of(arg).front());
  int differing = 0;
  for (const char* stem : {"model", "adapter_model", "optimizer", "rng_state"})
    differing += diff_set(folders, stem);
  for (const char* stem : {"trainer_state", "sampler", "scheduler", "scaler"})
    differing += diff_members(folders, stem);
  return differing == 0 ? 0 : 1;
}

}  // namespace

int checkpoint_command(const Args& args) {
  const std::string first = args.empty() ? "" : args.front();
  const Args rest(args.begin() + (args.empty() ? 0 : 1), args.end());
  const bool asked = first == "--help" || first == "-h" || first == "help";
  if (first == "verify") return verify_checkpoints(rest);
  if (first == "show") return show_checkpoint(rest);
  if (first == "diff") return diff_checkpoints(rest);
  if (first == "import" || first == "merge") {
    Args all{"checkpoint"};
    all.insert(all.end(), args.begin(), args.end());
    return execute("lockstep-train", all);
  }
  if (!asked && !args.empty())
    throw UsageError("checkpoint", "there is no '{}'. It is verify, show, diff, import or merge.",
                     first);
  std::fputs(kCheckpointHelp, asked ? stdout : stderr);
  return asked ? 0 : 2;
}

}  // namespace lockstep::cli
