// A training loop of your own with everything a long run needs: a loader, accumulation, bf16,
// clipping, a schedule, figures, stop signals, save and resume. docs/own_loop.md goes through it.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>

namespace {

namespace data = lockstep::data;
namespace optim = lockstep::optim;

constexpr std::uint64_t kSeed = 1;
constexpr std::int64_t kSamples = 2048, kFeatures = 20, kClasses = 5;
constexpr std::int64_t kBatch = 16, kAccumulate = 2, kWarmup = 20, kLogEvery = 10, kSaveEvery = 50;
constexpr double kLr = 3e-3;

struct Flags {
  std::string output_dir = "out/own_loop";
  std::int64_t epochs = 4;
};

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(kFeatures, 64), torch::nn::ReLU(),
                               torch::nn::Dropout(0.1), torch::nn::Linear(64, kClasses));
}

data::DatasetPtr make_dataset() {
  const auto x = torch::randn({kSamples, kFeatures});
  return std::make_shared<data::TensorDataset>(
      x, x.matmul(torch::randn({kFeatures, kClasses})).argmax(1));
}

void report(const lockstep::World& world, std::int64_t step, double loss) {
  if (world.is_leader()) std::printf("step %lld: loss %.4f\n", static_cast<long long>(step), loss);
}

int train(lockstep::World& world, const Flags& flags) {
  // Weights and data are the same on every rank; dropout is not.
  auto net = optim::with_seed(kSeed, make_net);
  const auto dataset = optim::with_seed(kSeed, make_dataset);
  optim::seed_everything(kSeed, world.rank());

  net->to(world.device());
  lockstep::DistributedDataParallel model{net, world};
  optim::AdamW optimizer{model, {.lr = kLr}};
  auto loader = data::loader(
      dataset, world, {.batch_size = kBatch, .shuffle = true, .seed = kSeed, .num_workers = 1});

  lockstep::CheckpointParts parts{
      .module = net.get(), .optimizer = &optimizer, .loader = &loader, .accumulation = kAccumulate};
  std::int64_t step = 0, epoch = 0;
  if (const auto resumed = lockstep::resume(flags.output_dir, world, parts)) {
    step = resumed->step;
    epoch = resumed->epoch;
    if (world.is_leader()) std::printf("resumed at step %lld\n", static_cast<long long>(step));
  }
  const auto left = lockstep::steps_left(parts, epoch, flags.epochs);
  const auto schedule = optim::make_schedule(
      {.name = "cosine", .warmup_steps = kWarmup, .total_steps = step + left, .lr = kLr});
  parts.schedule = &schedule;

  lockstep::RunLog run_log{flags.output_dir, world, {.total_steps = step + left}};
  lockstep::StopRequest stop{world};
  for (; epoch < flags.epochs; ++epoch) {
    for (auto& window : loader.windows(epoch, {.micro_batches = kAccumulate})) {
      at::Tensor mean = torch::zeros({}, world.device());  // this rank's share of the mean loss
      for (auto& micro : window) {
        at::Tensor loss;
        {
          const optim::Autocast autocast{world.device(), at::kBFloat16};
          loss = torch::cross_entropy_loss(model(micro.data), micro.target);
        }
        loss = loss * micro.weight;
        model.backward(loss, micro.last);
        mean += loss.detach();
      }

      optimizer.set_lr(kLr * schedule.factor(step));
      const optim::StepResult result = optimizer.step({.max_grad_norm = 1.0});
      optimizer.zero_grad();
      ++step;

      const bool stopping = stop.received();  // on all ranks, or on none
      const bool logging = step % kLogEvery == 0, saving = stopping || step % kSaveEvery == 0;
      if (logging || saving) world.all_reduce(mean, lockstep::ReduceOp::kAvg).wait();
      if (logging)
        run_log.log(
            {{"loss", mean}, {"learning_rate", optimizer.lr()}, {"grad_norm", result.grad_norm}},
            step);
      if (saving) {
        report(world, step, mean.item<double>());
        lockstep::save_checkpoint(flags.output_dir, world, parts,
                                  {.step = step, .save_total_limit = 2});
      }
      if (stopping) return stop.exit_code();
    }
  }
  lockstep::save_checkpoint(flags.output_dir, world, parts, {.step = step, .save_total_limit = 2});
  model.verify_replicas();
  if (world.is_leader()) std::printf("replicas identical\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Flags flags;
  if (argc > 1) flags.output_dir = argv[1];
  if (argc > 2) flags.epochs = std::atoll(argv[2]);
  return lockstep::run([&](lockstep::World& world) { return train(world, flags); });
}
