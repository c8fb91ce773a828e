#include "lockstep/train/checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <charconv>
#include <cstring>
#include <filesystem>
#include <set>

#include "lockstep/comm/world.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"
#include "lockstep/io/safetensors.h"
#include "lockstep/io/tensors.h"
#include "lockstep/nn/divided.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/train/checks.h"

namespace lockstep::train {
namespace {

constexpr const char* kOwnGpu = "cuda";  // its generator's name, whatever its number
constexpr const char* kFunctionFile = "model_function.json";

// Dense and on the CPU. A tensor that already is both shares its memory.
at::Tensor writable(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).contiguous();
}

std::vector<io::TensorBytes> bytes_of_all(const NamedTensors& tensors,
                                          std::vector<at::Tensor>& alive) {
  std::vector<io::TensorBytes> all;
  for (const auto& [name, tensor] : tensors) {
    nn::check_whole(name, tensor);
    alive.push_back(writable(tensor));
    all.push_back(io::bytes_of_tensor(name, alive.back()));
  }
  return all;
}

void write_tensors(io::AtomicDir& dir, const std::string& file, const NamedTensors& tensors) {
  std::vector<at::Tensor> alive;
  std::vector<io::TensorBytes> all = bytes_of_all(tensors, alive);
  dir.write(file, [&](io::FileWriter& out) { io::write_safetensors(out, all); });
}

NamedTensors list_of(const TensorDict& dict) {
  return {dict.begin(), dict.end()};
}

NamedTensors rng_list(const std::vector<TensorDict>& ranks) {
  NamedTensors list;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    for (const auto& [name, tensor] : ranks[rank])
      list.emplace_back(fmt::format("{}.{}", rank, name), tensor);
  return list;
}

std::uint64_t bytes_in(const NamedTensors& tensors) {
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += tensor.nbytes();
  return bytes;
}

TensorDict read_tensors(const std::string& path) {
  const auto file = std::make_shared<const io::SafetensorsFile>(path);
  TensorDict dict;
  for (const io::TensorEntry& entry : file->tensors())
    dict.emplace(entry.name, io::mapped_tensor(*file, entry, file));
  return dict;
}

// Adapters where the whole model is wanted, or the other way round.
void refuse_other_files(const std::string& folder, const ModelFiles& files) {
  if (io::SafetensorsSet::exists(folder, files.stem)) return;
  for (const char* other : {"model", "adapter_model"})
    if (io::SafetensorsSet::exists(folder, other))
      throw UsageError("checkpoint",
                       "{} holds {}.safetensors, and {}.safetensors is wanted. It was saved by a "
                       "run {} adapters (lora). Train as that run did, or choose another folder.",
                       folder, other, files.stem,
                       std::string_view(other) == "model" ? "without" : "with");
}

// By the full names of the keys; a map's are compared one by one.
void add_changes(const Node& then, const Node& now, const std::string& name,
                 std::vector<std::string>& changes) {
  if (same_value(then, now)) return;
  if (!then.is(NodeKind::kMap) || !now.is(NodeKind::kMap)) {
    changes.push_back(fmt::format("{} is {} and was {}", name, to_json(now), to_json(then)));
    return;
  }
  std::set<std::string> keys;
  for (const Node* map : {&then, &now})
    for (const Entry& entry : map->entries) keys.insert(entry.key);
  for (const std::string& key : keys) {
    const Entry *before = then.find(key), *after = now.find(key);
    add_changes(before != nullptr ? before->value : Node{},
                after != nullptr ? after->value : Node{}, name + "." + key, changes);
  }
}

// A key that one of the two does not have is of another version, or of adapters, which have files
// of their own.
void refuse_other_function(const std::string& folder, const std::string& saved,
                           const std::string& own) {
  if (saved.empty() || own.empty()) return;
  const Node then = parse_json(saved, fmt::format("{}/{}", folder, kFunctionFile));
  const Node now = parse_json(own, "ModelFiles::function");
  std::vector<std::string> changes;
  for (const Entry& entry : as_map(then, kFunctionFile).entries)
    if (const Entry* other = as_map(now, "ModelFiles::function").find(entry.key))
      add_changes(entry.value, other->value, entry.key, changes);
  if (!changes.empty())
    throw UsageError("checkpoint",
                     "{} was saved by a model that computes something else: {}. Its weights were "
                     "trained with the earlier values. Set them again, or begin a new run in "
                     "another output_dir.",
                     folder, fmt::join(changes, ", "));
}

// A generator's state for a rank that was not there. Undefined for a device whose format is
// unknown: its generator stays as it is.
at::Tensor derived_state(const std::string& device, const at::Tensor& state, int rank) {
  const std::string bytes = fmt::format("{} {}", rank, pack_tensors({{device, state}}));
  const std::uint64_t seed = fingerprint(bytes.data(), bytes.size());
  if (device == "cpu") return at::detail::createCPUGenerator(seed).get_state();
  constexpr std::int64_t kCudaState = 16;  // seed, offset
  if (state.numel() != kCudaState) return {};
  at::Tensor own = at::zeros({kCudaState}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), &seed, sizeof seed);
  return own;
}

}  // namespace

std::string checkpoint_path(const std::string& output_dir, std::int64_t step) {
  return fmt::format("{}/{}{}", output_dir, kCheckpointPrefix, step);
}

std::uint64_t checkpoint_bytes(const CheckpointContents& contents) {
  return bytes_in(contents.model) + bytes_in(list_of(contents.optimizer)) +
         bytes_in(rng_list(contents.rng)) + kSmallFiles;
}

void write_checkpoint(const std::string& path, const CheckpointContents& contents,
                      const WriteOptions& options) {
  io::AtomicDir dir(path, {.expected_bytes = checkpoint_bytes(contents),
                           .replace = true,
                           .progress = options.progress});
  {
    std::vector<at::Tensor> alive;
    io::write_safetensors_set(
        dir, bytes_of_all(contents.model, alive), {{"format", kModelFormat}},
        {.stem = contents.files.stem, .max_shard_bytes = options.max_shard_bytes});
  }
  if (!contents.only_model) write_tensors(dir, kOptimizerFile, list_of(contents.optimizer));
  write_small_files(dir, contents);
  dir.commit();
}

void write_small_files(io::AtomicDir& dir, const CheckpointContents& contents) {
  dir.write("trainer_state.json", trainer_state_text(contents.state));
  if (!contents.model_config.empty()) dir.write(contents.files.config, contents.model_config);
  if (!contents.files.function.empty()) dir.write(kFunctionFile, contents.files.function);
  for (const auto& [name, text] : contents.files.texts) dir.write(name, text);
  if (!contents.arguments.empty()) dir.write("training_args.json", contents.arguments);
  if (contents.only_model) return;
  write_tensors(dir, "rng_state.safetensors", rng_list(contents.rng));
  dir.write("sampler.json", data_position_text(contents.position));
  if (!contents.scheduler.empty()) dir.write("scheduler.json", contents.scheduler);
  if (!contents.scaler.empty()) dir.write("scaler.json", contents.scaler);
}

NamedTensors model_tensors(const torch::nn::Module& module, bool copy_buffers) {
  NamedTensors all;
  for (const auto& item : module.named_parameters())
    all.emplace_back(item.key(), item.value().detach());
  for (const auto& item : module.named_buffers()) {
    if (!item.value().defined()) continue;
    const at::Tensor buffer = item.value().detach();
    all.emplace_back(item.key(), copy_buffers ? buffer.clone() : buffer);
  }
  return all;
}

NamedTensors saved_tensors(const torch::nn::Module& module, const ModelFiles& files,
                           bool copy_buffers) {
  return files.tensors ? files.tensors() : model_tensors(module, copy_buffers);
}

io::Newest find_checkpoint(const std::string& output_dir, const std::string& flag) {
  if (flag == "auto") return io::newest_valid(output_dir, kCheckpointPrefix);
  check_resume(flag);
  const auto faults = io::verify(flag);
  bool damaged = false;
  for (const io::Fault& fault : faults) damaged |= fault.kind != io::FaultKind::kExtra;
  if (damaged) {
    throw UsageError("checkpoint",
                     "{} cannot be used: {}. Resume with 'auto' to take the newest that is whole.",
                     flag, io::describe(faults));
  }
  io::Newest found;
  found.path = flag;
  found.step = Checkpoint(flag).state().global_step;
  return found;
}

Checkpoint::Checkpoint(std::string path) : path_(std::move(path)) {
  const std::string state = path_ + "/trainer_state.json";
  state_ = parse_trainer_state(read_file(state, 256u << 20), state);
  const std::string sampler = path_ + "/sampler.json";
  resumable_ = std::filesystem::exists(sampler);
  if (resumable_) position_ = parse_data_position(read_file(sampler), sampler);
}

void Checkpoint::load_model(torch::nn::Module& module, const ModelFiles& files) const {
  load_weights(path_, module, files);  // another model's shapes are refused by their names
  refuse_other_function(path_, text(kFunctionFile), files.function);
}

void load_weights(const std::string& folder, torch::nn::Module& module, const ModelFiles& files) {
  const torch::NoGradGuard no_grad;
  refuse_other_files(folder, files);
  const io::SafetensorsSet set(folder, files.stem);
  const NamedTensors wanted = saved_tensors(module, files, /*copy_buffers=*/false);
  std::vector<io::TensorShape> shapes;
  for (const auto& [name, tensor] : wanted)
    shapes.push_back({.name = name, .shape = nn::whole_sizes(tensor)});
  check_weights(folder, set, shapes);
  for (const auto& [name, tensor] : wanted) {
    const io::SafetensorsSet::Found found = set.at(name);
    nn::assign(tensor, io::mapped_tensor(*found.file, *found.entry));
  }
}

TensorDict Checkpoint::optimizer() const {
  if (!resumable_) {
    throw UsageError(
        "checkpoint",
        "{} holds weights only (save_only_model): the optimizer's state, the schedule, "
        "the random generators and the position in the data are missing, so no run "
        "can continue from it. Start a new run from its weights (in a training file: "
        "model.weights), or resume from another folder.",
        path_);
  }
  return read_tensors(path_ + "/" + kOptimizerFile);
}

TensorDict Checkpoint::rng(int rank) const {
  const std::string path = path_ + "/rng_state.safetensors";
  const auto refuse = [&](const std::string& name) {
    throw UsageError("checkpoint",
                     "{} has a tensor '{}', and those of a run are 0.cpu, 1.cpu and so on, for "
                     "each of its ranks. The file is damaged or another program's. Resume from "
                     "another checkpoint.",
                     path, name);
  };
  std::map<int, TensorDict> ranks;
  for (auto& [name, tensor] : read_tensors(path)) {
    int owner = -1;
    const char* const end = name.data() + name.size();
    const auto [dot, error] = std::from_chars(name.data(), end, owner);
    if (error != std::errc() || owner < 0 || dot == end || *dot != '.') refuse(name);
    ranks[owner].emplace(std::string(dot + 1, end), tensor);
  }
  if (ranks.empty()) return {};
  const int saved = static_cast<int>(ranks.size());
  if (ranks.rbegin()->first >= saved)
    refuse(fmt::format("{}.{}", ranks.rbegin()->first, ranks.rbegin()->second.begin()->first));
  TensorDict mine = ranks[rank % saved];
  if (rank < saved) return mine;
  TensorDict derived;
  for (const auto& [device, state] : mine)
    if (at::Tensor own = derived_state(device, state, rank); own.defined())
      derived.emplace(device, std::move(own));
  return derived;
}

std::string Checkpoint::text(const std::string& file) const {
  const std::string path = path_ + "/" + file;
  return std::filesystem::exists(path) ? read_file(path) : std::string();
}

std::string pack_tensors(const TensorDict& tensors) {
  std::string bytes;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor flat = writable(tensor);
    bytes += fmt::format("{} {}\n", name, flat.nbytes());
    bytes.append(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  }
  return bytes;
}

TensorDict unpack_tensors(const std::string& bytes) {
  TensorDict tensors;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t space = bytes.find(' ', at);
    const std::size_t line = bytes.find('\n', at);
    LOCKSTEP_ASSERT(space < line && line != std::string::npos);
    const auto size = std::stoull(bytes.substr(space + 1, line - space - 1));
    LOCKSTEP_ASSERT(line + 1 + size <= bytes.size());
    at::Tensor tensor = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
    std::memcpy(tensor.mutable_data_ptr(), bytes.data() + line + 1, size);
    tensors.emplace(bytes.substr(at, space - at), tensor);
    at = line + 1 + size;
  }
  return tensors;
}

int generator_rank(const Mesh& mesh) {
  return mesh.batch().rank() + mesh.batch().size() * mesh.rank("pipeline");
}

std::string packed_random_state(const Mesh& mesh) {
  if (mesh.rank("tensor") != 0) return {};
  const optim::RngState all = optim::rng_state();
  TensorDict mine{{"cpu", all.at("cpu")}};
  const c10::Device device = mesh.world().device();
  if (!device.is_cpu()) mine.emplace(kOwnGpu, all.at(device.str()));
  return fmt::format("{} {}", generator_rank(mesh), pack_tensors(mine));
}

std::vector<TensorDict> unpack_random_states(const std::vector<std::string>& ranks) {
  std::map<int, TensorDict> ordered;
  for (const std::string& rank : ranks)
    if (!rank.empty())
      ordered.emplace(std::stoi(rank), unpack_tensors(rank.substr(rank.find(' ') + 1)));
  std::vector<TensorDict> states;
  for (auto& [rank, state] : ordered) states.push_back(std::move(state));
  return states;
}

void restore_random_state(const Mesh& mesh, const Checkpoint& checkpoint) {
  TensorDict mine = checkpoint.rng(generator_rank(mesh));
  const c10::Device device = mesh.world().device();
  if (auto gpu = mine.extract(kOwnGpu); gpu && !device.is_cpu()) {
    gpu.key() = device.str();
    mine.insert(std::move(gpu));
  }
  if (!mine.empty()) optim::set_rng_state(mine);
}

void warn_of_other_threads(const Mesh& mesh, const Checkpoint& checkpoint) {
  const World& world = mesh.world();
  const DataPosition& saved = checkpoint.position();
  const std::int64_t now = at::get_num_threads();
  if (!world.is_leader() || !world.device().is_cpu() || saved.world_size != mesh.batch().size())
    return;
  if (saved.threads == 0 || saved.threads == now) return;
  log::warning("checkpoint",
               "{} was saved with {} intra-op thread{} on each rank, and this run has {}. Sums are "
               "divided over threads, so the weights will not have the bits of an uninterrupted "
               "run. Start with OMP_NUM_THREADS={} for those.",
               checkpoint.path(), saved.threads, saved.threads == 1 ? "" : "s", now, saved.threads);
}

std::string scheduler_text(const std::string& type, double factor, std::int64_t step,
                           const std::vector<double>& rates,
                           std::optional<std::int64_t> step_count) {
  NodeMembers members;
  if (!type.empty()) {
    members.emplace_back("type", text_node(type));
    members.emplace_back("factor", real_node(factor));
  }
  members.emplace_back("last_epoch", integer_node(step));
  if (!rates.empty()) {
    std::vector<Node> list;
    for (const double rate : rates) list.push_back(real_node(rate));
    members.emplace_back("last_lr", list_node(std::move(list)));
  }
  if (step_count) members.emplace_back("step_count", integer_node(*step_count));
  return to_json(map_node(std::move(members))) + "\n";
}

std::string scaler_text(const optim::GradScalerState& state) {
  return to_json(map_node({{"scale", real_node(state.scale)},
                           {"growth_factor", real_node(state.growth_factor)},
                           {"backoff_factor", real_node(state.backoff_factor)},
                           {"growth_interval", integer_node(state.growth_interval)},
                           {"growth_tracker", integer_node(state.growth_tracker)}})) +
         "\n";
}

optim::GradScalerState parse_scaler_text(const std::string& text, const std::string& name) {
  const Node root = parse_json(text, name);
  const Node& map = as_map(root, "scaler");
  optim::GradScalerState state;
  const auto read = [&](const char* key, double& value) {
    if (const Entry* entry = map.find(key)) value = as_real(entry->value, key);
  };
  const auto count = [&](const char* key, std::int64_t& value) {
    if (const Entry* entry = map.find(key)) value = as_integer(entry->value, key);
  };
  read("scale", state.scale);
  read("growth_factor", state.growth_factor);
  read("backoff_factor", state.backoff_factor);
  count("growth_interval", state.growth_interval);
  count("growth_tracker", state.growth_tracker);
  return state;
}

}  // namespace lockstep::train
