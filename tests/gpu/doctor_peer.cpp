// Trains a wide network and reads a value from the device after every step, which a loop should not
// do.
//
//   doctor_peer FOLDER STEPS      the record is FOLDER/monitor
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/lockstep.h"

namespace {

constexpr std::int64_t kFeatures = 64, kWidth = 8192, kBatch = 8192;

struct ReadsEveryStep : lockstep::Observer {
  explicit ReadsEveryStep(at::Tensor watched) : value(std::move(watched)) {}
  void on_step_end(lockstep::Event&) override { last = value.detach().sum().item<double>(); }
  const at::Tensor value;
  double last = 0;
};

void train(lockstep::World& world, const std::string& folder, std::int64_t steps) {
  using torch::nn::Linear;
  using torch::nn::ReLU;
  torch::nn::Sequential net(Linear(kFeatures, kWidth), ReLU(), Linear(kWidth, kWidth), ReLU(),
                            Linear(kWidth, kWidth), ReLU(), Linear(kWidth, kWidth), ReLU(),
                            Linear(kWidth, 1));
  lockstep::TrainerTask task;
  task.module = net.ptr();
  task.loss = [net](const lockstep::data::Batch& batch) mutable {
    return net->forward(batch.data).square().mean();
  };
  task.train_data =
      std::make_shared<lockstep::data::TensorDataset>(torch::randn({64 * kBatch, kFeatures}));
  lockstep::TrainingArguments a;
  a.output_dir = folder;
  a.max_steps = steps;
  a.per_device_train_batch_size = kBatch;
  a.bf16 = true;
  a.learning_rate = 1e-6;
  a.logging_steps = 20;
  a.save_strategy = lockstep::Interval::kNo;
  a.dataloader_num_workers = 2;
  a.dataloader_pin_memory = true;
  a.disable_tqdm = true;
  lockstep::Trainer trainer(world, std::move(task), a);
  const auto reads = std::make_shared<ReadsEveryStep>(net->parameters().back());
  trainer.add(reads);
  trainer.train();
  std::printf("doctor_peer: the last value is %g\n", reads->last);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: doctor_peer FOLDER STEPS\n", stderr);
    return 2;
  }
  return lockstep::run([&](lockstep::World& world) { train(world, argv[1], std::atoll(argv[2])); });
}
