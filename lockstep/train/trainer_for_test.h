// A task for a Trainer that takes milliseconds: a small network, random samples, plain arguments.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/io/directory.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/trainer.h"

namespace lockstep::train {

inline constexpr std::int64_t kFeatures = 6, kClasses = 3;

// A generator of their own: ranks are threads here, and the default one is the process's.
inline at::Generator generator(std::uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

inline data::DatasetPtr dataset(std::int64_t samples, std::uint64_t seed) {
  auto random = generator(seed);
  const at::Tensor x = torch::randn({samples, kFeatures}, random);
  const at::Tensor y = x.matmul(torch::randn({kFeatures, kClasses}, random)).argmax(1);
  return std::make_shared<data::TensorDataset>(x, y);
}

inline torch::nn::Sequential network() {
  torch::nn::Sequential net(torch::nn::Linear(kFeatures, 8), torch::nn::ReLU(),
                            torch::nn::Linear(8, kClasses));
  const torch::NoGradGuard no_grad;
  auto random = generator(7);
  for (at::Tensor& p : net->parameters()) p.copy_(torch::randn(p.sizes(), random) * 0.3);
  return net;
}

inline TrainerTask task_for(torch::nn::Sequential net, data::DatasetPtr train,
                            data::DatasetPtr eval = nullptr) {
  TrainerTask task;
  task.module = net.ptr();
  task.loss = [net](const data::Batch& batch) mutable {
    const at::Tensor logits = net->forward(batch.data);
    return LossOutput(torch::cross_entropy_loss(logits, batch.target), logits);
  };
  task.totals = [](const data::Batch& batch, const at::Tensor& logits) {
    const at::Tensor right = logits.argmax(1) == batch.target;
    return std::map<std::string, at::Tensor>{{"accuracy", right.sum()}};
  };
  task.train_data = std::move(train);
  task.eval_data = std::move(eval);
  return task;
}

// With a loss that is not finite in the passes that `bad` chooses, counted from 0.
inline TrainerTask spoiled(TrainerTask task, std::function<bool(std::int64_t pass)> bad) {
  task.loss = [loss = task.loss, bad = std::move(bad),
               pass = std::int64_t{0}](const data::Batch& batch) mutable {
    return LossOutput(loss(batch).loss * (bad(pass++) ? NAN : 1.0));
  };
  return task;
}

inline TrainingArguments arguments(const std::string& output_dir) {
  TrainingArguments a;
  a.output_dir = output_dir;
  a.per_device_train_batch_size = 4;
  a.learning_rate = 1e-2;
  a.logging_steps = 5;
  a.save_strategy = Interval::kNo;
  a.disable_tqdm = true;
  a.enable_jit_checkpoint = false;  // ranks are threads here; signals belong to the process
  return a;
}

// The steps of the checkpoints in the directory.
inline std::vector<std::int64_t> steps_in(const std::string& directory) {
  std::vector<std::int64_t> steps;
  for (const io::NumberedDir& dir : io::list_numbered(directory, kCheckpointPrefix))
    steps.push_back(dir.step);
  return steps;
}

// A Trainer that is evaluated after every step, with these values as `metric`.
struct Scored {
  Scored(const std::string& output_dir, std::vector<double> by_step, World ranks = {})
      : scores(std::move(by_step)), world(std::move(ranks)), a(arguments(output_dir)) {
    a.max_steps = static_cast<std::int64_t>(scores.size());
    a.eval_strategy = a.save_strategy = Interval::kSteps;
    a.eval_steps = a.save_steps = 1;
    a.metric_for_best_model = "accuracy";
  }
  const TrainerState& train() {
    TrainerTask task = task_for(net, dataset(64, 1), dataset(5, 2));
    task.totals = [this](const data::Batch& batch, const at::Tensor&) {
      const double score = scores[static_cast<std::size_t>(trainer->state().global_step - 1)];
      const double sum = score * static_cast<double>(batch.samples());
      return std::map<std::string, at::Tensor>{
          {a.metric_for_best_model, at::scalar_tensor(sum, at::kDouble)}};
    };
    trainer = std::make_unique<Trainer>(world, task, a);
    result = trainer->train();
    return trainer->state();
  }
  std::vector<double> scores;
  World world;
  TrainingArguments a;
  torch::nn::Sequential net = network();
  std::unique_ptr<Trainer> trainer;
  TrainResult result;
};

inline at::Tensor flat(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const auto& p : module.parameters()) all.push_back(p.detach().flatten());
  return at::cat(all);
}

}  // namespace lockstep::train
