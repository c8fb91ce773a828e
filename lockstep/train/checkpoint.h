// A checkpoint: the folder checkpoint-<step>/ from which a run continues as if it had never ended.
//
//   model.safetensors        weights and buffers, Hugging Face's names (sharded with an index above
//                            5 GB); transformers loads them
//   config.json              what the model is, where the task says so (TrainerTask::model_config)
//                            With adapters (ModelFiles) adapter_model.safetensors and
//                            adapter_config.json instead of these two; PEFT loads them
//   model_function.json      what the model computes beside its weights (ModelFiles::function)
//   trainer_state.json       step, epoch, best metric, log history: Hugging Face's fields
//   optimizer.safetensors    by parameter name: "h.0.attn.weight.exp_avg"
//   scheduler.json, scaler.json, training_args.json
//   rng_state.safetensors    every rank's generators: "0.cpu", "1.cpu", ...
//   sampler.json             the cursor in the epoch's order of samples
//   SHA256SUMS               digests and sizes of all of them, for `sha256sum -c` too
//
// The name is the commit (lockstep/io/directory.h). A folder with this name is whole, or its
// manifest says what is damaged.
//
//   write_checkpoint("out/checkpoint-40", contents);
//   const auto found = find_checkpoint("out", "auto");      // newest that verifies
//   Checkpoint checkpoint(found.path);
//   checkpoint.load_model(*net);
//
// Functions on files; one thread per folder. Transformers cannot resume from these folders: the
// optimizer's and the generators' files are ours.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/optim/amp.h"
#include "lockstep/train/task.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep {
class Mesh;
class World;
}  // namespace lockstep

namespace lockstep::train {

std::string checkpoint_path(const std::string& output_dir, std::int64_t step);

using TensorDict = std::map<std::string, at::Tensor>;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Tensors on any device; those that are not on the CPU, or not dense, are copied while writing.
struct CheckpointContents {
  NamedTensors model{};
  TensorDict optimizer{};
  std::vector<TensorDict> rng{};  // by rank: "cpu", "cuda" (its own GPU)
  TrainerState state{};
  DataPosition position{};
  std::string scheduler{};  // JSON objects; empty: no such file
  std::string scaler{};
  std::string arguments{};
  std::string model_config{};
  ModelFiles files{};
  bool only_model = false;  // only weights and trainer_state.json: cannot be resumed from
};

inline constexpr const char* kModelFormat = "pt";  // what transformers looks for before it loads
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";

struct WriteOptions {
  std::uint64_t max_shard_bytes = 5'000'000'000;
  io::WriteProgress* progress = nullptr;
};

// Durable on return. Takes the place of a folder of that name. SystemError when the disk is full or
// fails: an earlier folder stays unharmed.
void write_checkpoint(const std::string& path, const CheckpointContents& contents,
                      const WriteOptions& options = {});
// Writes all files except those with the model's and the optimizer's tensors.
void write_small_files(io::AtomicDir& dir, const CheckpointContents& contents);
// Bytes of tensors that such a checkpoint holds.
std::uint64_t checkpoint_bytes(const CheckpointContents& contents);

// Parameters and buffers by qualified name. `copy_buffers`: copies the buffers, which the next
// forward changes; parameters change only in step().
NamedTensors model_tensors(const torch::nn::Module& module, bool copy_buffers);

// The tensors named by `files`, if it names any; otherwise model_tensors().
NamedTensors saved_tensors(const torch::nn::Module& module, const ModelFiles& files,
                           bool copy_buffers);

// The folder that `flag` stands for: "auto" is the newest in output_dir that verifies (step -1:
// there is none), anything else a folder that must verify (UsageError). Reads every byte.
io::Newest find_checkpoint(const std::string& output_dir, const std::string& flag);

// Loads the weights of a folder with model.safetensors, written by any program. It must have every
// parameter and buffer, in its shape, and nothing else (UsageError). Copies in place, and for a
// divided parameter (lockstep/nn/divided.h) only this rank's elements. With `files`, the same for
// the tensors that they name.
void load_weights(const std::string& folder, torch::nn::Module& module,
                  const ModelFiles& files = {});

// An opened folder, whose files are read on demand. UsageError names file and tensor.
class Checkpoint {
 public:
  explicit Checkpoint(std::string path);

  const std::string& path() const { return path_; }
  const TrainerState& state() const { return state_; }
  const DataPosition& position() const { return position_; }
  bool resumable() const { return resumable_; }

  // As load_weights(). UsageError names any difference to the saved model's function.
  void load_model(torch::nn::Module& module, const ModelFiles& files = {}) const;
  // The mapped file's memory, to be copied from: pages that are not accessed are not read.
  TensorDict optimizer() const;
  // The generators of this rank, for optim::set_rng_state; empty when none were saved. A rank that
  // the saved run did not have gets generators seeded with a checksum of its own number and of the
  // state of rank (rank modulo the saved number of ranks): defined by the checkpoint alone,
  // different for every rank, and not those of the run's first steps. So a run can resume on fewer
  // or more ranks.
  TensorDict rng(int rank) const;
  // A file's text; empty when it is not there.
  std::string text(const std::string& file) const;

 private:
  std::string path_;
  TrainerState state_;
  DataPosition position_;
  bool resumable_ = false;
};

// Converts generators' states to bytes for the rank that writes, and back.
std::string pack_tensors(const TensorDict& tensors);
TensorDict unpack_tensors(const std::string& bytes);

// The index of this rank's generators. Ranks with copies of a part of a model that see the same
// samples share generators; stages of a pipeline compute other layers and have others.
int generator_rank(const Mesh& mesh);
// This rank's generators in the checkpoint's form: "cpu", and "cuda" for its own GPU, whose number
// may change before the run continues. As bytes for the rank that writes; empty if another rank
// sends the same.
std::string packed_random_state(const Mesh& mesh);
// The generators of all ranks, in the order of generator_rank().
std::vector<TensorDict> unpack_random_states(const std::vector<std::string>& ranks);
void restore_random_state(const Mesh& mesh, const Checkpoint& checkpoint);

// Rank 0 warns when the number of intra-op threads differs from the saved run's and only that
// changes the bits: on the CPU, with the same number of ranks.
void warn_of_other_threads(const Mesh& mesh, const Checkpoint& checkpoint);

// scheduler.json: the schedule's name and factor after `step` steps (empty: none), the learning
// rate of every parameter group, and how often a torch::optim::LRScheduler was stepped.
std::string scheduler_text(const std::string& type, double factor, std::int64_t step,
                           const std::vector<double>& rates,
                           std::optional<std::int64_t> step_count = {});

// scaler.json. `name` stands for the file in errors.
std::string scaler_text(const optim::GradScalerState& state);
optim::GradScalerState parse_scaler_text(const std::string& text, const std::string& name);

}  // namespace lockstep::train
