// A user's programs, for the tests of training.
//
//   train_peer archive FILE                  torch::save of an MLP as tasks_test.py trains it
//   train_peer logits FOLDER OUTPUT          of a GPT with the folder's weights, for tokens 0 to 31
//   train_peer loop FOLDER STEPS             its own loop, resumed where FOLDER has checkpoints
//   train_peer samples FOLDER SAMPLES STOP [--key value...]
//
// The last trains and appends to FOLDER/<rank> a line for each micro-batch: the epoch, and the
// numbers of its samples. After step STOP rank 0 requests a checkpoint and a stop (0: never).
// It prints what train() returned. `loop` prints a random number of every rank and step.
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/resnet.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/run.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/config.h"
#include "lockstep/train/trainer.h"

namespace {

using namespace lockstep;

int write_archive(const std::string& path) {
  torch::manual_seed(11);
  models::Mlp net(models::MlpConfig{
      .inputs = 12, .hidden = 32, .layers = 2, .outputs = 5, .dropout = 0.2, .batch_norm = true});
  torch::save(net, path);
  return 0;
}

// The sizes are those of tasks_test.py.
int write_logits(const std::string& folder, const std::string& output) {
  models::Gpt gpt(models::GptConfig{
      .n_layer = 2, .n_head = 4, .n_embd = 64, .vocab_size = 257, .n_positions = 64});
  train::load_weights(folder, *gpt);
  const torch::NoGradGuard no_grad;
  const at::Tensor logits = gpt(torch::arange(32).unsqueeze(0)).contiguous();
  std::ofstream(output, std::ios::binary)
      .write(static_cast<const char*>(logits.const_data_ptr()),
             static_cast<std::streamsize>(logits.nbytes()));
  return 0;
}

struct StopAfter : Observer {
  explicit StopAfter(std::int64_t at) : step(at) {}
  void on_step_end(Event& event) override {
    if (event.state.global_step == step && event.rank == 0) event.stop = event.save = true;
  }
  std::int64_t step;
};

// As docs/training.md describes it.
void run_loop(World& world, const std::string& folder, std::int64_t steps) {
  optim::seed_everything(5, world.rank());
  torch::nn::Linear net(2, 2);
  std::int64_t step = 0;
  if (const io::Newest found = train::find_checkpoint(folder, "auto"); found.step >= 0) {
    const train::Checkpoint checkpoint(found.path);
    checkpoint.load_model(*net);
    optim::set_rng_state(checkpoint.rng(world.rank()));
    step = checkpoint.state().global_step;
  }
  DistributedDataParallel<torch::nn::Linear> model{net, world};
  optim::SGD optimizer{model.parameters(), {.lr = 0.1}};
  for (const std::int64_t last = step + steps; step < last;) {
    const at::Tensor drawn = torch::rand({4, 2});
    model(drawn).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    std::printf("step %lld rank %d drew %.9f\n", static_cast<long long>(++step), world.rank(),
                drawn[0][0].item<double>());
  }
  train::CheckpointContents contents;
  contents.model = train::model_tensors(*net, /*copy_buffers=*/true);
  contents.state.global_step = step;
  for (const std::string& bytes : all_gather_bytes(world, train::pack_tensors(optim::rng_state())))
    contents.rng.push_back(train::unpack_tensors(bytes));
  if (world.is_leader()) write_checkpoint(train::checkpoint_path(folder, step), contents);
  world.barrier();
}

TrainResult run_training(World& world, const std::string& folder, std::int64_t samples,
                         std::int64_t stop, const TrainingArguments& arguments) {
  std::ofstream log(folder + "/" + std::to_string(world.rank()), std::ios::app);
  torch::nn::Linear net(2, 2);
  Trainer* self = nullptr;
  TrainerTask task;
  task.module = net.ptr();
  task.train_data = std::make_shared<data::TensorDataset>(at::ones({samples, 2}));
  task.loss = [&](const data::Batch& batch) {
    log << static_cast<std::int64_t>(self->state().epoch);
    for (const std::int64_t index : batch.indices) log << ' ' << index;
    log << std::endl;
    return net(batch.data).square().mean();
  };
  Trainer trainer(world, task, arguments);
  self = &trainer;
  trainer.add(std::make_shared<StopAfter>(stop));
  return trainer.train();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 2 && args[0] == "archive") return write_archive(args[1]);
  if (args.size() == 3 && args[0] == "logits") return write_logits(args[1], args[2]);
  if (args.size() == 3 && args[0] == "loop")
    return run([&](World& world) { run_loop(world, args[1], std::stoll(args[2])); });
  if (args.size() < 4 || args[0] != "samples") {
    std::fputs(
        "usage: train_peer archive FILE | logits FOLDER OUTPUT | loop FOLDER STEPS | samples "
        "FOLDER SAMPLES STOP [--key value...]\n",
        stderr);
    return 2;
  }
  const train::Config config = train::load_config("", {args.begin() + 4, args.end()});
  return run([&](World& world) {
    const TrainResult result =
        run_training(world, args[1], std::stoll(args[2]), std::stoll(args[3]), config.arguments);
    std::printf("rank %d: step %lld, loss %.17g, %zu metrics\n", world.rank(),
                static_cast<long long>(result.global_step), result.train_loss,
                result.metrics.size());
    return result.exit_code();
  });
}
