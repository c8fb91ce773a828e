// What the snippets in documents and headers assume, declared and never defined: the test compiles
// them, nothing is linked. A name that a snippet declares itself hides the one here.
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/data/instruction.h"
#include "lockstep/data/profile.h"
#include "lockstep/data/token_shards.h"
#include "lockstep/lockstep.h"
#include "lockstep/memory/cpu_cache.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/device_map.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/monitor/gpu_memory.h"
#include "lockstep/nn/block.h"
#include "lockstep/nn/tensor_group.h"
#include "lockstep/optim/ema.h"
#include "lockstep/optim/rule.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/config.h"
#include "lockstep/train/stop_signals.h"

namespace snippets {

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x);
  torch::nn::Linear body{nullptr}, head{nullptr};
};
TORCH_MODULE(Net);

extern lockstep::World world;
extern Net net;
extern lockstep::DistributedDataParallel<Net> model;
extern lockstep::optim::AdamW optimizer;
extern lockstep::optim::Schedule schedule;
extern lockstep::optim::GradScaler scaler;
extern lockstep::optim::AdamWOptions options;
extern lockstep::data::DatasetPtr dataset;
extern lockstep::data::Loader loader;
extern lockstep::Trainer trainer;
extern lockstep::data::Batch batch;
extern lockstep::TrainingArguments arguments;
extern at::Tensor x;
extern at::Tensor loss;
extern double base_lr;
extern double local_loss;
extern std::int64_t epoch;
extern std::int64_t step;
extern std::int64_t steps;

void train(lockstep::World& world);
void train_step(const at::Tensor& data, const at::Tensor& target);
void train_step(const lockstep::data::Batch& batch);
at::Tensor loss_of(const at::Tensor& output);
void evaluate(Net net);
at::Tensor block(const at::Tensor& x);

}  // namespace snippets
