// Save and resume, on any number of ranks.
//
//   06_checkpoint_resume DIRECTORY STEPS       trains until STEPS, from the newest checkpoint there
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>

namespace {

constexpr std::uint64_t kSeed = 3;
constexpr std::int64_t kSamples = 240, kBatch = 4, kSaveEvery = 10;

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Dropout(0.1),
                               torch::nn::Linear(32, 1));
}

lockstep::data::DatasetPtr make_dataset() {
  const auto x = torch::randn({kSamples, 8});
  return std::make_shared<lockstep::data::TensorDataset>(x, x.square().mean(1, /*keepdim=*/true));
}

void train(lockstep::World& world, const std::string& directory, std::int64_t steps) {
  auto net = lockstep::optim::with_seed(kSeed, make_net);
  const auto dataset = lockstep::optim::with_seed(kSeed, make_dataset);
  lockstep::optim::seed_everything(kSeed, world.rank());
  net->to(world.device());
  lockstep::DistributedDataParallel model{net, world};
  lockstep::optim::AdamW optimizer{model.parameters(), {.lr = 1e-2}};
  auto loader = lockstep::data::loader(dataset, world,
                                       {.batch_size = kBatch, .shuffle = true, .seed = kSeed});

  const lockstep::CheckpointParts parts{
      .module = net.get(), .optimizer = &optimizer, .loader = &loader};
  std::int64_t step = 0, epoch = 0;
  double best = 1e9;
  if (const auto resumed = lockstep::resume(directory, world, parts)) {
    step = resumed->step;
    epoch = resumed->epoch;
    if (const double* loss = lockstep::train::find_metric(resumed->metrics, "best")) best = *loss;
    if (world.is_leader())
      std::printf("resumed from %s, saved by %lld rank(s)\n",
                  std::filesystem::path(resumed->path).filename().c_str(),
                  static_cast<long long>(resumed->world_size));
  }

  lockstep::RunLog run_log{directory, world, {.total_steps = steps}};
  for (; step < steps; ++epoch) {
    for (auto& batch : loader.epoch(epoch)) {
      const auto loss = torch::mse_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      if (++step % kSaveEvery == 0) {
        const double mean =
            lockstep::all_reduce(world, loss.item<double>(), lockstep::ReduceOp::kAvg);
        best = std::min(best, mean);
        run_log.log({{"loss", mean}}, step);
        lockstep::save_checkpoint(
            directory, world, parts,
            {.step = step, .save_total_limit = 3, .metrics = {{"loss", mean}, {"best", best}}});
        if (world.is_leader())
          std::printf("step %lld: loss %.4f, best %.4f\n", static_cast<long long>(step), mean,
                      best);
      }
      if (step >= steps) break;
    }
  }
  model.verify_replicas();
  if (world.is_leader()) std::printf("replicas identical\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: 06_checkpoint_resume DIRECTORY STEPS\n");
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return lockstep::run([&](lockstep::World& world) { train(world, argv[1], std::atoll(argv[2])); });
}
