// As many devices as there are ranks; before.cpp is the same program for one.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

constexpr std::int64_t kSamples = 4096, kBatch = 32;

void train(lockstep::World& world) {
  torch::manual_seed(0);
  const torch::Device device = world.device();
  torch::nn::Sequential net(torch::nn::Linear(20, 64), torch::nn::ReLU(),
                            torch::nn::Linear(64, 10));
  net->to(device);
  lockstep::DistributedDataParallel model{net, world};
  torch::optim::Adam optimizer(net->parameters());
  const auto data = torch::randn({kSamples, 20});
  const auto target = data.matmul(torch::randn({20, 10})).argmax(1);

  for (int epoch = 0; epoch < 10; ++epoch) {
    double loss_sum = 0;
    // The same order on every rank (the same seed), of which each takes its part.
    const auto even = kSamples - kSamples % world.size();
    const auto order = torch::randperm(kSamples).slice(0, world.rank(), even, world.size());
    for (const auto& batch : order.split(kBatch)) {
      const auto x = data.index_select(0, batch).to(device);
      const auto y = target.index_select(0, batch).to(device);
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(model(x), y);
      loss.backward();
      optimizer.step();
      loss_sum += loss.item<double>() * x.size(0);
    }
    const double mean = world.mean(loss_sum / order.size(0));
    if (world.is_leader()) std::printf("Epoch %d: loss %.4f\n", epoch, mean);
  }
}

int main() {
  return lockstep::run(train);
}
