// TrainerTask: the model, data and metrics that a Trainer trains with. TrainResult: its result.
// Observer: callbacks in between.
//
//   lockstep::TrainerTask task;
//   task.module = net.ptr();
//   task.loss = [&](const lockstep::data::Batch& batch) {
//     return torch::cross_entropy_loss(net(batch.data), batch.target);
//   };
//   task.train_data = dataset;
//
// Values; the Trainer shares module, datasets and optimizer, and moves the module to the world's
// device.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/batch.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/parallelism.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep {

// How a checkpoint stores the model: all of it, or a part under its own names, such as the adapters
// of a model whose base is in another folder.
//
//   parts.model_files = {.stem = lockstep::models::kAdapterStem,
//                        .config = lockstep::models::kAdapterConfig,
//                        .tensors = [&] { return lockstep::models::lora_tensors(*net, config); }};
//
// The function is called on the thread that saves or loads.
struct ModelFiles {
  std::string stem = "model";          // names <stem>.safetensors
  std::string config = "config.json";  // the file that has the model's configuration
  // The tensors by their names in the file, in the module's own memory, so that loading can write
  // to them. Empty: every parameter and buffer of the module.
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> tensors{};
  // JSON, a map: the model's computation apart from its tensors, by the names of its settings, such
  // as models::function_text(net->config()). It is saved as model_function.json, and a run with
  // another value does not resume from it. Empty: no such file, and no comparison.
  std::string function{};
  // Further small files of the folder, by name, and their texts.
  std::vector<std::pair<std::string, std::string>> texts{};
};

// The result of a forward pass: the loss and, if metrics are computed from it, the model's output.
// A function that returns only the loss may return the tensor itself.
struct LossOutput {
  LossOutput(at::Tensor mean_loss, at::Tensor model_output = {})
      : loss(std::move(mean_loss)), output(std::move(model_output)) {}
  at::Tensor loss;
  at::Tensor output;
};

struct TrainerTask {
  std::shared_ptr<torch::nn::Module> module{};
  // The mean over the batch's tokens (samples, where targets are not sequences).
  std::function<LossOutput(const data::Batch&)> loss{};
  // The loss function launches the same work for batches of the same shapes, and need not run on
  // the host in every step: `compile_model: auto` may record it in a CUDA graph and replay that.
  bool capturable = false;
  data::DatasetPtr train_data{};
  data::DatasetPtr eval_data{};
  // Sums over a batch, by name ("accuracy": the number of right answers), from the output that
  // `loss` returned for it. Evaluation adds them over batches and ranks, counting each sample once,
  // and divides by the total number of tokens.
  std::function<std::map<std::string, at::Tensor>(const data::Batch&, const at::Tensor& output)>
      totals{};
  data::SamplerPtr sampler{};  // a different order of training samples than a shuffle
  // Parameter groups with options of their own instead of those that the arguments describe;
  // together they hold every trainable parameter of `module`. Each group's learning rate is its
  // peak, which the schedule scales. learning_rate, weight_decay, optim and its other keys then
  // have no effect.
  std::vector<optim::ParamGroup> param_groups{};
  // Or an optimizer of your own; shard_optimizer has no effect then.
  std::function<std::unique_ptr<optim::Optimizer>(Parallelism&)> make_optimizer{};
  // Another way for ranks to train `module` than DistributedDataParallel, whose keys have no effect
  // then. fsdp, shard_optimizer: true and degrees of other axes are refused beside it.
  std::function<std::shared_ptr<Parallelism>(std::shared_ptr<torch::nn::Module>, Mesh)>
      make_parallelism{};
  // Replaces the schedule of lr_scheduler_type: the factor of the groups' peak learning rates after
  // `steps` optimizer steps.
  std::function<double(std::int64_t steps)> schedule{};
  // JSON, the config.json of every checkpoint, for programs that load the model elsewhere
  // (models::config_json). Empty: no such file.
  std::string model_config{};
  // The part of the module that checkpoints hold, such as its adapters.
  ModelFiles model_files{};
  // After train() the module is whole on every rank. False: under fsdp and in a pipeline it stays
  // divided, for models that do not fit one; its checkpoints have it.
  bool whole_at_end = true;
  // For the log's `mfu`: floating-point operations of a token (of a sample, where there are none),
  // forward and backward without what is computed a second time. 0: not known.
  double flops_per_token = 0;
  // Floating-point operations that one of the run's devices can do in a second. 0: not known.
  double device_peak_flops = 0;
};

struct TrainResult {
  std::int64_t global_step = 0;
  std::int64_t first_step = 0;  // where this call began; global_step: nothing was left to train
  // Mean over the steps of this call; for a run that was already complete, the recorded value (NaN:
  // there is none).
  double train_loss = 0;
  train::Metrics metrics{};  // the run's summary: train_runtime, train_loss, ...; empty: stopped
  int stop_signal = 0;       // the signal that ended it; 0: it came to its end
  std::string checkpoint;    // the newest that this call committed (rank 0; else empty)
  // The newest step from which a run can continue, on every rank identically; -1: there is none.
  std::int64_t durable_step = -1;
  // The step of the last save if that save could not be written, on every rank; -1: it was written.
  std::int64_t lost_step = -1;
  // 143 promises that nothing is lost. The code is 1 for a stop whose own save failed, or wrote
  // only weights, and for a run whose last save failed.
  int exit_code() const {
    if (stop_signal != 0) return durable_step == global_step ? 143 : 1;
    return lost_step < 0 ? 0 : 1;
  }
};

// An event of a run. Pointers are null in events to which they do not apply.
struct Event {
  const train::TrainerState& state;
  int rank = 0;
  // Set while training. A change in on_optimizer_step on every rank (set_lr) holds for that step;
  // the schedule sets the next learning rate.
  optim::Optimizer* optimizer = nullptr;
  const train::LogEntry* entry = nullptr;  // on_log, on_evaluate
  const std::string* path = nullptr;       // on_save: the folder
  const std::string* text = nullptr;       // what went wrong, although the run continues (on_alert)
  // The observer's requests, read after the call.
  bool stop = false;
  bool save = false;
  bool evaluate = false;
};

// Callbacks for the events of a run, which may request a stop, a save or an evaluation.
//
//   struct Print : lockstep::Observer {
//     void on_log(lockstep::Event& event) override { std::cout << event.entry->step << '\n'; }
//   };
//   trainer.add(std::make_shared<Print>());
//
// Every rank calls its observers for every event, at the same steps. A request on any rank
// (event.stop) is agreed on in the next step's exchange and carried out by all.
//
// Called on the training thread; an exception ends the run. Shared with the trainer.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_train_begin(Event&) {}
  virtual void on_train_end(Event&) {}
  virtual void on_epoch_begin(Event&) {}
  virtual void on_epoch_end(Event&) {}
  virtual void on_step_begin(Event&) {}
  virtual void on_substep_end(Event&) {}     // a micro-batch that was not the window's last
  virtual void on_optimizer_step(Event&) {}  // with averaged gradients; captured steps: before all
  virtual void on_step_end(Event&) {}
  virtual void on_log(Event&) {}
  virtual void on_evaluate(Event&) {}
  virtual void on_save(Event&) {}   // handed to the writer; durable a little later
  virtual void on_alert(Event&) {}  // on every rank, a step after it was logged
};

}  // namespace lockstep
